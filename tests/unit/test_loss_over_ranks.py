"""Memory, time and traffic of the loss over ranks: the commands run, and their arithmetic is right."""

import communication
import loss_over_ranks
import measurements
import network_time
import overlap
import pytest
import torch
from network_hosts import NoHostsError


def test_every_loss_on_one_rank_of_many_has_the_same_value(capsys, monkeypatch):
    """A rank alone gathers its own part N times, so every way to divide the batch must give one number."""
    rows, append = [], measurements.append
    monkeypatch.setattr(measurements, "append", lambda path, row: rows.append(row) or append(path, row))
    loss_over_ranks.main(["--quick"])
    assert "| 256 | 4 |" in capsys.readouterr().out
    for ranks, providers in (
        (1, {"leanclip infonce", "undivided"}),
        (4, {"leanclip infonce", *loss_over_ranks.NAMES}),
    ):
        losses = {
            row["provider"]: row["loss"]
            for row in rows
            if row["ranks"] == ranks and "fastclip" not in row["provider"]
        }
        assert set(losses) == providers
        assert list(losses.values()) == pytest.approx([losses["undivided"]] * len(losses), rel=1e-5)


def test_stored_cells_are_not_measured_again(tmp_path):
    output = tmp_path / "cells.csv"
    sizes = ["--batches", "64", "--ranks", "1", "--dim", "16", "--providers", "disco", "undivided", "--repeats", "1"]
    for _ in range(2):
        loss_over_ranks.main([*sizes, "--output", str(output)])
        assert [row["status"] for row in measurements.rows(output)] == ["measured"]


def test_traffic_is_counted_and_the_gradients_agree(capsys):
    communication.main(["--quick"])
    assert "| leanclip fastclip-v3 | 4 |" in capsys.readouterr().out


def test_traffic_of_a_ring():
    rows = {}
    for name in ("undivided", "local", "disco"):
        calls = communication.count_alone(name, 8, 512, 512, torch.bfloat16)
        rows[name] = communication.csv_row(name, 8, 512, 512, "bfloat16", "alone", calls)
    embeddings = 2 * 8 * 512 * 512 * 2 * 7 / 8
    assert [row["received_bytes"] / embeddings for row in rows.values()] == [1, 2, 3]
    assert rows["disco"]["25gbe_ms"] == pytest.approx(3 * rows["undivided"]["25gbe_ms"], rel=1e-3)


@pytest.mark.slow
def test_collectives_are_timed_on_hosts(capfd):
    try:
        network_time.main(["--quick"])
    except NoHostsError as error:
        pytest.skip(str(error))
    assert capfd.readouterr().out.count(" sent ") == 12


@pytest.mark.slow
def test_overlap_is_measured(capsys):
    overlap.main(["--quick"])
    assert "| leanclip-tiny | one machine | 2 | fastclip-v3 |" in capsys.readouterr().out

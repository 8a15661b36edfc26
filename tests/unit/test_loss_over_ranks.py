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


def test_tables_say_which_cells_were_not_measured(tmp_path):
    beyond_cap = loss_over_ranks.measure_cell("inf_cl", 2**20, 8, 512, 20.0, 1)
    assert beyond_cap["predicted_ms"] / 1e3 == pytest.approx(42 * 2**40 * 512 / 769e12, rel=1e-3)
    output = tmp_path / "cells.csv"
    measurements.append(output, beyond_cap)
    for provider, cell in {
        "leanclip infonce": {"status": "measured", "ms": 1234.56, "extra_gib": 0.5},
        "undivided": {"status": "out of memory"},
    }.items():
        measurements.append(output, beyond_cap | {"provider": provider} | cell)
    tables = loss_over_ranks.tables(output)
    assert tables["loss_memory"].rows == [["1,048,576", "8", "0.50", "out of memory", "not run"]]
    assert tables["loss_time"].rows == [["1,048,576", "8", "1,234.6", "out of memory", "not run (about 31 s)"]]


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


def test_predicted_time_of_measured_collectives(tmp_path):
    """1 Gbit/s at 80%: 100 MB/s."""
    gathered, scattered = (communication.Call(kind, 40_000_000) for kind in ("gathered", "scattered"))
    assert network_time.predicted(gathered, 2) == pytest.approx(200, rel=0.01)
    assert network_time.predicted(gathered, 4) == pytest.approx(300, rel=0.01)
    assert network_time.predicted(scattered, 4) == 2 * network_time.predicted(gathered, 4)
    output = tmp_path / "times.csv"
    for size, time in ((2e6, 5), (4e6, 40), (1000, 99)):
        row = {"provider": "disco", "processes": 2, "bytes": size, "ms": time, "low_ms": 4, "predicted_ms": 10}
        measurements.append(output, row)
    tables = network_time.tables(output)
    assert tables["network_time"].cell("DisCo-CLIP", "N = 2") == "45 / 20"
    assert [tables["network_ratio"].cell("median", end) for end in ("least", "most")] == ["0.50", "4.00"]


def test_stored_times_are_within_a_quarter_of_the_prediction():
    rows = measurements.rows(measurements.RESULTS / "network_time.csv")
    large = [row for row in rows if float(row["bytes"]) > network_time.LARGE]
    assert {int(row["processes"]) for row in large} == {2, 3, 4}
    for row in large:
        assert float(row["ms"]) == pytest.approx(float(row["predicted_ms"]), rel=0.25)

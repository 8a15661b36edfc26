"""The tables of evidence about ranks, traffic and wall clock: each command runs, and its arithmetic is right."""

import argparse
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import assemble
import communication
import loss_over_ranks
import pytest
import race_report
import table
import torch
import wall_clock


def test_rows_are_appended_whole(tmp_path):
    path = tmp_path / "rows.csv"
    assert table.rows(path) == []
    table.append(path, ("a", "b"), {"b": 2, "a": "x, y"})
    table.append(path, ("a", "b"), {"a": 3, "b": None})
    assert table.rows(path) == [{"a": "x, y", "b": "2"}, {"a": "3", "b": ""}]
    with pytest.raises(ValueError, match=r"row has \['a'\]"):
        table.append(path, ("a", "b"), {"a": 1})
    assert set(table.provenance()) == set(table.PROVENANCE)


def test_one_rank_of_many_has_the_same_loss_with_everybody(tmp_path, capsys, monkeypatch):
    """What a rank alone gathers is its own part N times, so every way to divide the batch must give one number."""
    command = loss_over_ranks
    kept, append = [], table.append
    monkeypatch.setattr(table, "append", lambda *given: kept.append(given[2]) or append(*given))
    assert command.main(["--quick"]) == 0
    assert "| 256 | 4 |" in capsys.readouterr().out
    infonce = [row for row in kept if "fastclip" not in row["provider"]]
    for ranks in (1, 4):
        found = {row["provider"]: row["loss"] for row in infonce if row["ranks"] == ranks}
        assert {"leanclip infonce", "undivided"} <= set(found)
        assert ranks == 1 or {"local", "disco"} <= set(found)
        assert list(found.values()) == pytest.approx([found["undivided"]] * len(found), rel=1e-5)


def test_cells_that_are_there_are_not_measured_again(tmp_path):
    command = loss_over_ranks
    given = ["--batches", "64", "--ranks", "1", "--dim", "16", "--providers", "disco", "undivided", "--repeats", "1"]
    output = tmp_path / "cells.csv"
    for _ in range(2):
        assert command.main([*given, "--output", str(output)]) == 0
        assert [row["status"] for row in table.rows(output)] == ["measured"]


def test_a_cell_beyond_the_cap_is_said_to_be_beyond():
    row = loss_over_ranks.cell("inf_cl", 2**20, 1, 512, 20.0, 1, "cpu")
    assert row["status"] == "not run"
    assert row["predicted_ms"] / 1e3 == pytest.approx(42 * 8 * 2**40 * 512 / 769e12, rel=1e-3)


@pytest.mark.parametrize(("split", "said"), [(8.1, "holds"), (16.2, "does not hold")])
def test_what_became_of_the_claim_is_said(split, said, tmp_path, capsys):
    command = loss_over_ranks
    output, empty = tmp_path / "cells.csv", dict.fromkeys(command.FIELDS, "")
    for provider, extra in (("undivided", 64.0), ("disco", split), ("leanclip infonce", 0.5)):
        cell = {"provider": provider, "batch": 65536, "ranks": 8, "ms": 9.0, "extra_gib": extra, "loss": 11.0}
        table.append(output, command.FIELDS, empty | cell | {"status": "measured"})
    assert command.main(["--write", "--output", str(output)]) == 0
    text = output.with_suffix(".md").read_text()
    assert f"O(B²/N) {said}: at 65,536 on 8 ranks" in text
    assert f"leanclip 0.50 GiB and 9.0 ms, the other {split:.2f} GiB" in text
    assert "local loss and that split" not in text


def test_what_does_not_fit_is_said_in_the_tables(tmp_path, capsys):
    command = loss_over_ranks
    output, empty = tmp_path / "cells.csv", dict.fromkeys(command.FIELDS, "")
    for given in (
        {"provider": "leanclip infonce", "status": "measured", "ms": 12.34, "extra_gib": 0.5, "loss": 9.0},
        {"provider": "undivided", "status": "out of memory"},
        {"provider": "local", "status": "measured", "ms": 2345.6, "extra_gib": 41.0, "loss": 9.001},
        {"provider": "disco", "status": "measured", "ms": 10.0, "extra_gib": 99.0, "loss": 9.0},
        {"provider": "inf_cl", "status": "not run", "predicted_ms": 31000.0},
    ):
        table.append(output, command.FIELDS, empty | {"batch": 8192, "ranks": 8} | given)
    assert command.main(["--write", "--output", str(output)]) == 0
    out = capsys.readouterr().out
    assert "| 8,192 | 8 | 0.50 | out of memory | 41.00 (> 40) | 99.00 (> 80) | not run |" in out
    assert "| 8,192 | 8 | 12.3 | out of memory | 2,345.6 | 10.0 | not run (about 31 s) |" in out
    assert "that keep a matrix, in ms: leanclip infonce at 8,192 on 8 (12.3 against 10.0)." in out
    assert "another number" not in out
    cell = {"provider": "inf_cl", "batch": 16384, "ranks": 8, "status": "measured", "ms": 1.0, "extra_gib": 0.1}
    for given in (cell | {"loss": 8.8}, cell | {"provider": "leanclip infonce", "loss": 9.0}):
        table.append(output, command.FIELDS, empty | given)
    assert command.main(["--write", "--output", str(output)]) == 0
    assert "On several ranks the loss of inf_cl came out as another number" in capsys.readouterr().out


def test_traffic_is_counted_and_the_gradients_agree(capsys):
    assert communication.main(["--quick"]) == 0
    out = capsys.readouterr().out
    assert "2 processes: gradients of leanclip fastclip-v3 differ from one process's" in out
    assert "the gradients those of one process with the whole batch, to " in out
    assert "leanclip fastclip-v3  N=2   b=16    float32   gloo  4 collectives" in out


def test_traffic_of_a_ring():
    command = communication
    batch, dim = 8 * 512, 512
    rows = {}
    for name in ("undivided", "local", "disco"):
        calls = command.alone(name, 8, 512, dim, torch.bfloat16)
        rows[name] = command.row_of(name, 8, 512, dim, "bfloat16", "alone", calls)
    embeddings = 2 * batch * dim * 2 * 7 / 8
    assert [row["received_bytes"] / embeddings for row in rows.values()] == [1, 2, 3]
    assert rows["disco"]["25gbe_ms"] == pytest.approx(3 * rows["undivided"]["25gbe_ms"], rel=1e-3)


def rows_of(trainer, lr, seconds, recalls, alone=True, seed=0):
    empty = dict.fromkeys(wall_clock.FIELDS, "")
    return [
        empty | {
            "trainer": trainer, "loss": "infonce", "lr": lr, "seed": seed, "model": "m", "batch": 512,
            "epochs": len(seconds), "samples": 1000, "workers": 2, "epoch": at + 1, "seconds": second,
            "startup_seconds": 5, "text_to_image_recall_at_10": recall, "device": "a GPU", "trainer_command": lr,
            "alone": alone, "run": f"{trainer} {lr} {alone} {recalls[-1]} {seed}",
        }
        for at, (second, recall) in enumerate(zip(seconds, recalls, strict=True))
    ]  # fmt: skip


def race(tmp_path, *runs):
    output = tmp_path / "wall_clock.csv"
    output.unlink(missing_ok=True)
    for run in runs:
        for row in rows_of(*run):
            table.append(output, wall_clock.FIELDS, row)
    return output


def test_wall_clock_compares_the_best_runs_at_the_first_epoch_that_suffices(tmp_path, capsys):
    output = race(
        tmp_path,
        ("open_clip", 1e-3, [40, 50, 60, 70], [0.1, 0.31, 0.4, 0.3]),  # best; there at epoch 2
        ("open_clip", 2e-3, [25, 35, 45, 55], [0.1, 0.2, 0.2, 0.2]),
        ("leanclip", 1e-3, [16, 20, 24, 28], [0.3, 0.3, 0.3, 0.2]),  # sooner, but not its best
        ("leanclip", 2e-3, [16, 20, 24, 28], [0.1, 0.2, 0.35, 0.4]),
    )
    assert wall_clock.main(["--write", "--output", str(output)]) == 0
    out = capsys.readouterr().out
    assert "the learning rates 0.001, 0.002 to choose from" in out
    base = "| open_clip infonce | 0.001 | 30.0% | each its own | 2 | 50.0 | 1.00 | 5.0 | 25.0 | 10.00 | 20.0 | 1.00 |"
    ours = (
        "| leanclip infonce, 4 epochs | 0.002 | 40.0% | 1 of 1 | 3 | 24.0 | 0.48 | 5.0 | 7.0 | 4.00 | 12.0 | 0.60 |"
    )
    assert base in out and ours in out
    assert "in at most half of its seconds: holds (0.48)" in out
    assert "Not complete" not in out
    assert output.with_suffix(".svg").read_text().startswith("<svg")


NAMES = ("open_clip infonce", "leanclip infonce, 2 epochs")


def test_wall_clock_compares_means_over_seeds(tmp_path, capsys):
    output = race(
        tmp_path,
        ("open_clip", 1e-3, [40, 50], [0.1, 0.20], True, 0),
        ("open_clip", 1e-3, [42, 56], [0.22, 0.22], True, 1),  # at its own final recall after 42 s
        ("leanclip", 1e-3, [16, 20], [0.1, 0.21], True, 0),
        ("leanclip", 1e-3, [16, 24], [0.21, 0.22], True, 1),
    )
    below = ("leanclip", 1e-3, [16, 24], [0.1, 0.209], True, 2)  # just below the mean of 20% and 22%
    assert wall_clock.main(["--write", "--output", str(output)]) == 0
    out = capsys.readouterr().out
    assert "recalls@10, 21.0%." in out
    assert "| open_clip infonce | 0.001 | 21.0 ± 1.4% | each its own | 1, 2 | 46.0 ± 5.7 | 1.00 |" in out
    assert "| leanclip infonce, 2 epochs | 0.001 | 21.5 ± 0.7% | 2 of 2 | 1, 2 | 18.0 ± 2.8 | 0.39 |" in out
    assert "in at most half of its seconds: holds (0.39). Its whole runs took 22.0 ± 2.8 s, 0.48 of them." in out
    assert "Only 1 of 2 of open_clip's runs were at that mean, after 42.0 s: 0.43 of these." in out
    best = (
        "The best of open_clip's runs ended at 22.0% and was there after 42.0 s: 1 of 2 of leanclip infonce, 2 epochs"
    )
    assert f"{best} reach that, after 24.0 s." in out
    assert "took 50.0 s (wall_clock.csv): 0.36 of that." in out
    assert all(f"{name}, seed {seed}<" in output.with_suffix(".svg").read_text() for name in NAMES for seed in (0, 1))
    for row in rows_of(*below):
        table.append(output, wall_clock.FIELDS, row)
    assert wall_clock.main(["--write", "--output", str(output)]) == 0
    out = capsys.readouterr().out
    assert "| 2 of 3 | 1, 2 | 18.0 ± 2.8 | 0.39 |" in out
    assert "does not hold: not all reach it." in out
    row = "".join(assemble._seconds(race_report.known(output)))
    assert "18.0 ± 2.8 s (2 of 3 runs), 3 seeds | 46.0 ± 5.7 s, each run to its own, 2 epochs, compiled, [its" in row
    assert "), 2 seeds |" in row


BASELINE = ("open_clip", 1e-3, [40, 50], [0.1, 0.2])
OURS = ("leanclip", 1e-3, [16, 20], [0.1, 0.2])
NO_TIME = ["", ""]
LINE = NAMES[1]


def compared(tmp_path, *runs):
    best, missing = race_report.compared(table.rows(race(tmp_path, *runs)))
    return {name: (line.runs[0].lr, line.final) for name, line in best.items()}, missing


def test_a_race_has_no_result_without_a_baseline_that_was_timed(tmp_path, capsys):
    without = ("open_clip", 1e-3, NO_TIME, [0.1, 0.2], False)
    for runs in ((OURS,), (OURS, without)):
        assert compared(tmp_path, *runs) == ({}, ["open_clip infonce, with the clock"])
    output = tmp_path / "wall_clock.csv"
    output.with_suffix(".svg").write_text("of an earlier state of the rows")
    assert wall_clock.main(["--write", "--output", str(output)]) == 0
    out = capsys.readouterr().out
    assert "No result yet" in out and "holds" not in out and not output.with_suffix(".svg").exists()
    assert "| open_clip infonce | 0.001 | 10.0% | 20.0% | 20.0% |  |  |  | wall_clock.csv |" in out


def test_the_best_rate_counts_and_must_have_been_timed(tmp_path):
    better = ("open_clip", 2e-3, NO_TIME, [0.1, 0.3], False)
    ours = ("leanclip", 2e-3, NO_TIME, [0.1, 0.1], False)
    assert compared(tmp_path, BASELINE, OURS, better, ours) == ({}, ["open_clip infonce, with the clock"])
    timed = ("open_clip", 2e-3, [40, 50], [0.1, 0.29])
    found, missing = compared(tmp_path, BASELINE, OURS, better, ours, timed)
    assert found == {"open_clip infonce": (2e-3, 0.29), LINE: (1e-3, 0.2)} and missing == []


def test_a_search_of_an_earlier_race_counts_and_its_clock_does_not(tmp_path, capsys):
    output = race(tmp_path, BASELINE, OURS)
    other = [("open_clip", 2e-3, [4, 5], [0.1, 0.15]), ("leanclip", 2e-3, [1, 2, 3], [0.1, 0.1, 0.19])]
    for at, run in enumerate(other):
        for row in rows_of(*run):
            fields = [name for name in row if name not in ("run", "alone")]  # as they were written then
            table.append(output.with_name("second_race.csv"), fields, {name: row[name] for name in fields})
        best, missing = race_report.compared(race_report.known(output))
        assert list(best) == ["open_clip infonce", *([LINE] if at else [])]  # not before both have tried it
        assert missing == ([] if at else [LINE])
    best, _ = race_report.compared(race_report.known(output))
    assert [run.final for line in best.values() for run in line.runs] == [0.2, 0.2]
    assert race_report.reached(best["open_clip infonce"], None).seconds == [50]
    race_report.write(output)
    out = capsys.readouterr().out
    assert "had the learning rates 0.001, 0.002 to choose from, tried with 2 or 3 epochs, in this race or an" in out
    searched = "| leanclip infonce, 3 epochs | 0.002 | 10.0% | 19.0% | 19.0% | 3.0 | 5.0 | 1.00 | second_race.csv |"
    assert searched in out


def test_earlier_races_are_told_whatever_became_of_them(tmp_path):
    for name, theirs, ours in (
        ("first_race.csv", ([40, 50, 60], [0.1, 0.3, 0.3]), ([4, 5, 6], [0.1, 0.2, 0.29])),
        ("second_race.csv", ([40, 50, 60], [0.1, 0.3, 0.3]), ([20, 30, 40], [0.1, 0.3, 0.2])),
        ("third_race.csv", ([40, 50, 60], [0.1, 0.1, 0.1]), ([20, 30, 40], [0.1, 0.3, 0.2])),
    ):
        for row in [*rows_of("open_clip", 1e-3, *theirs), *rows_of("leanclip", 1e-3, *ours)]:
            row |= {"loss": race_report.OURS} if row["trainer"] == "leanclip" else {}
            table.append(tmp_path / name, wall_clock.FIELDS, row)
    races = race_report.earlier(tmp_path)
    assert [(race.learned, race.share) for race in races] == [(True, None), (True, 0.6), (False, None)]
    lines = race_report.told_of_earlier(races)
    assert "| first_race.csv | 30.0% | 50.0 | 29.0% | not reached |  |" in lines
    assert "| second_race.csv | 30.0% | 50.0 | 20.0% | 30.0 | 0.60 |" in lines
    assert "| third_race.csv | 10.0%, did not learn |  | 20.0% |  |  |" in lines


def test_in_a_race_everyone_has_the_same_rates(tmp_path):
    other = ("leanclip", 2e-3, NO_TIME, [0.1, 0.1], False)
    assert compared(tmp_path, BASELINE, OURS, other) == ({"open_clip infonce": (1e-3, 0.2)}, [LINE])


def test_of_equal_rates_the_one_with_the_clock_counts(tmp_path):
    equal = [
        (trainer, lr, NO_TIME, [0.1, 0.2], False) for trainer in ("open_clip", "leanclip") for lr in (5e-4, 2e-3)
    ]
    found, missing = compared(tmp_path, *equal, BASELINE, OURS)
    assert found == {"open_clip infonce": (1e-3, 0.2), LINE: (1e-3, 0.2)} and missing == []


@pytest.fixture
def running(tmp_path, monkeypatch):
    """`measure` with runs that end as `recalls` says, or at 0.3, and the list of those that were run."""
    given = argparse.Namespace(
        model=tmp_path / "small.json", batch=8, epochs=1, wd=0.1, workers=1, seeds=[0], crop=0.9, compile=False,
        leanclip_compile="auto", leanclip_epochs=None, losses=["infonce"], lr=[1e-3, 2e-3, 4e-3], limit=math.inf,
        only=None, quick=True, trainers=wall_clock.TRAINERS,
    )  # fmt: skip
    given.model.write_text(json.dumps(wall_clock.TINY))
    data = wall_clock.Data([tmp_path / "train-000.tar"], tmp_path / "val.tar", 100)
    ran, recalls = [], {}

    def run(trial, given, data, folder, *, alone):
        ran.append((trial.trainer, trial.lr, alone))
        command = wall_clock.shown(trial, given.model, wall_clock.flags(trial, given, data, Path("logs")), data)
        recall = recalls.get(ran[-1], recalls.get(ran[-1][:2], 0.3))
        row = {"trainer": trial.trainer, "loss": trial.loss, "lr": trial.lr, "samples": 100, "epoch": 1, "epochs": 1}
        row |= {"seconds": 1.0, "startup_seconds": 1.0, "evaluation_seconds": 1.0, "trainer_command": command}
        row |= {"alone": alone, "run": len(ran), "text_to_image_recall_at_10": recall}
        return [dict.fromkeys(wall_clock.FIELDS, "") | row]

    monkeypatch.setattr(wall_clock, "run", run)
    monkeypatch.setattr(wall_clock, "prepare", lambda *_: data)
    return given, ran, recalls, lambda: wall_clock.measure(given, tmp_path / "rows.csv")


def test_wall_clock_times_the_middle_rate_and_what_was_better(running):
    _, ran, recalls, measure = running
    recalls |= {("open_clip", 4e-3): 0.5, ("open_clip", 2e-3): 0.4, ("leanclip", 2e-3): 0.4}
    assert measure() == 0
    assert ran[:2] == [("open_clip", 2e-3, True), ("leanclip", 2e-3, True)]
    others = [(trainer, lr, False) for trainer in ("leanclip", "open_clip") for lr in (1e-3, 4e-3)]
    assert sorted(ran[2:6]) == others
    assert ran[6:] == [("open_clip", 4e-3, True)]
    assert measure() == 0
    assert len(ran) == 7  # all of it was there


def test_wall_clock_of_equal_rates_times_none_twice(running):
    _, ran, _, measure = running
    measure()
    assert len(ran) == 6 and [each for each in ran if each[2]] == [
        ("open_clip", 2e-3, True),
        ("leanclip", 2e-3, True),
    ]


def test_wall_clock_times_the_best_rate_with_every_seed(running):
    given, ran, recalls, measure = running
    given.seeds, given.leanclip_epochs = [0, 1], 3
    recalls |= {("open_clip", 4e-3): 0.5}
    measure()
    timed = [("open_clip", 4e-3, True), ("leanclip", 2e-3, True)]
    assert ran[6:] == [timed[0], timed[0], timed[1]]  # leanclip's middle rate with its first seed was there
    measure()
    assert len(ran) == 9


def test_wall_clock_searches_side_by_side_with_every_seed_of_the_best(running):
    given, ran, recalls, measure = running
    given.seeds, given.only = [0, 1], "search"
    recalls |= {("open_clip", 4e-3): 0.5}
    measure()
    rates = [(trainer, lr, False) for trainer in ("leanclip", "open_clip") for lr in (1e-3, 2e-3, 4e-3)]
    assert sorted(ran[:6]) == rates
    assert sorted(ran[6:]) in [[("leanclip", lr, False), ("open_clip", 4e-3, False)] for lr in given.lr]
    measure()
    assert len(ran) == 8


def test_wall_clock_runs_the_trainers_that_were_asked_for(running):
    given, ran, _, measure = running
    given.trainers, given.seeds = ["leanclip"], [0, 1]
    measure()
    assert len(ran) == 4 and {trainer for trainer, _, _ in ran} == {"leanclip"}


def test_wall_clock_begins_nothing_after_its_limit(running):
    given, ran, _, measure = running
    given.limit = -1.0
    measure()
    assert ran == []


def test_wall_clock_runs_both_trainers(tmp_path, capfd, monkeypatch):
    pytest.importorskip("webdataset")
    monkeypatch.chdir(tmp_path)
    failed = wall_clock.main(["--quick", "--outputs", str(tmp_path / "said")])
    out, complaints = capfd.readouterr()
    assert failed == 0, complaints[-3000:]
    said = [path.read_text() for path in (tmp_path / "said").iterdir()]
    assert sorted("Train Epoch: 0" in text for text in said) == [False, True]  # ours, and open_clip's
    shutil.rmtree(tmp_path / "said")
    assert "| open_clip infonce | 0.001 |" in out
    assert "| leanclip infonce, 2 epochs | 0.001 |" in out
    assert list(tmp_path.iterdir()) == []  # a quick run keeps nothing


def test_wall_clock_knows_its_rows_by_all_that_was_given(running, tmp_path):
    given, _, _, measure = running
    measure()
    trial = wall_clock.Trial("leanclip", "infonce", 2e-3, 0)
    data = wall_clock.Data([tmp_path / "train-000.tar"], tmp_path / "val.tar", 100)
    known = wall_clock.Race(given, data, tmp_path, tmp_path / "rows.csv")
    assert len(known.curves(trial)) == 1
    for other in (replace(trial, lr=3e-3), replace(trial, seed=1), replace(trial, loss="siglip")):
        assert known.curves(other) == []
    known.data = replace(data, samples=99)
    assert known.curves(trial) == []
    known.data = data
    for name, value in (("epochs", 2), ("crop", 0.5), ("leanclip_epochs", 3)):
        before = getattr(given, name)
        setattr(given, name, value)
        assert known.curves(trial) == []
        setattr(given, name, before)
    assert len(known.curves(trial)) == 1

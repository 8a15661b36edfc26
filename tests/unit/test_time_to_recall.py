"""The comparison of the trainers by time: which runs count, and its clock."""

import measurements
import pytest
import time_to_recall
import time_to_recall_report as report


def store(path, trainer, lr, seconds, recalls, seed=0):
    for epoch, (second, recall) in enumerate(zip(seconds, recalls, strict=True), start=1):
        row = {
            "trainer": trainer, "loss": "infonce", "lr": lr, "seed": seed, "epochs": len(seconds), "epoch": epoch,
            "seconds": second, "startup_seconds": 5, "text_to_image_recall_at_10": recall, "device": "a GPU",
            "trainer_command": f"{trainer} {lr}",
        }  # fmt: skip
        measurements.append(path, row)


def test_best_learning_rate_counts_at_the_first_epoch_that_reaches_the_target(tmp_path):
    path = tmp_path / "wall_clock.csv"
    store(path, "open_clip", 1e-3, [40, 50, 60, 70], [0.1, 0.31, 0.4, 0.3])  # best; reached at epoch 2
    store(path, "open_clip", 2e-3, [25, 35, 45, 55], [0.1, 0.2, 0.2, 0.2])
    store(path, "leanclip", 1e-3, [16, 20, 24, 28], [0.3, 0.3, 0.3, 0.2])  # sooner, but not its best
    store(path, "leanclip", 2e-3, [16, 20, 24, 28], [0.1, 0.2, 0.35, 0.4])
    store(path, "leanclip", 4e-3, [1, 2, 3], [0.5, 0.5, 0.5])  # another length is another line
    assert [" | ".join(row) for row in report.line_table(path).rows] == [
        "open_clip infonce | 0.001 | 30.0% | own final recall | 2 | 50.0 | 1.00 | 5.0 | 25.0 | 10.00 | 20.0 | 1.00",
        "leanclip infonce, 4 epochs | 0.002 | 40.0% | 1 of 1 | 3 | 24.0 | 0.48 | 5.0 | 7.0 | 4.00 | 12.0 | 0.60",
        "leanclip infonce, 3 epochs | 0.004 | 50.0% | 1 of 1 | 1 | 1.0 | 0.02 | 5.0 | 0.0 | 1.00 | -4.0 | -0.20",
    ]


def test_evaluations_are_left_out_of_the_seconds():
    times = [(10, 0), (15, 0), (30, 1), (32, 1), (50, 2), (52, 2)]  # begin and end, by epoch
    events = [{"at": 100.0 + at, "epoch": epoch, "text_to_image": 0.1, "image_to_text": 0.2} for at, epoch in times]
    first, second = time_to_recall.epoch_times(events, 100.0)
    assert first["startup_seconds"] == 13  # of the five seconds of the first evaluation two are an evaluation
    assert (first["seconds"], second["seconds"], second["evaluation_seconds"]) == (28, 46, 6)


def test_both_trainers_run(tmp_path, capfd, monkeypatch):
    pytest.importorskip("webdataset")
    monkeypatch.chdir(tmp_path)
    time_to_recall.main(["--quick"])
    out = capfd.readouterr().out
    assert "| open_clip infonce | 0.001 |" in out and "| leanclip infonce, 2 epochs | 0.001 |" in out
    assert list(tmp_path.iterdir()) == []

"""The comparison of the trainers by time: which runs count, and its clock."""

import pytest
import time_to_recall


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

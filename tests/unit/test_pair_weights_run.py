"""Weights of pairs in a whole run: the setting, what the log says, and resuming."""

import json

import pytest
from checkpoint_runs import equal, saved_tensors, train

from refusal import refusal_code

SETTINGS = {"global_batch_size": 64, "loss": "dcl", "epochs": 4, "max_steps": 12, "save_every": 6}


def refits(folder):
    lines = [json.loads(line) for line in (folder / "logs/run/metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "pair_weights"]


@pytest.mark.parametrize(("mode", "on"), [("learned", True), ("auto", False)])
def test_the_log_says_at_each_fit_what_looks_wrong(mode, on, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("leanclip.losses.pair_weights.SMALLEST_SHARE", 1.0)  # never exceeded
    assert train(tmp_path, pair_weights=mode, **SETTINGS) == 0
    found = refits(tmp_path)
    assert [line["epoch"] for line in found] == [2, 3] and [line["on"] for line in found] == [on, on]
    assert all(sum(line["counts"]) >= 180 for line in found)  # epochs leave 8 of 200 out
    lines = [line for line in capsys.readouterr().out.splitlines() if "look wrong" in line]
    assert len(lines) == 2 and all(f"weights are {'on' if on else 'off'}" in line for line in lines)


def test_a_run_that_resumes_at_a_fit_logs_it_once(tmp_path):
    assert train(tmp_path, pair_weights="auto", **SETTINGS | {"max_steps": 6}) == 0
    assert train(tmp_path, pair_weights="auto", resume="auto", **SETTINGS) == 0
    assert [line["step"] for line in refits(tmp_path)] == [7, 10]


def test_too_few_visits_are_said_and_off_is_no_setting(tmp_path, capsys):
    short = {"loss": "infonce", "max_steps": 4, "save_every": 2}
    assert train(tmp_path, **short) == 0
    assert train(tmp_path, pair_weights="off", resume="auto", **short) == 0
    expected = saved_tensors(tmp_path, 4)
    assert train(tmp_path, pair_weights="auto", resume="auto", **short) == 2
    assert refusal_code(capsys.readouterr().err) == "resume.mismatch"
    (tmp_path / "logs/run").rename(tmp_path / "logs/plain")
    assert train(tmp_path, pair_weights="learned", epochs=1, **short) == 0
    assert "after 2 visits" in " ".join(capsys.readouterr().out.split())
    scored = saved_tensors(tmp_path, 4)
    equal({name: value for name, value in scored.items() if name in expected}, expected)
    assert scored["loss.state.scored"].max() == 1

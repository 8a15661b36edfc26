"""metrics.jsonl and run.json with damage: a run continues without what it does not need."""

import json
import os

import pytest

from leanclip.runs import RunDirectory
from leanclip.runs.metrics import MetricsLog, Result, read_results
from leanclip.runs.model_card import model_card


def test_damaged_facts_are_left_out(tmp_path):
    """The model card of every checkpoint is made of them, and a run does not end because of a card."""
    run = RunDirectory(tmp_path)
    facts = {"name": [], "model": 3, "notes": 7, "environment": "x", "architecture": [1], "ema": "0.9", "steps": 4}
    (tmp_path / "run.json").write_text(json.dumps(facts))
    assert run.facts() == {"steps": 4} and "# model" in model_card(run.facts(), {}, step=1)
    for text in ("[" * 100_000, '{"steps": ' + "9" * 400 + "}", "[]", "\x00"):
        (tmp_path / "run.json").write_text(text)
        assert run.facts() == {}


DAMAGED = (
    *("123", "[]", '{"kind": "train", "step": null}', "[" * 100_000, '{"step": ' + "9" * 400 + "}", "{"),
    *('{"kind": "eval", "step": 1, "set": []}', '{"kind": "eval", "step": 1, "set": "v", "metrics": {"a": []}}'),
)


@pytest.mark.parametrize("line", DAMAGED)
def test_damaged_metrics_are_moved_aside(tmp_path, capsys, line):
    path = tmp_path / "metrics.jsonl"
    rows = [json.dumps({"kind": "train", "step": step}) for step in (1, 1, 2, 3)]
    result = json.dumps({"kind": "eval", "step": 2, "set": "val", "metrics": {"top1": 0.5}})
    damaged = "\n".join([rows[0], line, *rows[1:], result, '{"kind": "tra'])
    path.write_text(damaged)
    assert read_results(path) == {"val": Result(2, {"top1": 0.5})}
    log = MetricsLog(path, resume_at=2)
    log.close()
    assert path.read_text().splitlines() == [*rows[:3], result] and log.results == read_results(path)
    assert (tmp_path / "metrics.jsonl.damaged-1").read_text() == damaged
    (warning,) = capsys.readouterr().out.splitlines()
    assert "1 unreadable lines" in warning and "metrics.jsonl.damaged-1" in warning


def test_metrics_that_are_no_file_are_moved_aside(tmp_path):
    path = tmp_path / "metrics.jsonl"
    os.mkfifo(path)
    (tmp_path / "metrics.jsonl.damaged-1").touch()
    log = MetricsLog(path, resume_at=2)
    log.train(step=3, loss=1.0)
    log.close()
    assert (tmp_path / "metrics.jsonl.damaged-2").is_fifo() and json.loads(path.read_text())["step"] == 3


def test_an_unfinished_last_line_is_no_damage(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "train", "step": 1}\n{"kind": "tra')
    MetricsLog(path, resume_at=2).close()
    assert path.read_text() == '{"kind": "train", "step": 1}\n' and list(tmp_path.iterdir()) == [path]
    assert capsys.readouterr().out == ""

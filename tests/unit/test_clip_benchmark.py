"""CLIP_benchmark itself, on a checkpoint of ours and data in its format."""

import importlib.util
import json
import subprocess
import sys
import time

import pytest
from evaluation_sets import emoji, write_captions, write_classes

from leanclip.cli import main
from leanclip.errors import UserError
from leanclip.evaluation import clip_benchmark as suite
from leanclip.evaluation.clip_benchmark import suite_sets
from leanclip.progress import ACTIVITY

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("clip_benchmark") is None, reason="clip_benchmark is not installed"
)


def evaluate(*arguments):
    with pytest.raises(SystemExit) as stop:
        main(["evaluate", *(str(argument) for argument in arguments), "--device", "cpu"])
    assert stop.value.code == 0


@pytest.mark.slow
def test_its_figures_equal_ours(small_run, tmp_path):
    samples = emoji(90)
    write_classes(tmp_path / "sets" / "groups", samples)
    write_captions(tmp_path / "sets" / "captions", samples)
    found = tmp_path / "found.json"
    ours = ["--zero-shot", tmp_path / "sets" / "groups", "--val-data", tmp_path / "sets" / "captions"]
    theirs = ["--suite", "clip_benchmark", "--suite-data", tmp_path / "sets", "--workers", 1, "--batch-size", 32]
    evaluate(small_run, *ours, *theirs, "--json", found)
    sets = json.loads(found.read_text())["sets"]
    for name, metrics in (
        ("groups", ["top1", "top5", "mean_per_class_recall"]),
        ("captions", [f"{way}_recall@{k}" for way in ("image_to_text", "text_to_image") for k in (1, 5, 10)]),
    ):
        ours, theirs = sets[name], sets[f"clip_benchmark/{name}"]
        assert theirs["by"] == "clip_benchmark" and theirs["kind"] == ours["kind"]
        for metric in metrics:
            assert theirs["metrics"][metric] == pytest.approx(ours["metrics"][metric], abs=1e-3), metric
    assert sets["captions"]["metrics"]["captions"] == 180
    assert 0 < sets["captions"]["metrics"]["text_to_image_recall@10"] < 1
    assert 0 < sets["groups"]["metrics"]["top1"] < sets["groups"]["metrics"]["top5"] < 1


def test_what_its_data_may_be(tmp_path):
    write_classes(tmp_path / "many" / "one", emoji(6))
    write_captions(tmp_path / "many" / "two", emoji(3))
    (tmp_path / "many" / "other").mkdir()
    found = suite_sets([str(tmp_path / "many"), f"imagenet1k={tmp_path}"])
    assert [(each.name, each.dataset, each.task) for each in found] == [
        ("one", "wds/one", "zeroshot_classification"),
        ("two", "wds/two", "zeroshot_retrieval"),
        ("imagenet1k", "imagenet1k", "auto"),
    ]
    assert [each.shards for each in found] == [2, 1, None]
    with pytest.raises(UserError, match=r"nshards\.txt.*NAME=ROOT"):
        suite_sets([str(tmp_path / "many" / "other")])
    with pytest.raises(UserError, match="--suite-data"):
        suite_sets([])


def test_as_long_as_it_runs_this_process_is_at_work(monkeypatch):
    monkeypatch.setattr(suite, "LOOK", 0.05)
    before = ACTIVITY.ticks
    code = "import sys, time; time.sleep(0.5); print('why', file=sys.stderr); sys.exit(4)"
    done = suite._run([sys.executable, "-c", code], stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (4, "why\n") and ACTIVITY.ticks >= before + 5


def test_it_does_not_outlive_an_interruption(monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(suite, "LOOK", 0.05)
    monkeypatch.setattr(ACTIVITY, "still_at_it", interrupted)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        suite._run([sys.executable, "-c", "import time; time.sleep(60)"])
    assert time.monotonic() - began < 30


def test_its_failure_is_one_line(small_run, tmp_path, capsys):
    write_captions(tmp_path / "captions", emoji(3))
    (tmp_path / "captions" / "test" / "0.tar").write_bytes(b"no tar")
    with pytest.raises(SystemExit) as stop:
        main(["evaluate", str(small_run), "--suite", "clip_benchmark", "--suite-data", str(tmp_path / "captions"),
              "--workers", "0", "--device", "cpu"])  # fmt: skip
    assert stop.value.code == 2
    assert "clip_benchmark failed on captions: " in capsys.readouterr().err.strip()

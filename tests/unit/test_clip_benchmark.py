"""CLIP_benchmark on a checkpoint of leanclip and data in its layout."""

import importlib.util
import json
import subprocess
import sys
import time

import pytest
from evaluation_sets import emoji, write_captions, write_classes

from leanclip.evaluation import clip_benchmark as suite
from leanclip.evaluation.clip_benchmark import suite_sets
from leanclip.progress import ACTIVITY
from refusal import assert_refused, exit_code, refuses

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("clip_benchmark") is None, reason="clip_benchmark is not installed"
)


@pytest.mark.slow
def test_its_metrics_equal_those_of_leanclip(small_run, tmp_path):
    samples = emoji(90)
    write_classes(tmp_path / "sets" / "groups", samples)
    write_captions(tmp_path / "sets" / "captions", samples)
    output = tmp_path / "metrics.json"
    ours = ["--zero-shot", tmp_path / "sets" / "groups", "--val-data", tmp_path / "sets" / "captions"]
    theirs = ["--suite", "clip_benchmark", "--suite-data", tmp_path / "sets", "--workers", 1, "--batch-size", 32]
    assert exit_code("evaluate", "--device", "cpu", small_run, *ours, *theirs, "--json", output) == 0
    sets = json.loads(output.read_text())["sets"]
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


def test_suite_data(tmp_path):
    write_classes(tmp_path / "many" / "one", emoji(6))
    write_captions(tmp_path / "many" / "two", emoji(3))
    (tmp_path / "many" / "other").mkdir()
    sets = suite_sets([str(tmp_path / "many"), f"imagenet1k={tmp_path}"])
    assert [(data.name, data.dataset, data.task, data.shards) for data in sets] == [
        ("one", "wds/one", "zeroshot_classification", 2),
        ("two", "wds/two", "zeroshot_retrieval", 1),
        ("imagenet1k", "imagenet1k", "auto", None),
    ]
    for names in ([], [str(tmp_path / "many" / "other")]):
        with refuses("suite.no_data", "NAME=ROOT"):
            suite_sets(names)


def test_this_process_counts_as_active_while_it_runs(monkeypatch):
    monkeypatch.setattr(suite, "POLL_SECONDS", 0.05)
    before = ACTIVITY.ticks
    code = "import sys, time; time.sleep(0.5); print('why', file=sys.stderr); sys.exit(4)"
    done = suite._run([sys.executable, "-c", code], stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (4, "why\n") and ACTIVITY.ticks >= before + 5


def test_an_interruption_kills_it(monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(suite, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(ACTIVITY, "still_working", interrupted)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        suite._run([sys.executable, "-c", "import time; time.sleep(60)"])
    assert time.monotonic() - began < 30


def test_a_failure_is_one_line(small_run, tmp_path, capsys):
    write_captions(tmp_path / "captions", emoji(3))
    (tmp_path / "captions" / "test" / "0.tar").write_bytes(b"no tar")
    suite_data = ["--suite", "clip_benchmark", "--suite-data", tmp_path / "captions", "--workers", "0"]
    assert_refused("suite.failed", ["evaluate", "--device", "cpu", small_run, *suite_data], capsys)

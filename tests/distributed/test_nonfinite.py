"""Losses and gradients that are not finite, in whole runs on one and two processes."""

import json
import math

import pytest
import torch
from nonfinite_worker import poisoned_run, poisoned_with
from ranks_job import run_ranks

from leanclip.distributed import Ranks
from run_records import records


def on_ranks(size, folder, bad, **settings):
    """The results of all ranks, which must be the same."""
    folder.mkdir(exist_ok=True)
    if size == 1:
        return poisoned_run(Ranks(0, 1, None), folder, bad, **settings)
    found = run_ranks(poisoned_with, size, folder, bad, settings)
    for other in found[1:]:
        assert other["said"] == found[0]["said"] and other["moved"] == found[0]["moved"]
        same_state(other, found[0])
    return found[0]


def same_state(one, other):
    torch.testing.assert_close(one["state"], other["state"], rtol=0, atol=0)


def trained_steps(folder):
    return records(folder / "logs/run", "train")


@pytest.mark.parametrize(("size", "settings"), [(1, {}), (2, {"on": 1, "fsdp": True})])
def test_one_nonfinite_step_is_skipped_and_counted(size, settings, tmp_path):
    found = on_ranks(size, tmp_path, [5], ema=0.9, **settings)
    assert found["said"][0] == 0
    assert found["moved"] == [True] * 4 + [False] + [True] * 3  # weights, optimizer, tables, average
    assert all(value.isfinite().all() for name, value in found["state"].items() if "log_u" not in name)
    lines = trained_steps(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert [line["skipped_steps"] for line in lines] == [0] * 4 + [1] * 4
    assert lines[4]["loss"] is None and all(math.isfinite(line["loss"]) for line in lines if line["step"] != 5)


@pytest.mark.parametrize(("size", "settings"), [(1, {}), (2, {"on": 1})])
def test_persistent_nonfinite_steps_reload_once_then_stop_with_a_diagnosis(size, settings, tmp_path):
    found = on_ranks(size, tmp_path, [5, 6, 7, 8], save_every=3, **settings)
    code, message = found["said"]
    path = tmp_path / "logs/run/diagnosis.json"
    assert code == 4 and "\n" not in message
    for words in ("step 6", "2 times in a row", "step_00000003", str(path), "--grad-clip-norm"):
        assert words in message
    assert [line["step"] for line in trained_steps(tmp_path)] == [1, 2, 3, 4, 5]  # none twice

    def no_constant(name):
        raise AssertionError(f"{name} is not JSON")

    facts = json.loads(path.read_text(), parse_constant=no_constant)
    assert facts["step"] == 6 and facts["skipped_steps"] == 4 and facts["nonfinite_steps_in_a_row"] == 2
    assert facts["loss"] == "nan" and 0 < facts["tau"] < 1 and facts["lr"] > 0
    assert facts["reloaded_checkpoint"].endswith("step_00000003")
    assert [len(ids) for ids in facts["sample_ids"]] == ([13] if size == 1 else [7, 6])
    image = facts["gradients"]["image tower"]
    assert image["gradient_norm"] == "nan" and "visual.conv1.weight" in image["not_finite"]
    assert facts["gradients"]["text tower"]["parameters"] > 5
    assert facts["weights_not_finite"] == []


@pytest.mark.parametrize(
    ("size", "settings"), [(1, {}), pytest.param(2, {"on": 1, "fsdp": True}, marks=pytest.mark.slow)]
)
def test_a_transient_fault_leaves_no_trace(size, settings, tmp_path):
    """After the reload the run equals one without the fault, bit for bit."""
    settings = settings | {"save_every": 3, "ema": 0.9}
    right = on_ranks(size, tmp_path / "right", [], **settings)
    found = on_ranks(size, tmp_path / "met", [5, 6], times=1, **settings)
    assert found["said"][0] == 0
    same_state(found, right)
    own = ("seconds", "samples_per_second", "data_wait", "resident_gib", "skipped_steps")
    facts = [
        [{key: value for key, value in line.items() if key not in own} for line in trained_steps(tmp_path / folder)]
        for folder in ("met", "right")
    ]
    assert facts[0] == facts[1] and len(facts[0]) == 8


def test_without_a_checkpoint_it_stops_at_once(tmp_path):
    code, message = on_ranks(1, tmp_path, [2, 3], save_every=0)["said"]
    assert code == 4 and "no checkpoint" in message
    assert json.loads((tmp_path / "logs/run/diagnosis.json").read_text())["reloaded_checkpoint"] is None


def test_a_run_that_gets_a_stop_signal_does_so_after_a_reload(tmp_path):
    """The signal comes at step 4, step 5 reloads step 2: one more step is taken, not three."""
    on_ranks(1, tmp_path, [4, 5], times=1, save_every=2, stop_at=4)
    last = tmp_path / "logs/run/checkpoints/last"
    assert json.loads((last / "state.json").read_text())["position"]["step"] == 3

"""Damaged and hostile checkpoints are refused, and none of their files can run code."""

import hashlib
import json
import math
import pickle
import shutil

import pytest
from checkpoint_runs import VALUES, assert_train_refused, equal, job_of, names, saved_tensors, train
from test_safety import plain_pickle, torch_zip

from leanclip.checkpointing.resume import SavedRun, find_checkpoint
from leanclip.checkpointing.storage import HASHES_FILE, verify
from leanclip.errors import UserError
from refusal import exit_code, refuses


def test_a_damaged_checkpoint_is_refused(run, capsys):
    checkpoint = run / "logs/run/checkpoints/step_00000006"
    (checkpoint / "state.json").write_text((checkpoint / "state.json").read_text() + " ")
    assert_train_refused("checkpoint.damaged", run, capsys, "state.json", resume=checkpoint)


def test_missing_and_extra_files_are_refused(run):
    checkpoint = run / "logs/run/checkpoints/step_00000006"
    extra = checkpoint / "state" / "more.safetensors"
    extra.write_bytes(b"x")
    with refuses("checkpoint.damaged", "more.safetensors"):
        verify(checkpoint)
    extra.unlink()
    (checkpoint / "open_clip_config.json").unlink()
    with refuses("checkpoint.damaged", "open_clip_config.json"):
        verify(checkpoint)


PLANTED = {
    "state": torch_zip, "open_clip_model.safetensors": torch_zip, "training.pt": torch_zip,
    **dict.fromkeys(("state.json", "open_clip_config.json", "hashes.json", "README.md", "config.toml"), plain_pickle),
    **dict.fromkeys((".metadata", "state/.metadata"), plain_pickle),
}  # fmt: skip


@pytest.mark.parametrize("file", PLANTED)
def test_code_in_a_file_of_a_checkpoint_never_runs(file, run, tmp_path, capsys):
    """Without and with the hash of the planted file in the list."""
    marker = tmp_path / "marker"
    checkpoint = run / "logs/run/checkpoints/step_00000008"
    path = next((checkpoint / "state").glob("*.safetensors")) if file == "state" else checkpoint / file
    path.write_bytes(PLANTED[file](marker))
    assert train(run, resume="auto", max_steps=9) == 0  # from the one before, or from this one without that file
    shutil.rmtree(run / "logs/run/checkpoints/step_00000009")
    if file != "hashes.json":
        _accept(checkpoint, path)
        train(run, resume=checkpoint, max_steps=9)
    for command in ("evaluate", "export"):
        exit_code(
            command,
            checkpoint,
            *([tmp_path / "out"] if command == "export" else ["--val-data", VALUES["train_data"]]),
        )
    train(run, pretrained=checkpoint, name="new", max_steps=1)
    assert not marker.exists()
    pickle.loads(plain_pickle(marker))  # the payload works
    assert marker.exists()


def _accept(checkpoint, path):
    """Enter the hash of a planted file into the list."""
    listed = json.loads((checkpoint / HASHES_FILE).read_text())
    name = path.relative_to(checkpoint).as_posix()
    if name in listed["files"]:
        listed["files"][name] = {"size": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        (checkpoint / HASHES_FILE).write_text(json.dumps(listed))


def test_a_damaged_newest_checkpoint_does_not_count_for_keep_last(run):
    (run / "logs/run/checkpoints/step_00000008/state.json").write_text("{}")
    assert train(run, resume="auto", max_steps=7, save_every=1, keep_last=1) == 0
    assert names(run) == ["aside_step_00000008", "last", "step_00000007"]


def _places(content, path=()):
    """The path of every value of state.json except the settings, of which most are only compared."""
    if isinstance(content, dict) and path != ("settings",):
        for name, value in content.items():
            yield (*path, name)
            yield from _places(value, (*path, name))


def _planted(content, path, value):
    copy = json.loads(json.dumps(content))
    parent = copy
    for name in path[:-1]:
        parent = parent[name]
    parent[path[-1]] = value
    return json.dumps(copy)


ODD = {"text": "x", "negative": -1, "fraction": -0.5, "null": None, "list": [], "object": {}, "infinite": 1e400,
       "huge": 10**400, "deep": json.loads("[" * 90 + "]" * 90), "flag": True}  # fmt: skip


@pytest.mark.parametrize("value", ODD.values(), ids=ODD)
def test_any_value_in_a_state_is_refused_or_read(value, run):
    """Values of other types and sizes everywhere in state.json, by the functions that read it."""
    checkpoint, job = run / "logs/run/checkpoints/step_00000008", job_of(run)
    content = json.loads((checkpoint / "state.json").read_text())
    architecture, refused = job.model.open_clip_config(), []
    for path in _places(content):
        (checkpoint / "state.json").write_text(_planted(content, path, value))
        try:
            saved = SavedRun.open(checkpoint)
            manifest, position = saved.manifest, saved.position
            saved.already_reset(job.config, manifest, len(job.data.train.source))
            saved.compare(job.config, architecture, samples=len(job.data.train.source), reset_loss=False)
            saved.load(job.state, job.group, reset_loss=False)
            assert position.step >= 0 and position.seconds < math.inf
        except UserError as error:
            refused.append(error.code)
    assert len(refused) > 10
    assert {*refused} <= {"checkpoint.damaged", "checkpoint.format", "resume.mismatch", "data.bad_manifest"}


@pytest.mark.parametrize("text", ["[" * 100_000, '{"format": ' + "9" * 5000 + "}", "", "\0", "[1]", '"x"'])
@pytest.mark.parametrize("file", ["state.json", HASHES_FILE])
def test_json_that_no_run_writes_is_refused(file, text, run):
    checkpoint = run / "logs/run/checkpoints/step_00000008"
    (checkpoint / file).write_text(text)
    with refuses("checkpoint.damaged"):
        verify(checkpoint)
        SavedRun.open(checkpoint)
    if file == "state.json":
        with refuses("checkpoint.damaged"):
            SavedRun.open(checkpoint)


def test_an_impossible_position_does_not_hang(run):
    """The epoch and the step in it follow from the number of steps."""
    checkpoint = run / "logs/run/checkpoints/step_00000006"
    content = json.loads((checkpoint / "state.json").read_text())
    content["position"] |= {"epoch": 10**9, "epoch_step": 10**9}
    (checkpoint / "state.json").write_text(json.dumps(content))
    _accept(checkpoint, checkpoint / "state.json")
    before = saved_tensors(run, 8)
    assert train(run, resume=checkpoint) == 0
    equal(saved_tensors(run, 8), before)


@pytest.mark.parametrize("name", ["/etc/passwd", "../../run.json", "x" * 5000, "a\0b"])
def test_hashes_of_files_outside_are_refused(name, run):
    checkpoint = run / "logs/run/checkpoints/step_00000008"
    (checkpoint / HASHES_FILE).write_text(json.dumps({"files": {name: {"sha256": "0"}}}))
    with refuses("checkpoint.damaged"):
        verify(checkpoint)


def test_the_newest_undamaged_checkpoint_is_used(run):
    checkpoints = run / "logs/run/checkpoints"
    (checkpoints / "step_00000008" / HASHES_FILE).unlink()
    checkpoint, warnings = find_checkpoint("latest", run / "logs/run")
    assert checkpoint is not None and checkpoint.name == "step_00000006" and len(warnings) == 1
    for path in checkpoints.glob("step_*"):
        (path / HASHES_FILE).unlink(missing_ok=True)
    with refuses("checkpoint.damaged", "every checkpoint"):
        find_checkpoint("auto", run / "logs/run")

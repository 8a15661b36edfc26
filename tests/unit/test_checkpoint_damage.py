"""Damaged and hostile checkpoints are refused, and none of their files can run code."""

import hashlib
import io
import json
import os
import pickle
import shutil

import pytest
import torch
from checkpoint_runs import VALUES, leanclip, names, train

from leanclip.checkpointing.resume import find_checkpoint
from leanclip.checkpointing.storage import HASHES_FILE, verify
from refusal import refusal_code, refuses


def test_a_damaged_checkpoint_is_refused(run, capsys):
    checkpoint = run / "logs/run/checkpoints/step_00000006"
    (checkpoint / "state.json").write_text((checkpoint / "state.json").read_text() + " ")
    assert train(run, resume=checkpoint) == 2
    error = capsys.readouterr().err
    assert refusal_code(error) == "checkpoint.damaged" and "state.json" in error


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


class Payload:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def malicious(marker, form):
    """Bytes that make a directory when they are unpickled."""
    if form == "pickle":
        return pickle.dumps(Payload(marker))
    stream = io.BytesIO()
    torch.save({"state_dict": Payload(marker)}, stream)
    return stream.getvalue()


PLANTED = {
    "state": "torch", "state.json": "pickle", "open_clip_model.safetensors": "torch",
    "open_clip_config.json": "pickle", "hashes.json": "pickle", "README.md": "pickle", "config.toml": "pickle",
    ".metadata": "pickle", "state/.metadata": "pickle", "training.pt": "torch",
}  # fmt: skip


@pytest.mark.parametrize(("file", "form"), PLANTED.items())
def test_code_in_a_file_of_a_checkpoint_never_runs(file, form, run, tmp_path, capsys):
    """Without and with the hash of the planted file in the list."""
    marker = tmp_path / "marker"
    checkpoint = run / "logs/run/checkpoints/step_00000008"
    path = next((checkpoint / "state").glob("*.safetensors")) if file == "state" else checkpoint / file
    path.write_bytes(malicious(marker, form))
    assert train(run, resume="auto", max_steps=9) == 0  # from the one before, or from this one without that file
    shutil.rmtree(run / "logs/run/checkpoints/step_00000009")
    if file != "hashes.json":
        _accept(checkpoint, path)
        train(run, resume=checkpoint, max_steps=9)
    for command in ("evaluate", "export"):
        leanclip(
            command,
            checkpoint,
            *([tmp_path / "out"] if command == "export" else ["--val-data", VALUES["train_data"]]),
        )
    train(run, pretrained=checkpoint, name="new", max_steps=1)
    assert not marker.exists()
    pickle.loads(malicious(marker, "pickle"))  # the payload works
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


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("position", {}),
        ("position", {"step": "x"}),
        ("settings", None),
        ("samples", "many"),
        ("values", []),
        ("manifest", 3),
    ],
)
def test_a_state_of_other_types_is_refused_on_one_line(place, value, run, capsys):
    checkpoint = run / "logs/run/checkpoints/step_00000008"
    content = json.loads((checkpoint / "state.json").read_text())
    content[place] = content[place] | value if value and isinstance(value, dict) else value
    (checkpoint / "state.json").write_text(json.dumps(content))
    _accept(checkpoint, checkpoint / "state.json")
    assert train(run, resume=checkpoint) == 2
    error = capsys.readouterr().err
    assert refusal_code(error) == "checkpoint.damaged" and len(error.strip().splitlines()) == 1


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

"""Disks that fill up or turn read-only under a run, and checkpoints that rot."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from kill_job import Job, Settings, compare, finish, result

HERE = Path(__file__).parent


def on_its_own_disk(folder, kind, choice):
    """What `faults_worker` found, in a mount namespace of its own."""
    unshare = shutil.which("unshare")
    if unshare is None or sys.platform != "linux":
        pytest.skip("needs Linux and util-linux")
    namespace = [unshare, "-m"] if os.geteuid() == 0 else [unshare, "-rm"]
    if subprocess.run([*namespace, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True).returncode:
        pytest.skip("may not mount a disk")
    paths = [HERE, HERE.parents[1] / "src"]
    environment = os.environ | {"PYTHONPATH": ":".join(map(str, paths))}
    command = [*namespace, sys.executable, str(HERE / "faults_worker.py"), kind, str(folder), choice]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("kind", ["full", pytest.param("readonly", marks=pytest.mark.slow)])
def test_a_run_outlives_its_disk(kind, tmp_path):
    found = on_its_own_disk(tmp_path, kind, "go on")
    assert found["codes"] == [0, 0], found["said"]
    assert "No space left" in found["said"] if kind == "full" else "Read-only" in found["said"]
    trained = [step for step in dict.fromkeys(found["steps"]) if step]
    assert trained == list(range(1, 29)), "no line is missing"
    assert "step_00000028" in found["newest"]
    assert found["finished"] == [0] and "is finished" in found["said_again"]


@pytest.mark.slow
def test_a_run_may_stop_with_its_disk(tmp_path):
    found = on_its_own_disk(tmp_path, "full", "stop")
    assert found["codes"] == [2, 2], found["said"]
    assert "was not saved" in found["said"] and "No space left" in found["said"]
    assert found["finished"] == [0], found["said_again"]
    assert "resumed from" in found["said_again"]


def test_a_flipped_bit_is_noticed_and_the_checkpoint_before_is_used(tmp_path):
    settings = Settings(steps=9, save_every=3, workers=0, loss="fastclip-v3", precision="fp32")
    logs = tmp_path / "logs"
    right = finish(settings, 1, tmp_path, logs)
    damaged = logs / "run" / "checkpoints" / "step_00000009"
    path = next((damaged / "state").glob("*.safetensors"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    with Job(settings, 1, tmp_path, logs) as job:
        assert job.wait() == [0], job.said()
        said = " ".join(job.said().split())
    assert "step_00000009 is damaged" in said and "the one before it is used" in said
    assert "step_00000006 at step 6 of 9" in said
    compare(result(logs, 9), right, exact=True)

"""Disks that fill up or become read-only during a run, and damaged checkpoints."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from machine import mount_namespace

HERE = Path(__file__).parent


def run_on_separate_disk(folder, kind, choice):
    """The result of `faults_worker` in a mount namespace."""
    paths = [HERE, HERE.parents[1] / "src"]
    environment = os.environ | {"PYTHONPATH": ":".join(map(str, paths))}
    command = [*mount_namespace(), sys.executable, str(HERE / "faults_worker.py"), kind, str(folder), choice]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "result.json").read_text())


@pytest.mark.parametrize("kind", ["full", pytest.param("readonly", marks=pytest.mark.slow)])
def test_a_run_survives_a_failing_disk(kind, tmp_path):
    found = run_on_separate_disk(tmp_path, kind, "continue")
    assert found["codes"] == [0, 0], found["printed"]
    assert "No space left" in found["printed"] if kind == "full" else "Read-only" in found["printed"]
    trained = [step for step in dict.fromkeys(found["steps"]) if step]
    assert trained == list(range(1, 29)), "lines are missing"
    assert "step_00000028" in found["newest"]
    assert found["finished"] == [0] and "is finished" in found["printed_after"]


@pytest.mark.slow
def test_a_run_stops_on_a_save_error_if_configured(tmp_path):
    found = run_on_separate_disk(tmp_path, "full", "stop")
    assert found["codes"] == [2, 2], found["printed"]
    assert "was not saved" in found["printed"] and "No space left" in found["printed"]
    assert found["finished"] == [0], found["printed_after"]
    assert "resumed from" in found["printed_after"]

"""A dry run, a report, an evaluation and an export on a disk that is full or read-only end in one line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from machine import mount_namespace
from refusal import refusal_code

RUN = ["train", "--recipe", "demo", "--batch-size", "4", "--max-steps", "1", "--warmup", "0", "--eval-every", "0"]
RUN += ["--workers", "0"]
COMMANDS = {
    "report": (["report", "RUN", "--output", "/mnt/disk/report.html"], "report.not_writable"),
    "evaluate": (["evaluate", "RUN", "--device", "cpu", "--json", "/mnt/disk/x.json"], "evaluation.not_writable"),
    "safetensors": (["export", "RUN", "/mnt/disk/x.safetensors"], "export.cannot_write"),
    "pt": (["export", "RUN", "/mnt/disk/x.pt"], "export.cannot_write"),
    "dry run": ([*RUN, "--dry-run", "--logs", "/mnt/disk"], "run.not_writable"),
    "train": ([*RUN, "--logs", "/mnt/disk/logs"], "run.not_writable"),
}
READ_ONLY = ["report", "evaluate", "safetensors", "dry run", "train"]


def in_namespace(folder, kind):
    """Mount the disk, then run the commands in this process."""
    from contextlib import redirect_stderr
    from io import StringIO

    from leanclip.cli import main

    def run(arguments):
        error = StringIO()
        with redirect_stderr(error), pytest.raises(SystemExit) as stop:
            main([word.replace("RUN", str(folder / "run")) for word in arguments])
        return stop.value.code, error.getvalue()

    assert run([*RUN, "--logs", str(folder), "--name", "run"])[0] == 0
    Path("/mnt/disk").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", "/mnt/disk"], check=True)
    if kind == "readonly":
        subprocess.run(["mount", "-o", "remount,ro", "/mnt/disk"], check=True)
    else:
        Path("/mnt/disk/full").write_bytes(bytes(65_536))
    names = READ_ONLY if kind == "readonly" else [name for name in COMMANDS if name != "train"]
    results = [(name, *run(COMMANDS[name][0])) for name in names]
    assert {path.name for path in Path("/mnt/disk").iterdir()} <= {"full"}, "temporary files are left"
    return results


@pytest.mark.parametrize("kind", ["full", "readonly"])
def test_a_disk_that_cannot_be_written(kind, tmp_path):
    code = f"import test_disks; print(test_disks.in_namespace(test_disks.Path({str(tmp_path)!r}), {kind!r}))"
    program = f'mount -t tmpfs none /mnt && exec {sys.executable} -c "{code}"'
    environment = os.environ | {"PYTHONPATH": ":".join(map(str, (Path(__file__).parent, Path(__file__).parents[1])))}
    done = subprocess.run([*mount_namespace(), "sh", "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = eval(done.stdout.strip().splitlines()[-1])
    assert len(results) == 5
    for name, exit_code, error in results:
        assert (exit_code, refusal_code(error), error.count("\n")) == (2, COMMANDS[name][1], 1), (name, error)
        assert ("No space" if kind == "full" else "Read-only") in error or name == "pt"

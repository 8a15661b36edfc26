"""Waiting for processes and files, and disks of a test's own."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest


def wait_until(condition: Callable[[], object], seconds: float, failure: str = "waited in vain") -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, failure
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    """Not of a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def mount_namespace() -> list[str]:
    """The command in front of one that may mount disks; the test is skipped where that is not possible."""
    unshare = shutil.which("unshare")
    if unshare is None or sys.platform != "linux":
        pytest.skip("needs Linux and util-linux")
    namespace = [unshare, "-m"] if os.geteuid() == 0 else [unshare, "-rm"]
    if subprocess.run([*namespace, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True).returncode:
        pytest.skip("may not mount a disk")
    return namespace

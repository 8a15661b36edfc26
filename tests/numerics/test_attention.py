"""The kernel for short sequences without a GPU: its results in Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_the_kernel_passes_in_the_interpreter():
    path = Path(__file__).with_name("interpreted_attention.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header", str(path)]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]

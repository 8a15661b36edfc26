"""A long run with everything on does not grow: steps, log lines, evaluations, checkpoints."""

import json
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

STEPS, WARM, WINDOW = 10_000, 2_000, 1_000
POLL_SECONDS = 0.5
VIT = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 16},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
}


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="reads memory from /proc")
def test_memory_does_not_grow_over_ten_thousand_steps(tmp_path):
    """What is resident, and of it what the process itself allocated: the system may drop mapped files at any time,
    which would hide a growth."""
    (tmp_path / "vit.json").write_text(json.dumps(VIT))
    flags = ["--recipe", "demo", "--model", tmp_path / "vit.json", "--loss", "fastclip-v2", "--batch-size", 8,
             "--epochs", 1000, "--workers", 1, "--max-steps", STEPS, "--log-every", 10, "--eval-every", 500,
             "--save-every", 500, "--ema", 0.999, "--device", "cpu", "--logs", tmp_path,
             "--name", "soak"]  # fmt: skip
    metrics = tmp_path / "soak" / "metrics.jsonl"
    process = subprocess.Popen([sys.executable, "-m", "leanclip", "train", *map(str, flags)])
    seen: dict[str, dict[int, int]] = {"VmRSS": {}, "RssAnon": {}}  # KiB by step
    while process.poll() is None:
        time.sleep(POLL_SECONDS)
        status = Path(f"/proc/{process.pid}/status")
        lines = metrics.read_text().splitlines() if metrics.is_file() else []
        if len(lines) > 1 and status.is_file():
            step, text = json.loads(lines[-2])["step"], status.read_text()  # the last line may be half written
            for name, values in seen.items():
                if found := re.search(rf"{name}:\s+(\d+)", text):
                    values[step] = int(found[1])
    assert process.returncode == 0
    for name, values in seen.items():
        warm = statistics.median(value for step, value in values.items() if WARM <= step < WARM + WINDOW)
        end = statistics.median(value for step, value in values.items() if step > STEPS - WINDOW)
        print(
            f"{name} {warm / 1024:.1f} MiB after {WARM:,} steps, {end / 1024:.1f} at the end: {end / warm - 1:+.2%}"
        )
        assert end < 1.02 * warm, name

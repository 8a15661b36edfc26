"""A long run with everything on does not grow: steps, log lines, evaluations, checkpoints."""

import json
import statistics
import subprocess
import sys

import pytest

STEPS, WARM, WINDOW = 10_000, 2_000, 1_000


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_memory_does_not_grow_over_ten_thousand_steps(tmp_path):
    flags = ["--recipe", "demo", "--loss", "fastclip-v2", "--batch-size", 16, "--epochs", 1000, "--workers", 1,
             "--max-steps", STEPS, "--log-every", 10, "--eval-every", 500, "--save-every", 500, "--ema", 0.999,
             "--device", "cpu", "--logs", tmp_path, "--name", "soak"]  # fmt: skip
    subprocess.run([sys.executable, "-m", "leanclip", "train", *map(str, flags)], check=True)
    lines = [json.loads(line) for line in (tmp_path / "soak/metrics.jsonl").read_text().splitlines()]
    resident = {line["step"]: line["resident_gib"] for line in lines if line["kind"] == "train"}
    warm = statistics.median(value for step, value in resident.items() if WARM <= step < WARM + WINDOW)
    end = statistics.median(value for step, value in resident.items() if step > STEPS - WINDOW)
    print(f"resident {warm:.4f} GiB after {WARM:,} steps, {end:.4f} GiB at the end: {end / warm - 1:+.2%}")
    assert end < 1.02 * warm

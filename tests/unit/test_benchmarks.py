"""Every benchmark script runs on toy data."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("bench_loss.py", ["infonce", "siglip", "open_clip", "x floor"]),
        ("bench_save.py", ["share_in_saves", "checkpoint_gb"]),
        pytest.param("bench_micro_batch.py", ["direct", "micro-batches", "samples/s"], marks=pytest.mark.slow),
        pytest.param("bench_automatic_micro_batch.py", ["chosen", "equal_losses"], marks=pytest.mark.slow),
        ("bench_step.py", ["tiny", "leanclip fastclip-v3", "open_clip", "MFU"]),
        pytest.param("bench_end_to_end.py", ["loader alone", "training", "of the smaller"], marks=pytest.mark.slow),
        pytest.param("bench_plan.py", ["TFLOP/s", "predicted_gib"], marks=pytest.mark.slow),
        ("bench_pair_weights.py", ["siglip alone", "step, tiny", "ratio"]),
        ("bench_locked_towers.py", ["heads", "lit", "share_of_resident"]),
        ("bench_search.py", ["exact", "approximate", "100 million"]),
        ("bench_embed.py --parts compare", ["what leanclip", "what open_clip", "smallest cosine"]),
        pytest.param(
            "bench_embed.py --parts pass killed processes", ["what pass", "equal True"], marks=pytest.mark.slow
        ),
        ("bench_data.py", ["256 px          leanclip", "open_clip", "cat", "MB/s", "bytes per sample"]),
    ],
)
def test_every_benchmark_runs(command, expected, tmp_path):
    script, *arguments = command.split()
    command = [sys.executable, str(BENCHMARKS / script), "--quick", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    for word in expected:
        assert word in done.stdout
    assert list(tmp_path.iterdir()) == []  # a quick run keeps nothing


def test_all_benchmarks_are_listed_here():
    source = Path(__file__).read_text()
    for path in BENCHMARKS.glob("bench_*.py"):
        assert path.name in source

"""The tiled engine against float64, on whole matrices and on many small tiles."""

import functools
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from leanclip.ops import Pairs, reference, tiled
from numerics.ops_cases import Case, Inputs, check, large_cases, outputs, small_cases, square

SMALL_TILES = 16 << 10


def engine(tile_bytes: int | None = None):
    names = ("statistics", "gradients", "pairwise")
    return SimpleNamespace(**{name: functools.partial(getattr(tiled, name), tile_bytes=tile_bytes) for name in names})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", small_cases() + large_cases(), ids=str)
def test_accuracy(case: Case, dtype: torch.dtype):
    check(engine(), case, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", small_cases(), ids=str)
def test_accuracy_of_many_tiles(case: Case, dtype: torch.dtype):
    check(engine(SMALL_TILES), case, dtype)


@pytest.mark.parametrize("case", small_cases(), ids=str)
def test_float64_stays_float64(case: Case):
    inputs = Inputs.of(case, torch.float64, "cpu")
    expected = outputs(reference, inputs, torch.float64, torch.float64)  # pyright: ignore[reportArgumentType]
    found = outputs(engine(SMALL_TILES), inputs, torch.float64, torch.float64)  # pyright: ignore[reportArgumentType]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12, msg=lambda text, name=name: name + text)


def test_autocast_around_the_call_changes_nothing():
    inputs = Inputs.of(square(60, 16, 0.07), torch.float32, "cpu")
    expected = outputs(engine(), inputs, torch.float32, torch.float32)  # pyright: ignore[reportArgumentType]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = outputs(engine(), inputs, torch.float32, torch.float32)  # pyright: ignore[reportArgumentType]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=lambda text, name=name: name + text)


def test_rows_without_pairs_have_no_sum_and_mean_zero():
    embeddings = torch.nn.functional.normalize(torch.randn(4, 8), dim=1)
    same = torch.zeros(4, dtype=torch.long)
    pairs = Pairs(mask_positives=True, row_groups=same, col_groups=same)
    by_rows, by_cols = tiled.statistics(embeddings, embeddings, torch.tensor(5.0), None, pairs=pairs)
    assert by_cols is None
    assert by_rows.log_sum.isneginf().all()
    assert by_rows.mean.eq(0).all()


MEASURE = """
import torch
from pathlib import Path
from leanclip.ops import Pairs, Terms, tiled
torch.set_num_threads(2)
image, text = (torch.nn.functional.normalize(torch.randn(16384, 64), dim=1) for _ in range(2))
pairs, scale = Pairs(mask_positives=True), torch.tensor(20.0)
def peak():  # of this program; that of getrusage may be its parent's
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])

before = peak()
by_rows, by_cols = tiled.statistics(image, text, scale, scale, pairs=pairs)
terms = [Terms(scale, -side.log_sum) for side in (by_rows, by_cols)]
tiled.gradients(image, text, *terms, torch.zeros(16384), pairs=pairs)
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux says what a program has used at most")
def test_memory_does_not_grow_with_the_square_of_the_batch():
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 300 << 10, "the matrix alone would be 1 GiB"

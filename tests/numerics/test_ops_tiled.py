"""The tiled engine against float64, on whole matrices and on many small tiles."""

import subprocess
import sys
from typing import Any

import pytest
import torch

from leanclip.ops import Pairs, reference, tiled
from numerics.ops_cases import Case, Inputs, check, large_cases, outputs, small_cases, square


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "CPU_TILE_BYTES", 16 << 10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", small_cases() + large_cases(), ids=str)
def test_accuracy(case: Case, dtype: torch.dtype):
    check(tiled, case, dtype)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", small_cases(), ids=str)
def test_accuracy_of_many_tiles(case: Case, dtype: torch.dtype):
    check(tiled, case, dtype)


def assert_outputs_close(found: dict[str, Any], expected: dict[str, Any], **tolerance: Any) -> None:
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        torch.testing.assert_close(found[name], value, msg=lambda text, name=name: name + text, **tolerance)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("case", small_cases(), ids=str)
def test_float64_stays_float64(case: Case):
    inputs = Inputs.of(case, torch.float64, "cpu")
    expected, found = (outputs(engine, inputs, torch.float64, torch.float64) for engine in (reference, tiled))
    assert_outputs_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_inputs_give_float32_results(dtype: torch.dtype):
    """They lose nothing beyond their own rounding."""
    inputs = Inputs.of(Case(rows=127, cols=90, dim=48, tau=0.02, offset=3), dtype, "cpu")
    narrow, wide = (outputs(tiled, inputs, inputs_as, torch.float32) for inputs_as in (dtype, torch.float32))
    for name, value in wide.items():
        assert narrow[name].dtype == torch.float32
        assert (narrow[name] - value).abs().max() <= 1e-6 * value.abs().max()


def test_autocast_around_the_call_changes_nothing():
    inputs = Inputs.of(square(60, 16, 0.07), torch.float32, "cpu")
    expected = outputs(tiled, inputs, torch.float32, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = outputs(tiled, inputs, torch.float32, torch.float32)
    assert_outputs_close(found, expected)


def test_rows_without_pairs_have_no_sum_and_mean_zero():
    embeddings = torch.nn.functional.normalize(torch.randn(4, 8), dim=1)
    same = torch.zeros(4, dtype=torch.long)
    pairs = Pairs(rows=embeddings, cols=embeddings, mask_positives=True, groups=(same, same))
    by_rows, by_cols = tiled.statistics(pairs, torch.tensor(5.0), None)
    assert by_cols is None
    assert by_rows.log_sum.isneginf().all()
    assert by_rows.mean.eq(0).all()


MEASURE = """
import torch
from pathlib import Path
from leanclip.ops import Pairs, Terms, tiled
torch.set_num_threads(2)
image, text = (torch.nn.functional.normalize(torch.randn(16384, 64), dim=1) for _ in range(2))
pairs, scale = Pairs(rows=image, cols=text, mask_positives=True), torch.tensor(20.0)
def peak():  # of this program; that of getrusage may be its parent's
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])

before = peak()
by_rows, by_cols = tiled.statistics(pairs, scale, scale)
terms = [Terms(scale, -side.log_sum) for side in (by_rows, by_cols)]
tiled.gradients(pairs, *terms, torch.zeros(16384))
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak memory of a process is read from Linux's /proc")
def test_memory_does_not_grow_with_the_square_of_the_batch():
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 300 << 10, "the matrix alone would be 1 GiB"

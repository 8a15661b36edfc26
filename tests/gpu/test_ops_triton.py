"""The fused kernels, and the tiled engine, on a GPU: the same accuracy test as on the CPU."""

import functools
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from leanclip.ops import Implementation, Pairs, Sigmoid, Terms, implementation, tiled
from numerics.ops_cases import Case, Inputs, check, large_cases, outputs, small_cases, square

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CASES = small_cases() + large_cases(every=True)


@pytest.fixture(params=["dense", "fused"])
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in small and as in large batches."""
    from leanclip.ops.triton import launch

    monkeypatch.setattr(launch, "DENSE_PAIRS", 2**24 if request.param == "dense" else 0)


@pytest.mark.usefixtures("size")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_accuracy(case: Case):
    check(_triton(torch.bfloat16), case, torch.bfloat16, "cuda")


def _triton(dtype: torch.dtype) -> Implementation:
    return implementation("triton", torch.zeros(1, 1, dtype=dtype, device="cuda"))[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_accuracy_of_tiled(case: Case, dtype: torch.dtype):
    check(tiled, case, dtype, "cuda")


@pytest.mark.usefixtures("size")
@pytest.mark.parametrize("case", CASES[:30], ids=str)
def test_float16_gets_gradients_in_the_precision_of_bfloat16(case: Case):
    """Weights exceed float16's range, so they are stored in bfloat16, whose ulp is 8 times larger."""
    check(_triton(torch.float16), case, torch.float16, "cuda", slack=8)


def test_several_panels_and_blocks(monkeypatch: pytest.MonkeyPatch):
    from leanclip.ops.triton import launch

    monkeypatch.setattr(launch, "DENSE_PAIRS", 0)
    monkeypatch.setattr(launch, "PARTIAL_BYTES", 1 << 14)
    monkeypatch.setattr(launch, "WEIGHT_BYTES", 1 << 18)
    for case in CASES:
        if case.rows >= 300 and case.dim == 96:
            check(launch, case, torch.bfloat16, "cuda")


@pytest.mark.usefixtures("size")
def test_results_are_the_same_every_time():
    inputs = Inputs.of(CASES[-1], torch.bfloat16, "cuda")
    first, second = (outputs(_triton(torch.bfloat16), inputs, torch.bfloat16, torch.float32) for _ in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.usefixtures("size")
def test_nothing_waits_for_the_device():
    embeddings = torch.nn.functional.normalize(torch.randn(512, 64, device="cuda"), dim=1).bfloat16()
    scale, weight = torch.tensor(20.0, device="cuda"), torch.full((512,), -9.0, device="cuda")
    pairs, terms = Pairs(rows=embeddings, cols=embeddings, mask_positives=True), Terms(scale, weight)
    name, engine = implementation("auto", embeddings)
    assert name == "triton"

    def compute() -> None:
        engine.statistics(pairs, scale, scale)
        engine.gradients(pairs, terms, terms, weight)
        engine.pairwise(pairs, Sigmoid(scale, scale, scale), weight)

    compute()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        compute()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("size")
def test_a_thread_of_its_own():
    """As autograd's: nothing has bound the device to it yet."""
    inputs = Inputs.of(square(256, 64, 0.07), torch.bfloat16, "cuda")
    compute = functools.partial(_triton(torch.bfloat16).statistics, inputs.pairs, inputs.row_scale, None)
    compute()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(compute).result()

"""The kernels without a GPU: their results in Triton's interpreter, and that they compile for each chip."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from leanclip.ops import (
    AnchorForm,
    Estimates,
    Gradients,
    Pairs,
    Pairwise,
    Sigmoid,
    Statistics,
    StoredTemperature,
    Terms,
    available,
    implementation,
)
from leanclip.ops.resize import MOST_TAPS
from refusal import refuses

triton = pytest.importorskip("triton")

SHARED_MEMORY = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10}  # of a block, in bytes


@pytest.mark.parametrize("kernels", ["ops", "losses", "attention", "resize"])
def test_the_kernels_pass_in_the_interpreter(kernels: str):
    path = Path(__file__).with_name(f"interpreted_{kernels}.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header", str(path)]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch):
    """Call `compiled(capability, compute)`: what `compute` would launch on that chip, compiled for it."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from leanclip.ops import products
    from leanclip.ops.triton import launch, scalars

    def compile_for(capability: int, compute: Any, dense: bool) -> list[Any]:
        kernels = []

        def record(function: Any, grid: Any, arguments: tuple[Any, ...], constants: Any, options: Any) -> None:
            names = function.arg_names
            signature = dict(zip(names, map(_type_name, arguments), strict=False))
            signature |= dict.fromkeys(names[len(arguments) :], "constexpr")
            attributes = {
                (at,): [["tt.divisibility", 16]]
                for at, value in enumerate(arguments)
                if (isinstance(value, Tensor) and value.data_ptr() % 16 == 0)
                or (isinstance(value, int) and value % 16 == 0)
            }
            source = ASTSource(function, signature, constants, attributes)
            target = GPUTarget("cuda", capability, 32)
            kernels.append(triton.compile(source, target=target, options=options))

        for module in (launch, scalars):
            monkeypatch.setattr(module, "run", record)
        monkeypatch.setattr(launch, "DENSE_PAIRS", 2**24 if dense else 0)
        monkeypatch.setattr(launch, "_num_processors", lambda device: 100)
        monkeypatch.setattr(launch._Launch, "of", lambda pairs: launch._Launch(pairs, capability, dense))
        for product in ("accumulate", "similarities"):
            monkeypatch.setattr(products, product, lambda *args, **more: None)
        compute(launch)
        return kernels

    return compile_for


def _type_name(argument: Any) -> str:
    names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int64: "i64", torch.float64: "fp64"}
    if isinstance(argument, int | float):
        return "i32" if isinstance(argument, int) else "fp32"
    if isinstance(argument, Tensor):
        return f"*{names[argument.dtype]}"
    return f"tensordesc<{names[argument.base.dtype]}{argument.block_shape}>".replace(" ", "")


EMBEDDINGS = torch.zeros(512, 512, dtype=torch.bfloat16)
SCALE, LOG_WEIGHT = torch.tensor(10.0), torch.zeros(512)


def _infonce(launch: Any, scale: Tensor = SCALE) -> None:
    pairs, terms = Pairs(rows=EMBEDDINGS, cols=EMBEDDINGS, mask_positives=True), Terms(scale, LOG_WEIGHT)
    launch.statistics(pairs, scale, scale)
    launch.gradients(pairs, terms, terms, LOG_WEIGHT)


def _own_temperatures(launch: Any) -> None:
    _infonce(launch, SCALE.expand(512).contiguous())


def _siglip(launch: Any) -> None:
    launch.pairwise(Pairs(rows=EMBEDDINGS, cols=EMBEDDINGS), Sigmoid(SCALE, SCALE, SCALE), LOG_WEIGHT)


def _weighted_siglip(launch: Any) -> None:
    sigmoid = Sigmoid(SCALE, SCALE, SCALE, (LOG_WEIGHT, LOG_WEIGHT))
    launch.pairwise(Pairs(rows=EMBEDDINGS, cols=EMBEDDINGS), sigmoid, LOG_WEIGHT)


def _scalars(launch: Any) -> None:
    from leanclip.ops.triton import scalars

    stored, ids = StoredTemperature(SCALE, True, (0.0, 4.6), SCALE, 3.5, 0.3), torch.arange(512)
    prepared = scalars.prepare(EMBEDDINGS, EMBEDDINGS, stored, ids=ids)
    by_side, shares = Statistics(LOG_WEIGHT, LOG_WEIGHT), torch.ones(2, dtype=torch.float64)
    estimates = Estimates(shares, LOG_WEIGHT, LOG_WEIGHT, torch.tensor(3), update=True)
    form = AnchorForm(decoupled=False, times_tau=True, weight_by_tau=True, slope="published")
    scalars.anchors(prepared, by_side, by_side, form, estimates)
    prepared = scalars.prepare(EMBEDDINGS, EMBEDDINGS, stored._replace(previous=None), bias=SCALE)
    scalars.sigmoid_sums(prepared, Pairwise(LOG_WEIGHT, LOG_WEIGHT, LOG_WEIGHT, Gradients(None, None)))


@pytest.mark.parametrize("capability", [80, 90])
def test_the_scalar_kernels_compile(compiled: Any, capability: int):
    names = [kernel.metadata.name for kernel in compiled(capability, _scalars, True)]
    assert names == ["prepare_kernel", "anchors_kernel", "prepare_kernel", "sigmoid_sums_kernel"]


@pytest.mark.parametrize("compute", [_infonce, _own_temperatures, _siglip, _weighted_siglip])
@pytest.mark.parametrize(("capability", "dense"), [(80, False), (86, False), (89, True), (90, False), (90, True)])
def test_the_kernels_compile_within_shared_memory(compiled: Any, capability: int, dense: bool, compute: Any):
    kernels = compiled(capability, compute, dense)
    assert kernels
    for kernel in kernels:
        assert kernel.metadata.shared <= SHARED_MEMORY[capability], kernel.metadata.name
        matrix_unit = "wgmma" if capability >= 90 else "mma.sync"
        if kernel.metadata.name not in ("largest_norms", "finish", "dense_statistics"):
            assert re.search(matrix_unit, kernel.asm["ptx"]), f"{kernel.metadata.name} does without {matrix_unit}"


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("capability", [80, 89, 90])
def test_the_kernel_that_resizes_compiles(columns: bool, capability: int):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from leanclip.ops.triton import resize

    types = ("*u8", "*u8", "*i64", "*i32", "*i16", "*i32", "*i32", "i32")
    constants = {
        "HEIGHT": 224, "WIDTH": 160, "MOST_TAPS": MOST_TAPS, "COLUMNS": columns, "LINES": resize.LINES,
        "PIXELS": resize.PIXELS,
    }  # fmt: skip
    names = resize._resample.arg_names
    signature = dict(zip(names, types, strict=False)) | dict.fromkeys(constants, "constexpr")
    source = ASTSource(resize._resample, signature, constants)
    kernel: Any = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert f".target sm_{capability}" in kernel.asm["ptx"]


@pytest.mark.parametrize(
    ("name", "dtype", "code", "words"),
    [
        ("triton", torch.bfloat16, "loss.no_triton", "needs an NVIDIA GPU, the embeddings are on cpu"),
        ("triton", torch.float32, "loss.no_triton", "float16 and bfloat16 embeddings, got torch.float32"),
        ("cuda", torch.float32, "loss.unknown_implementation", "auto, reference, tiled, triton"),
    ],
)
def test_an_implementation_that_cannot_run_is_refused(name: str, dtype: torch.dtype, code: str, words: str):
    with refuses(code, words):
        implementation(name, torch.zeros(4, 8, dtype=dtype))


def test_auto_is_tiled_on_a_cpu():
    assert available(torch.zeros(4, 8)) == ["reference", "tiled"]
    assert implementation("auto", torch.zeros(4, 8))[0] == "tiled"


def test_importing_the_engine_does_not_import_the_kernels():
    code = "import sys, leanclip.ops; sys.exit('leanclip.ops.triton' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)

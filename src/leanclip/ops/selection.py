"""Which implementation computes: by name, or `auto` for the fastest that is valid."""

import functools
import importlib
import importlib.util
import os
from typing import Any, cast

import torch
from torch import Tensor

from leanclip.errors import ArgumentError
from leanclip.ops.types import Implementation

IMPLEMENTATIONS = ("auto", "reference", "tiled", "triton")
OLDEST_CAPABILITY = 80  # older matrix units have no bfloat16


def available(rows: Tensor) -> list[str]:
    """The implementations that can run on such embeddings, slowest first."""
    names = ["reference", "tiled"]
    if _why_not_triton(rows) is None:
        names.insert(2 if rows.is_cuda else 1, "triton")  # on a CPU in the interpreter, which is slow
    return names


def implementation(name: str, rows: Tensor) -> tuple[str, Implementation]:
    """The name and the functions of the implementation to use for embeddings like `rows`."""
    if name not in IMPLEMENTATIONS:
        raise ArgumentError(
            f"unknown implementation {name!r}; choose from {', '.join(IMPLEMENTATIONS)}",
            code="loss.unknown_implementation",
        )
    if name == "auto":
        name = available(rows)[-1]
    if name == "triton" and (reason := _why_not_triton(rows)) is not None:
        raise ArgumentError(
            f"implementation 'triton' cannot be used here: {reason}; use 'auto' or 'tiled'",
            code="loss.no_triton",
        )
    return name, cast(Implementation, importlib.import_module(f"leanclip.ops.{name}"))


def scalar_kernels(engine: Implementation) -> Any:
    """An implementation's kernels for the scalars of the anchors, where it has them: `triton.scalars`."""
    return getattr(engine, "scalars", None)


def _why_not_triton(rows: Tensor) -> str | None:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if rows.dtype not in (torch.float16, torch.bfloat16) and not (interpreted and rows.dtype == torch.float32):
        # float32 is faster in cuBLAS than in kernels without tensor cores, and `tiled` uses cuBLAS.
        return f"it takes float16 and bfloat16 embeddings, got {rows.dtype}"
    if not _triton_installed():
        return "Triton is not installed"
    if interpreted:
        return None
    if not rows.is_cuda or torch.version.cuda is None:
        return f"it needs an NVIDIA GPU, the embeddings are on {rows.device}"
    if device_capability(rows.get_device()) < OLDEST_CAPABILITY:
        return f"it needs compute capability 8.0 or newer, {torch.cuda.get_device_name(rows.device)} is older"
    return None


@functools.cache
def _triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def device_capability(device: int) -> int:
    """90 for compute capability 9.0."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor

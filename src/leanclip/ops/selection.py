"""Which implementation computes: by name, or `auto` for the fastest that is valid."""

from types import ModuleType
from typing import cast

from torch import Tensor

from leanclip.ops import reference, tiled
from leanclip.ops.types import Implementation

IMPLEMENTATIONS = ("auto", "reference", "tiled", "triton")


def available(rows: Tensor) -> list[str]:
    """The implementations that can run on such embeddings, slowest first."""
    names = ["reference", "tiled"]
    return names


def implementation(name: str, rows: Tensor) -> tuple[str, Implementation]:
    """The name and the functions of the implementation to use for embeddings like `rows`."""
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"unknown implementation {name!r}; choose from {', '.join(IMPLEMENTATIONS)}")
    if name == "auto":
        name = available(rows)[-1]
    modules: dict[str, ModuleType] = {"reference": reference, "tiled": tiled}
    if name not in modules:
        raise ValueError(f"implementation {name!r} cannot run on {rows.device}; use 'auto'")
    return name, cast(Implementation, modules[name])

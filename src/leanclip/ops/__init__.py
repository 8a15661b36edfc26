"""The contrastive engine: what every loss needs of the similarity matrix, without ever holding the matrix.

`statistics` before the scalars are known, `gradients` after; `pairwise` is both at once for losses that need no
normaliser. `implementation(name, ...)` selects the code that computes them.
"""

from leanclip.ops.products import accumulator_dtype, row_maxima
from leanclip.ops.selection import IMPLEMENTATIONS, available, implementation, scalar_kernels
from leanclip.ops.types import (
    AnchorForm,
    Estimates,
    Gradients,
    Implementation,
    Needs,
    Pairs,
    Pairwise,
    Sigmoid,
    Statistics,
    StoredTemperature,
    Terms,
)

__all__ = [
    "IMPLEMENTATIONS",
    "AnchorForm",
    "Estimates",
    "Gradients",
    "Implementation",
    "Needs",
    "Pairs",
    "Pairwise",
    "Sigmoid",
    "Statistics",
    "StoredTemperature",
    "Terms",
    "accumulator_dtype",
    "available",
    "implementation",
    "row_maxima",
    "scalar_kernels",
]

"""The contrastive engine: what every loss needs of the similarity matrix, without ever holding the matrix.

`statistics` before the scalars are known, `gradients` after; `pairwise` is both at once for losses that need no
normaliser. `implementation(name, ...)` picks who computes them.
"""

from leanclip.ops.maxima import row_maxima
from leanclip.ops.selection import IMPLEMENTATIONS, available, implementation
from leanclip.ops.types import Gradients, Implementation, Pairs, Pairwise, Statistics, Terms

__all__ = [
    "IMPLEMENTATIONS",
    "Gradients",
    "Implementation",
    "Pairs",
    "Pairwise",
    "Statistics",
    "Terms",
    "available",
    "implementation",
    "row_maxima",
]

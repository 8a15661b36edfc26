"""The matrix products of the engine, accumulated in float32 (float64 for float64) whatever the inputs are.

similarities(rows, cols, out)      out = rows @ cols.T
accumulate(out, weights, factors)  out += weights @ factors
row_maxima(rows, cols, groups)     (rows @ cols.T).amax(1)
"""

import torch
from torch import Tensor

MAXIMA_ROWS = 1024  # per tile


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums over pairs, and of everything the engine returns."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_narrow(tensor: Tensor) -> bool:
    """Whether the products should run in 16 bits with float32 sums: half-precision inputs on an NVIDIA GPU."""
    return tensor.dtype in (torch.float16, torch.bfloat16) and tensor.is_cuda and torch.version.cuda is not None


def operand(tensor: Tensor) -> Tensor:
    """The embeddings as they enter `similarities`: unchanged where 16-bit products are fast, else widened."""
    tensor = tensor.detach()
    return tensor if is_narrow(tensor) else tensor.to(accumulator_dtype(tensor.dtype))


def factor(tensor: Tensor) -> Tensor:
    """The embeddings as they enter `accumulate`. float16 turns into bfloat16, because weights exceed its range."""
    return tensor.to(torch.bfloat16) if is_narrow(tensor) else tensor


def similarities(rows: Tensor, cols: Tensor, out: Tensor) -> None:
    if rows.dtype == out.dtype:
        torch.mm(rows, cols.T, out=out)
    else:
        torch.mm(rows, cols.T, out_dtype=out.dtype, out=out)


def accumulate(out: Tensor, weights: Tensor, factors: Tensor, *, fresh: bool = False) -> None:
    """With `fresh`, the previous content of `out` is replaced instead of added to."""
    if weights.dtype == out.dtype:
        torch.addmm(out, weights, factors, beta=0 if fresh else 1, out=out)
    elif fresh:
        torch.mm(weights, factors, out_dtype=out.dtype, out=out)
    else:
        torch.addmm(out, weights, factors, out_dtype=out.dtype, out=out)


@torch.no_grad()
def row_maxima(rows: Tensor, cols: Tensor, groups: Tensor | None = None) -> Tensor:
    """The largest similarity of each row, a tile at a time; -inf where all columns are of the row's group."""
    dtype = accumulator_dtype(rows.dtype)
    columns, maxima = cols.to(dtype), []
    for start in range(0, len(rows), MAXIMA_ROWS):
        tile = rows[start : start + MAXIMA_ROWS].to(dtype) @ columns.T
        if groups is not None:
            tile.masked_fill_(groups[start : start + MAXIMA_ROWS, None] == groups, -torch.inf)
        maxima.append(tile.amax(1))
    return torch.cat(maxima)

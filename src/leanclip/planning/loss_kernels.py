"""The loss's fused kernels as a trace sees them: the allocations of `leanclip.ops.triton.launch`, and its arithmetic.

The real host code asks the tensors for addresses and the GPU for its properties, which fake ones do not have. A test
holds both against each other.
"""

import math

import torch
from torch import Tensor

from leanclip.ops import Gradients, Needs, Pairs, Pairwise, Sigmoid, Statistics, Terms
from leanclip.planning.step_trace import Kernel, Trace

PARTIAL_BYTES = 128 << 20
WEIGHT_BYTES = 256 << 20
BLOCK = 128  # rows and columns of a tile
LONGEST_STRIP = 32


class TracedEngine:
    """An `ops.Implementation` that allocates what the kernels do and notes what they compute."""

    def __init__(self, trace: Trace, processors: int) -> None:
        self.trace, self.processors = trace, processors

    def statistics(
        self, pairs: Pairs, row_scale: Tensor, col_scale: Tensor | None
    ) -> tuple[Statistics, Statistics | None]:
        rows, cols = pairs.rows.detach().contiguous(), pairs.cols.detach().contiguous()
        num_rows, num_cols = len(rows), len(cols)
        num_blocks = _ceil_div(num_cols, BLOCK)
        panel = _panel(num_rows, PARTIAL_BYTES // (8 * num_blocks))
        tiles = _ceil_div(panel, BLOCK) * num_blocks
        strip_rows = BLOCK * max(1, min(LONGEST_STRIP, tiles // (8 * self.processors)))
        strips = sum(_ceil_div(min(panel, num_rows - row), strip_rows) for row in range(0, num_rows, panel))
        by_rows = _statistics(num_rows)
        by_cols = None if col_scale is None else _statistics(num_cols)
        partial = torch.empty(2, num_blocks, panel), torch.empty(2, strips, num_cols if by_cols else 1)
        self._product(rows, cols)
        del partial
        return by_rows, by_cols

    def gradients(
        self, pairs: Pairs, row_terms: Terms | None, col_terms: Terms | None, diagonal: Tensor, *,
        needs: Needs = (True, True),
    ) -> Gradients:  # fmt: skip
        rows, cols = pairs.rows.detach().contiguous(), pairs.cols.detach().contiguous()
        buffer, found = self._sink(rows, cols, needs)
        self._product(rows, cols, written=any(needs))
        self._multiply(rows, cols, needs)
        del buffer
        return found

    def pairwise(self, pairs: Pairs, sigmoid: Sigmoid, diagonal: Tensor, *, needs: Needs = (True, True)) -> Pairwise:
        rows, cols = pairs.rows.detach().contiguous(), pairs.cols.detach().contiguous()
        buffer, found = self._sink(rows, cols, needs)
        height = buffer[0].shape[0] if any(needs) else len(rows)
        partial = torch.empty(3, _ceil_div(len(cols), BLOCK), height)
        sums = torch.empty(3, len(rows))
        self._product(rows, cols, written=any(needs))
        self._multiply(rows, cols, needs)
        del partial, buffer
        return Pairwise(sums[0], sums[1], sums[2], found)

    def _sink(self, rows: Tensor, cols: Tensor, needs: Needs) -> tuple[tuple[Tensor, ...], Gradients]:
        """The block of weights and the factors in its precision, and the gradients."""
        dtype = torch.float32 if rows.dtype == torch.float32 else torch.bfloat16
        height, width = _block_shape(len(rows), len(cols), WEIGHT_BYTES // dtype.itemsize)
        shape = (height, math.ceil(width / 8) * 8) if any(needs) else (1, 8)
        buffers = torch.empty(shape, dtype=dtype), rows.to(dtype), cols.to(dtype)
        found = (torch.empty(side.shape) if need else None for side, need in zip((rows, cols), needs, strict=True))
        return buffers, Gradients(*found)

    def _product(self, rows: Tensor, cols: Tensor, *, written: bool = False) -> None:
        """All similarities, each with its exponential."""
        pairs = len(rows) * len(cols)
        moved = rows.nbytes + cols.nbytes + (2 * pairs if written else 0)
        self.trace.launch(Kernel("loss", "loss", 2 * pairs * rows.shape[1], moved, rows.itemsize))

    def _multiply(self, rows: Tensor, cols: Tensor, needs: Needs) -> None:
        """The weights into the gradients, by cuBLAS."""
        size, (m, n) = rows.shape[1], (len(rows), len(cols))
        for need, shape in zip(needs, ((1, m, size, n), (1, n, size, m)), strict=True):
            if need:
                moved = 2 * m * n + 2 * shape[3] * size + 4 * shape[1] * size
                self.trace.launch(Kernel("matrix", "loss", 2 * m * n * size, moved, 2, shape))


def _statistics(count: int) -> Statistics:
    return Statistics(torch.empty(count), torch.empty(count))


def _ceil_div(total: int, part: int) -> int:
    return -(-total // part)


def _panel(num_rows: int, most: int) -> int:
    return num_rows if num_rows <= most else max(BLOCK, most // BLOCK * BLOCK)


def _block_shape(num_rows: int, num_cols: int, elements: int) -> tuple[int, int]:
    if num_rows * (math.ceil(num_cols / 8) * 8) <= elements:
        return num_rows, num_cols
    width = min(num_cols, max(256, int((2 * elements) ** 0.5) // 256 * 256))
    height = min(num_rows, max(256, elements // width // 256 * 256))
    return height, min(num_cols, max(256, elements // height // 256 * 256))

"""Host side of the fused kernels. Equal to `reference` up to rounding, with float32 sums; never waits for the device.

Peak extra memory: the results, one block of weights (WEIGHT_BYTES) and the partial sums (PARTIAL_BYTES per side).
"""

import functools
import math
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from leanclip.ops import products
from leanclip.ops.blocking import (
    DENSE_PAIRS,
    PARTIAL_BYTES,
    WEIGHT_BYTES,
    block_shape,
    ceil_div,
    panel_rows,
    strip_tiles,
)
from leanclip.ops.selection import device_capability
from leanclip.ops.triton import configs
from leanclip.ops.triton.kernel_cache import on_device, run
from leanclip.ops.triton.sums import dense_statistics, finish, largest_norms, statistics_kernel
from leanclip.ops.triton.weights import pairwise_kernel, weights_kernel
from leanclip.ops.types import Gradients, Needs, Pairs, Pairwise, Sigmoid, Statistics, Terms

DENSE_BLOCK, DENSE_CHUNK = 16, 256  # anchors of a program, and how many others it reads at once


class _Launch(NamedTuple):
    """The arguments that all kernels of one call share."""

    pairs: Pairs
    capability: int  # 0 in the interpreter
    dense: bool

    @classmethod
    def of(cls, pairs: Pairs) -> "_Launch":
        capability = device_capability(pairs.rows.get_device()) if pairs.rows.is_cuda else 0
        if capability:
            _bind_context(pairs.rows.device)
        rows, cols = pairs.rows.detach().contiguous(), pairs.cols.detach().contiguous()
        pairs = replace(pairs, rows=rows, cols=cols)
        return cls(pairs, capability, rows.shape[0] * cols.shape[0] <= DENSE_PAIRS)

    def config(self, kernel: str) -> configs.Config:
        return configs.config(kernel, self.capability) if self.capability else configs.INTERPRETED

    @property
    def num_processors(self) -> int:
        return _num_processors(self.pairs.rows.get_device()) if self.capability else 2

    @property
    def tma(self) -> bool:
        """Whether the copy engine of Hopper and later loads the tiles; it requires rows that start on 16 bytes."""
        if self.capability < 90 or self.dense:
            return False
        rows, cols = self.pairs.rows, self.pairs.cols
        return rows.shape[1] * rows.itemsize % 16 == 0 and rows.data_ptr() % 16 == 0 and cols.data_ptr() % 16 == 0

    def constants(self) -> dict[str, Any]:
        return {
            "DIM": self.pairs.rows.shape[1],
            "MASK_POSITIVES": self.pairs.mask_positives,
            "GROUPS": self.pairs.groups is not None,
        }

    def tile_constants(self, config: configs.Config) -> dict[str, Any]:
        return {**self.constants(), **config.blocks(), "TMA": self.tma}

    def embeddings(self, config: configs.Config) -> tuple[Any, Any]:
        if not self.tma:
            return self.pairs.rows, self.pairs.cols
        return (
            TensorDescriptor.from_tensor(self.pairs.rows, [config.block_r, config.block_k]),
            TensorDescriptor.from_tensor(self.pairs.cols, [config.block_c, config.block_k]),
        )

    def groups(self) -> tuple[Tensor, Tensor]:
        """Without groups the kernels get any pointer, and do not read it."""
        if self.pairs.groups is None:
            return self.pairs.rows, self.pairs.cols
        row_groups, col_groups = self.pairs.groups
        return row_groups.contiguous(), col_groups.contiguous()

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.pairs.rows.device)


@functools.cache
def _num_processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


_bound = threading.local()


def _bind_context(device: torch.device) -> None:
    """Triton describes tensors to the copy engine before anything binds the device to a new thread (autograd's)."""
    if getattr(_bound, "device", None) != device:
        with torch.cuda.device(device):
            torch.cuda.Event().record()
        _bound.device = device


def statistics(pairs: Pairs, row_scale: Tensor, col_scale: Tensor | None) -> tuple[Statistics, Statistics | None]:
    """Equals `reference.statistics`. Equal single scales on both sides halve the exponentials."""
    launch = _Launch.of(pairs)
    compute = _dense_statistics if launch.dense else _fused_statistics
    with on_device(launch.pairs.rows):
        return compute(launch, row_scale, col_scale)


def _dense_statistics(
    launch: _Launch, row_scale: Tensor, col_scale: Tensor | None
) -> tuple[Statistics, Statistics | None]:
    rows, cols = launch.pairs.rows, launch.pairs.cols
    matrix, by_rows = launch.empty(len(rows), len(cols)), launch.empty(2, len(rows))
    by_cols = None if col_scale is None else launch.empty(2, len(cols))
    products.similarities(rows, cols, out=matrix)
    constants = launch.constants()
    del constants["DIM"]
    run(
        dense_statistics,
        (ceil_div(max(matrix.shape), DENSE_BLOCK), 1 if by_cols is None else 2, 1),
        (
            matrix,
            row_scale,
            row_scale if col_scale is None else col_scale,
            *launch.groups(),
            by_rows,
            by_rows if by_cols is None else by_cols,
            *matrix.shape,
            launch.pairs.offset,
        ),
        {
            "BLOCK": DENSE_BLOCK,
            "CHUNK": DENSE_CHUNK,
            "ROW_VECTOR": row_scale.ndim == 1,
            "COL_VECTOR": col_scale is not None and col_scale.ndim == 1,
        }
        | constants,
        {"num_warps": 4},
    )
    return Statistics(*by_rows.unbind()), None if by_cols is None else Statistics(*by_cols.unbind())


def _fused_statistics(
    launch: _Launch, row_scale: Tensor, col_scale: Tensor | None
) -> tuple[Statistics, Statistics | None]:
    config = launch.config("statistics")
    num_rows, num_cols = len(launch.pairs.rows), len(launch.pairs.cols)
    squares = _squared_norms(launch)
    num_blocks = ceil_div(num_cols, config.block_c)
    panel = panel_rows(num_rows, config.block_r, PARTIAL_BYTES // (8 * num_blocks))
    strip = strip_tiles(ceil_div(panel, config.block_r) * num_blocks, launch.num_processors)
    strips = [
        ceil_div(min(panel, num_rows - row), strip * config.block_r) for row in range(0, num_rows, panel)
    ]  # of each panel
    by_rows = Statistics(launch.empty(num_rows), launch.empty(num_rows))
    by_cols = None if col_scale is None else Statistics(launch.empty(num_cols), launch.empty(num_cols))
    row_partial = launch.empty(2, num_blocks, panel)
    col_partial = launch.empty(2, sum(strips) if by_cols else 1, num_cols if by_cols else 1)
    constants = {
        "STRIP": strip,
        "SLOTS": min(config.num_warps, config.block_r // 16),
        "ROW_VECTOR": row_scale.ndim == 1,
        "COL_VECTOR": col_scale is not None and col_scale.ndim == 1,
        "BY_COLS": col_scale is not None,
    }
    for number, row in enumerate(range(0, num_rows, panel)):
        end = min(row + panel, num_rows)
        run(
            statistics_kernel,
            (num_blocks * strips[number], 1, 1),
            (
                *launch.embeddings(config),
                row_scale,
                row_scale if col_scale is None else col_scale,
                squares,
                *launch.groups(),
                row_partial,
                col_partial,
                row,
                end,
                num_cols,
                launch.pairs.offset,
                sum(strips[:number]),
                col_partial.shape[1],
                row_partial.stride(1),
                col_partial.stride(1),
            ),
            launch.tile_constants(config) | constants,
            config.options(),
        )
        _finish(launch, row_scale, squares, row_partial, by_rows, row, end)
    if by_cols is not None and col_scale is not None:
        transposed = launch._replace(pairs=launch.pairs.transposed())
        _finish(transposed, col_scale, squares, col_partial, by_cols, 0, num_cols)
    return by_rows, by_cols


def _squared_norms(launch: _Launch) -> Tensor:
    rows, cols, squares = launch.pairs.rows, launch.pairs.cols, launch.empty(2).zero_()
    block = 64 if launch.capability else 32
    run(
        largest_norms,
        (ceil_div(max(len(rows), len(cols)), block), 2, 1),
        (rows, cols, squares, len(rows), len(cols)),
        {"DIM": rows.shape[1], "BLOCK": block, "BLOCK_K": 64},
        {"num_warps": 4},
    )
    return squares


def _finish(
    launch: _Launch, scale: Tensor, squares: Tensor, partial: Tensor, result: Statistics, first: int, end: int
) -> None:
    config, pairs = launch.config("finish"), launch.pairs
    run(
        finish,
        (ceil_div(end - first, config.block_r), 1, 1),
        (
            pairs.rows,
            pairs.cols,
            scale,
            squares,
            *launch.groups(),
            partial,
            *result,
            first,
            end,
            len(pairs.cols),
            pairs.offset,
            partial.stride(1),
            partial.shape[1],
        ),
        {
            **launch.constants(),
            "BLOCK": config.block_r,
            "BLOCK_C": config.block_c,
            "BLOCK_K": config.block_k,
            "CHUNK": 16,
            "VECTOR": scale.ndim == 1,
        },
        config.options(),
    )


def gradients(
    pairs: Pairs, row_terms: Terms, col_terms: Terms, diagonal: Tensor, *, needs: Needs = (True, True)
) -> Gradients:
    """Equals `reference.gradients`. Equal single scales need one exponential per pair, not two."""
    launch = _Launch.of(pairs)
    constants = {"ROW_VECTOR": row_terms.scale.ndim == 1, "COL_VECTOR": col_terms.scale.ndim == 1}
    scalars = tuple(tensor.contiguous() for tensor in (*row_terms, *col_terms, diagonal))
    with on_device(launch.pairs.rows):
        weights = _WeightBlocks(launch, launch.config("weights"), needs)
        if any(needs):
            for block in weights.blocks():
                weights.compute(weights_kernel, block, scalars, constants)
    return weights.gradients


def pairwise(pairs: Pairs, sigmoid: Sigmoid, diagonal: Tensor, *, needs: Needs = (True, True)) -> Pairwise:
    """Equals `reference.pairwise`."""
    launch = _Launch.of(pairs)
    config = launch.config("pairwise")
    weighted = sigmoid.sides is not None
    # Without weights of the sides the kernel gets any pointer, and does not read it.
    tensors = (*sigmoid[:3], diagonal, *(sigmoid.sides or (diagonal, diagonal)))
    scalars = tuple(tensor.contiguous() for tensor in tensors)
    num_cols = len(pairs.cols)
    with on_device(launch.pairs.rows):
        weights = _WeightBlocks(launch, config, needs)
        partial = launch.empty(3, ceil_div(num_cols, config.block_c), weights.height)
        sums = launch.empty(3, len(pairs.rows))
        for block in weights.blocks():
            weights.compute(pairwise_kernel, block, scalars, {"STORE": any(needs), "WEIGHTED": weighted}, partial)
            if block.end_col == num_cols:
                height = block.end_row - block.row
                torch.sum(partial[:, :, :height], 1, out=sums[:, block.row : block.end_row])
    return Pairwise(sums[0], sums[1], sums[2], weights.gradients)


class _Block(NamedTuple):
    row: int
    end_row: int
    col: int
    end_col: int


class _WeightBlocks:
    """The reused buffer for a block of weights, and the gradients that it is multiplied into.

    Weights are stored in bfloat16 for 16-bit embeddings: they exceed float16's range.
    """

    def __init__(self, launch: _Launch, config: configs.Config, needs: Needs) -> None:
        self.launch, self.config = launch, config
        rows, cols = launch.pairs.rows, launch.pairs.cols
        dtype = torch.float32 if rows.dtype == torch.float32 else torch.bfloat16  # float32 only in the interpreter
        self.height, self.width = block_shape(len(rows), len(cols), WEIGHT_BYTES // dtype.itemsize)
        # Row starts on 16 bytes, for the copy engine and for cuBLAS.
        shape = (self.height, math.ceil(self.width / 8) * 8) if any(needs) else (1, 8)
        self.buffer = torch.empty(shape, dtype=dtype, device=rows.device)
        self.row_factor, self.col_factor = rows.to(dtype), cols.to(dtype)
        self.gradients = Gradients(
            launch.empty(*rows.shape) if needs[0] else None, launch.empty(*cols.shape) if needs[1] else None
        )

    def blocks(self) -> Iterator[_Block]:
        num_rows, num_cols = len(self.launch.pairs.rows), len(self.launch.pairs.cols)
        for row in range(0, num_rows, self.height):
            for col in range(0, num_cols, self.width):
                yield _Block(row, min(row + self.height, num_rows), col, min(col + self.width, num_cols))

    def compute(
        self,
        kernel: Any,
        block: _Block,
        scalars: tuple[Tensor, ...],
        constants: dict[str, Any],
        partial: Tensor | None = None,
    ) -> None:
        """Let the kernel write a block of weights (and its `partial` sums), and add its part of the gradients."""
        launch, config = self.launch, self.config
        height, width = block.end_row - block.row, block.end_col - block.col
        run(
            kernel,
            (ceil_div(height, config.block_r) * ceil_div(width, config.block_c), 1, 1),
            (
                *launch.embeddings(config),
                *scalars,
                *launch.groups(),
                self._target(),
                *(() if partial is None else (partial,)),
                *block,
                len(launch.pairs.rows),
                len(launch.pairs.cols),
                launch.pairs.offset,
                self.buffer.stride(0),
                *(() if partial is None else partial.stride()[:2]),
            ),
            launch.tile_constants(config) | constants,
            config.options(),
        )
        inside_rows, inside_cols = slice(block.row, block.end_row), slice(block.col, block.end_col)
        weights = self.buffer[:height, :width]
        if (gradient := self.gradients.rows) is not None:
            products.accumulate(gradient[inside_rows], weights, self.col_factor[inside_cols], fresh=block.col == 0)
        if (gradient := self.gradients.cols) is not None:
            products.accumulate(gradient[inside_cols], weights.T, self.row_factor[inside_rows], fresh=block.row == 0)

    def _target(self) -> Any:
        if not self.launch.tma:
            return self.buffer
        return TensorDescriptor.from_tensor(self.buffer, [self.config.block_r, self.config.block_c // 2])

"""Host side of the fused kernels. Equal to `reference` up to rounding, with float32 sums; never waits for the device.

Peak extra memory: the results, one block of weights (WEIGHT_BYTES) and the partial sums (PARTIAL_BYTES per side).
"""

import contextlib
import functools
import math
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from leanclip.ops import products
from leanclip.ops.triton import configs
from leanclip.ops.triton.kernel import run
from leanclip.ops.triton.sums import finish, largest_norms, statistics_kernel
from leanclip.ops.triton.weights import pairwise_kernel, weights_kernel
from leanclip.ops.types import Gradients, Pairs, Pairwise, Statistics, Terms

PARTIAL_BYTES = 128 << 20
WEIGHT_BYTES = 256 << 20
LONGEST_STRIP = 32
# Off only in tests: the interpreter can run the fast forms in float32 alone.
PRECISE_FLOAT32 = True


class _Launch(NamedTuple):
    """What all kernels of one call agree on."""

    rows: Tensor
    cols: Tensor
    pairs: Pairs
    capability: int  # 0 in the interpreter

    @classmethod
    def of(cls, rows: Tensor, cols: Tensor, pairs: Pairs) -> "_Launch":
        capability = _capability(rows.get_device()) if rows.is_cuda else 0
        if capability:
            _bind_context(rows.device)
        return cls(rows.detach().contiguous(), cols.detach().contiguous(), pairs, capability)

    def transposed(self) -> "_Launch":
        return self._replace(rows=self.cols, cols=self.rows, pairs=self.pairs.transposed())

    def config(self, kernel: str) -> configs.Config:
        return configs.config(kernel, self.rows.dtype, self.capability) if self.capability else configs.INTERPRETED

    @property
    def num_processors(self) -> int:
        return _num_processors(self.rows.get_device()) if self.capability else 2

    @property
    def tma(self) -> bool:
        """The copy engine of Hopper and later wants rows that start on 16 bytes."""
        aligned = self.rows.shape[1] * self.rows.itemsize % 16 == 0
        aligned = aligned and self.rows.data_ptr() % 16 == 0 and self.cols.data_ptr() % 16 == 0
        return self.capability >= 90 and aligned and self.rows.dtype != torch.float32

    @property
    def precise(self) -> bool:
        """float32 embeddings deserve float32 results; 16-bit ones have rounded more than the fast forms do."""
        return self.rows.dtype == torch.float32 and PRECISE_FLOAT32

    def constants(self) -> dict[str, Any]:
        return {
            "DIM": self.rows.shape[1],
            "MASK_POSITIVES": self.pairs.mask_positives,
            "GROUPS": self.pairs.row_groups is not None,
        }

    def embeddings(self, config: configs.Config) -> tuple[Any, Any]:
        if not self.tma:
            return self.rows, self.cols
        return (
            TensorDescriptor.from_tensor(self.rows, [config.block_r, config.block_k]),
            TensorDescriptor.from_tensor(self.cols, [config.block_c, config.block_k]),
        )

    def groups(self) -> tuple[Tensor, Tensor]:
        """Where there are none the kernels get any pointer, and do not read it."""
        if self.pairs.row_groups is None or self.pairs.col_groups is None:
            return self.rows, self.cols
        return self.pairs.row_groups.contiguous(), self.pairs.col_groups.contiguous()

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float32, device=self.rows.device)

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.rows.device)

    def device(self) -> AbstractContextManager[Any]:
        """Triton launches on the current device."""
        return torch.cuda.device(self.rows.device) if self.capability else contextlib.nullcontext()


@functools.cache
def _capability(device: int) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


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


def statistics(
    rows: Tensor, cols: Tensor, row_scale: Tensor, col_scale: Tensor | None, *, pairs: Pairs
) -> tuple[Statistics, Statistics | None]:
    """Equals `reference.statistics`. Equal single scales on both sides halve the exponentials."""
    launch = _Launch.of(rows, cols, pairs)
    with launch.device():
        return _statistics(launch, row_scale.detach(), None if col_scale is None else col_scale.detach())


def _statistics(launch: _Launch, row_scale: Tensor, col_scale: Tensor | None) -> tuple[Statistics, Statistics | None]:
    if launch.precise:
        return _precise_statistics(launch, row_scale, col_scale)
    config = launch.config("statistics")
    num_rows, num_cols = len(launch.rows), len(launch.cols)
    squares = _squared_norms(launch)
    num_blocks = _ceil_div(num_cols, config.block_c)
    panel = _panel(num_rows, config.block_r, PARTIAL_BYTES // (8 * num_blocks))
    strip = _strip(_ceil_div(panel, config.block_r) * num_blocks, launch.num_processors)
    strip_rows = strip * config.block_r
    by_rows = Statistics(launch.empty(num_rows), launch.empty(num_rows))
    by_cols = None if col_scale is None else Statistics(launch.empty(num_cols), launch.empty(num_cols))
    row_partial = launch.empty(2, num_blocks, panel)
    num_strips = sum(_ceil_div(min(panel, num_rows - row), strip_rows) for row in range(0, num_rows, panel))
    col_partial = launch.empty(2, num_strips if by_cols else 1, num_cols if by_cols else 1)
    done = 0
    for row in range(0, num_rows, panel):
        end = min(row + panel, num_rows)
        strips = _ceil_div(end - row, strip_rows)
        _partial_sums(launch, config, row_scale, col_scale, squares, row_partial, col_partial, row, end, done, strip)
        done += strips
        _finish(launch, row_scale, squares, row_partial, by_rows, row, end)
    if by_cols is not None and col_scale is not None:
        _finish(launch.transposed(), col_scale, squares, col_partial, by_cols, 0, num_cols)
    return by_rows, by_cols


def _precise_statistics(
    launch: _Launch, row_scale: Tensor, col_scale: Tensor | None
) -> tuple[Statistics, Statistics | None]:
    """Every direction from its own pass with a running maximum; the partial sums are not used."""
    unused = launch.empty(2, 1, 1)
    results: list[Statistics | None] = []
    for side, scale in ((launch, row_scale), (launch.transposed(), col_scale)):
        result = None if scale is None else Statistics(launch.empty(len(side.rows)), launch.empty(len(side.rows)))
        if result is not None and scale is not None:
            _finish(side, scale, unused, unused, result, 0, len(side.rows))
        results.append(result)
    assert results[0] is not None
    return results[0], results[1]


def _squared_norms(launch: _Launch) -> Tensor:
    squares = launch.zeros(2)
    block = 64 if launch.capability else 32
    num_programs = _ceil_div(max(len(launch.rows), len(launch.cols)), block)
    run(
        largest_norms,
        (num_programs, 2, 1),
        (launch.rows, launch.cols, squares, len(launch.rows), len(launch.cols)),
        {"DIM": launch.rows.shape[1], "BLOCK": block, "BLOCK_K": 64},
        {"num_warps": 4},
    )
    return squares


def _partial_sums(
    launch: _Launch,
    config: configs.Config,
    row_scale: Tensor,
    col_scale: Tensor | None,
    squares: Tensor,
    row_partial: Tensor,
    col_partial: Tensor,
    row: int,
    end: int,
    first_strip: int,
    strip: int,
) -> None:
    num_programs = row_partial.shape[1] * _ceil_div(end - row, strip * config.block_r)
    run(
        statistics_kernel,
        (num_programs, 1, 1),
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
            len(launch.cols),
            launch.pairs.offset,
            first_strip,
            col_partial.shape[1],
            row_partial.stride(1),
            col_partial.stride(1),
        ),
        {
            **launch.constants(),
            **config.blocks(),
            "STRIP": strip,
            "SLOTS": min(config.num_warps, config.block_r // 16),
            "ROW_VECTOR": row_scale.ndim == 1,
            "COL_VECTOR": col_scale is not None and col_scale.ndim == 1,
            "BY_COLS": col_scale is not None,
            "TMA": launch.tma,
        },
        config.options(),
    )


def _finish(
    launch: _Launch,
    scale: Tensor,
    squares: Tensor,
    partial: Tensor,
    result: Statistics,
    first: int,
    end: int,
) -> None:
    config = launch.config("finish")
    run(
        finish,
        (_ceil_div(end - first, config.block_r), 1, 1),
        (
            launch.rows,
            launch.cols,
            scale,
            squares,
            *launch.groups(),
            partial,
            result.log_sum,
            result.mean,
            first,
            end,
            len(launch.cols),
            launch.pairs.offset,
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
            "PRECISE": launch.precise,
        },
        config.options(),
    )


def gradients(
    rows: Tensor,
    cols: Tensor,
    row_terms: Terms | None,
    col_terms: Terms | None,
    diagonal: Tensor,
    *,
    pairs: Pairs,
    needs: tuple[bool, bool] = (True, True),
) -> Gradients:
    """Equals `reference.gradients`. Equal single scales need one exponential per pair, not two."""
    launch = _Launch.of(rows, cols, pairs)
    some = row_terms or col_terms
    constants: dict[str, Any] = {
        "TMA": launch.tma,
        "ROW_VECTOR": row_terms is not None and row_terms.scale.ndim == 1,
        "COL_VECTOR": col_terms is not None and col_terms.scale.ndim == 1,
        "BY_ROWS": row_terms is not None,
        "BY_COLS": col_terms is not None,
        "PRECISE": launch.precise,
    }
    # A side without terms gets pointers that are not read for its weights, but must reach as far as it.
    row_scalars = _scalars(row_terms, some, len(rows), launch)
    col_scalars = _scalars(col_terms, some, len(cols), launch)
    config = launch.config("weights")
    diagonal = diagonal.detach().contiguous()
    with launch.device():
        sink = _Sink(launch, config, needs)
        if any(needs):
            for block in sink.blocks():
                run(
                    weights_kernel,
                    (block.num_tiles, 1, 1),
                    (
                        *launch.embeddings(config),
                        *row_scalars,
                        *col_scalars,
                        diagonal,
                        *launch.groups(),
                        sink.target(),
                        *block.extent,
                        len(launch.rows),
                        len(launch.cols),
                        launch.pairs.offset,
                        sink.buffer.stride(0),
                    ),
                    {**launch.constants(), **config.blocks(), **constants},
                    config.options(),
                )
                sink.add(block)
    return sink.gradients


def _scalars(terms: Terms | None, other: Terms | None, count: int, launch: _Launch) -> tuple[Tensor, Tensor]:
    if terms is None:
        return launch.zeros(1) if other is None else other.scale.detach(), launch.zeros(count)
    return terms.scale.detach().contiguous(), terms.log_weight.detach().contiguous()


def pairwise(
    rows: Tensor,
    cols: Tensor,
    scale: Tensor,
    bias: Tensor,
    weight: Tensor,
    diagonal: Tensor,
    *,
    pairs: Pairs,
    needs: tuple[bool, bool] = (True, True),
) -> Pairwise:
    """Equals `reference.pairwise`."""
    launch = _Launch.of(rows, cols, pairs)
    config = launch.config("pairwise")
    scalars = [tensor.detach().contiguous() for tensor in (scale, bias, weight, diagonal)]
    with launch.device():
        sink = _Sink(launch, config, needs)
        num_blocks = _ceil_div(len(cols), config.block_c)
        partial = launch.empty(3, num_blocks, sink.height)
        sums = launch.empty(3, len(rows))
        for block in sink.blocks():
            run(
                pairwise_kernel,
                (block.num_tiles, 1, 1),
                (
                    *launch.embeddings(config),
                    *scalars,
                    *launch.groups(),
                    sink.target(),
                    partial,
                    *block.extent,
                    len(launch.rows),
                    len(launch.cols),
                    launch.pairs.offset,
                    sink.buffer.stride(0),
                    partial.stride(0),
                    partial.stride(1),
                ),
                {
                    **launch.constants(),
                    **config.blocks(),
                    "WANTED": any(needs),
                    "PRECISE": launch.precise,
                    "TMA": launch.tma,
                },
                config.options(),
            )
            sink.add(block)
            if block.end_col == len(cols):
                height = block.end_row - block.row
                torch.sum(partial[:, :, :height], 1, out=sums[:, block.row : block.end_row])
    return Pairwise(sums[0], sums[1], sums[2], sink.gradients)


class _Block(NamedTuple):
    row: int
    end_row: int
    col: int
    end_col: int
    num_tiles: int

    @property
    def extent(self) -> tuple[int, int, int, int]:
        return self.row, self.end_row, self.col, self.end_col


class _Sink:
    """The reused buffer for a block of weights, and the gradients that it is multiplied into.

    Weights are stored in bfloat16 for 16-bit embeddings: they exceed float16's range.
    """

    def __init__(self, launch: _Launch, config: configs.Config, needs: tuple[bool, bool]) -> None:
        self.launch, self.config = launch, config
        dtype = torch.float32 if launch.rows.dtype == torch.float32 else torch.bfloat16
        num_rows, num_cols = len(launch.rows), len(launch.cols)
        self.height, self.width = _block_shape(num_rows, num_cols, WEIGHT_BYTES // dtype.itemsize)
        # Row starts on 16 bytes, for the copy engine and for cuBLAS.
        shape = (self.height, math.ceil(self.width / 8) * 8) if any(needs) else (1, 8)
        self.buffer = torch.empty(shape, dtype=dtype, device=launch.rows.device)
        self.row_factor, self.col_factor = launch.rows.to(dtype), launch.cols.to(dtype)
        self.gradients = Gradients(
            launch.empty(*launch.rows.shape) if needs[0] else None,
            launch.empty(*launch.cols.shape) if needs[1] else None,
        )

    def target(self) -> Any:
        if not self.launch.tma:
            return self.buffer
        return TensorDescriptor.from_tensor(self.buffer, [self.config.block_r, self.config.block_c // 2])

    def blocks(self) -> Iterator[_Block]:
        num_rows, num_cols = len(self.launch.rows), len(self.launch.cols)
        for row in range(0, num_rows, self.height):
            end_row = min(row + self.height, num_rows)
            tall = _ceil_div(end_row - row, self.config.block_r)
            for col in range(0, num_cols, self.width):
                end_col = min(col + self.width, num_cols)
                yield _Block(row, end_row, col, end_col, tall * _ceil_div(end_col - col, self.config.block_c))

    def add(self, block: _Block) -> None:
        inside_rows, inside_cols = slice(block.row, block.end_row), slice(block.col, block.end_col)
        weights = self.buffer[: block.end_row - block.row, : block.end_col - block.col]
        if self.gradients.rows is not None:
            products.accumulate(
                self.gradients.rows[inside_rows], weights, self.col_factor[inside_cols], fresh=block.col == 0
            )
        if self.gradients.cols is not None:
            products.accumulate(
                self.gradients.cols[inside_cols], weights.T, self.row_factor[inside_rows], fresh=block.row == 0
            )


def _ceil_div(total: int, part: int) -> int:
    return -(-total // part)


def _panel(num_rows: int, block: int, most: int) -> int:
    """Rows whose partial sums are held at once: a multiple of the block, or all."""
    return num_rows if num_rows <= most else max(block, most // block * block)


def _strip(num_tiles: int, num_processors: int) -> int:
    """Tiles per program: long strips store fewer partial sums, but every processor should get several strips."""
    return max(1, min(LONGEST_STRIP, num_tiles // (8 * num_processors)))


def _block_shape(num_rows: int, num_cols: int, elements: int) -> tuple[int, int]:
    """Half as high as wide, in multiples of 256 unless all fits: the two products then fill the chip alike."""
    if num_rows * (math.ceil(num_cols / 8) * 8) <= elements:
        return num_rows, num_cols
    width = min(num_cols, max(256, int((2 * elements) ** 0.5) // 256 * 256))
    height = min(num_rows, max(256, elements // width // 256 * 256))
    return height, min(num_cols, max(256, elements // height // 256 * 256))

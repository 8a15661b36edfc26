"""One process as the first of several GPUs: a process group that sends nothing, and what only a GPU runs, the fused
loss kernels among it."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grad

from leanclip import ops
from leanclip.distributed import Ranks
from leanclip.models import transformer_towers as towers
from leanclip.ops import Gradients, Needs, Pairs, Pairwise, Sigmoid, Statistics, Terms, attention, blocking, tiled
from leanclip.ops.products import accumulator_dtype
from leanclip.planning.compiled_cost import traced_compile
from leanclip.planning.step_trace import Kernel, Trace

HALF = (torch.float16, torch.bfloat16)
TILE = 128  # rows and columns of a loss kernel


class TracedEngine:
    """An `ops.Implementation` that allocates what the fused kernels do (`leanclip.ops.triton.launch`) and counts what
    they compute.

    The real host code reads addresses of tensors and properties of the GPU, which fake tensors do not have, and takes
    as many steps as there are blocks.
    """

    def __init__(self, trace: Trace, processors: int) -> None:
        self.trace, self.processors = trace, processors

    def statistics(
        self, pairs: Pairs, row_scale: Tensor, col_scale: Tensor | None
    ) -> tuple[Statistics, Statistics | None]:
        num_rows, num_cols = len(pairs.rows), len(pairs.cols)
        dense = num_rows * num_cols <= blocking.DENSE_PAIRS
        num_blocks = blocking.ceil_div(num_cols, TILE)
        panel = blocking.panel_rows(num_rows, TILE, blocking.PARTIAL_BYTES // (8 * num_blocks))
        strip_rows = TILE * blocking.strip_tiles(blocking.ceil_div(panel, TILE) * num_blocks, self.processors)
        strips = sum(blocking.ceil_div(min(panel, num_rows - row), strip_rows) for row in range(0, num_rows, panel))
        by_rows = Statistics(torch.empty(num_rows), torch.empty(num_rows))
        by_cols = None if col_scale is None else Statistics(torch.empty(num_cols), torch.empty(num_cols))
        if dense:
            _matrix = torch.empty(num_rows, num_cols)
        else:
            _partial = torch.empty(2, num_blocks, panel), torch.empty(2, strips, num_cols if by_cols else 1)
        self._similarities(pairs, written=8 * num_rows * num_cols if dense else 0)
        return by_rows, by_cols

    def gradients(
        self, pairs: Pairs, row_terms: Terms, col_terms: Terms, diagonal: Tensor, *,
        needs: Needs = (True, True),
    ) -> Gradients:  # fmt: skip
        return self._weighted(pairs, needs)[0]

    def pairwise(self, pairs: Pairs, sigmoid: Sigmoid, diagonal: Tensor, *, needs: Needs = (True, True)) -> Pairwise:
        gradients, sums = self._weighted(pairs, needs, sums=3)
        return Pairwise(sums[0], sums[1], sums[2], gradients)

    def _weighted(self, pairs: Pairs, needs: Needs, sums: int = 0) -> tuple[Gradients, Tensor]:
        """A block of weights, the factors in its precision, the gradients, and sums of each row."""
        rows, cols = (side.detach().contiguous() for side in (pairs.rows, pairs.cols))
        (m, n), size = (len(rows), len(cols)), rows.shape[1]
        height, width = blocking.block_shape(m, n, blocking.WEIGHT_BYTES // 2)
        _weights = torch.empty((height, math.ceil(width / 8) * 8) if any(needs) else (1, 8), dtype=torch.bfloat16)
        _factors = rows.to(torch.bfloat16), cols.to(torch.bfloat16)
        gradients = [
            torch.empty(side.shape) if need else None for side, need in zip((rows, cols), needs, strict=True)
        ]
        _partial = torch.empty(sums, blocking.ceil_div(n, TILE), height if any(needs) else m)
        self._similarities(pairs, written=2 * m * n if any(needs) else 0)
        for need, (rows_of, depth) in zip(needs, ((m, n), (n, m)), strict=True):
            if need:  # the weights into the gradients, by cuBLAS
                moved = 2 * m * n + 2 * depth * size + 4 * rows_of * size
                self.trace.launch(Kernel("matrix", "loss", 2 * m * n * size, moved, 2, (1, rows_of, size, depth)))
        return Gradients(*gradients), torch.empty(sums, m)

    def _similarities(self, pairs: Pairs, written: int = 0) -> None:
        """All of them, each with its exponential."""
        flops = 2 * len(pairs.rows) * len(pairs.cols) * pairs.rows.shape[1]
        moved = pairs.rows.nbytes + pairs.cols.nbytes + written
        self.trace.launch(Kernel("loss", "loss", flops, moved, pairs.rows.itemsize))


def two_rows_of_tiles(trace: Trace, real: Any, pairs: Pairs, *, buffers: int) -> Iterator[Any]:
    """The first row of tiles, and the second in the place of all others: a large matrix has thousands of them."""
    elements = tiled.GPU_TILE_BYTES // (buffers * accumulator_dtype(pairs.rows.dtype).itemsize)
    height, width = tiled._tile_shape(len(pairs.rows), len(pairs.cols), elements)
    tiles = real(replace(pairs, rows=pairs.rows[: 2 * height]), buffers=buffers)
    yield from islice(tiles, blocking.ceil_div(len(pairs.cols), width))
    others = blocking.ceil_div(len(pairs.rows), height) - 1
    trace.times *= max(1, others)
    yield from tiles
    trace.times //= max(1, others)


@contextlib.contextmanager
def simulated(trace: Trace, *, ranks: int, processors: int) -> Iterator[Ranks]:
    """Inside, this process is rank 0 of `ranks`. In 16 bits the loss runs on the stand-in of its fused kernels and
    attention as on a GPU; what the towers compile is compiled for the trace."""
    engine, real = TracedEngine(trace, processors), ops.implementation

    def implementation(name: str, rows: Tensor) -> tuple[str, ops.Implementation]:
        if name in ("auto", "triton") and rows.dtype in HALF:
            return "triton", engine
        return real("tiled" if name == "auto" else name, rows)

    replacements = [
        (towers, "compiled", traced_compile),
        (attention, "uses_kernel", lambda qkv: qkv.dtype in HALF and qkv.shape[-1] in attention.HEAD_SIZES),
        (ops, "implementation", implementation),
        (tiled, "CPU_TILE_BYTES", tiled.GPU_TILE_BYTES),  # fake tensors are on the CPU
        (tiled, "_tiles", partial(two_rows_of_tiles, trace, tiled._tiles)),
        # On a GPU, clipping takes all gradients at once.
        (clip_grad, "_has_foreach_support", lambda tensors, device: True),
        (clip_grad, "_device_has_foreach_support", lambda device: True),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, value in replacements:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        if ranks > 1:
            from torch.testing._internal.distributed.fake_pg import FakeStore

            store: Any = FakeStore()
            dist.init_process_group("fake", store=store, rank=0, world_size=ranks)
            stack.callback(dist.destroy_process_group)
        yield Ranks.current()

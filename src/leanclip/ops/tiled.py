"""Chunked PyTorch, for any device and dtype: walks the similarity matrix in tiles and keeps only sums.

Equal to `reference` up to rounding; sums are float32 (float64 for float64 inputs). Maxima are kept online, so that
no temperature overflows. Nothing here waits for the device.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from leanclip.ops import products
from leanclip.ops.types import Gradients, Pairs, Pairwise, Statistics, Terms

# Bytes of all tile buffers together. On CPUs a tile should stay in the last-level cache, on GPUs fill the chip.
CPU_TILE_BYTES = 12 << 20
GPU_TILE_BYTES = 192 << 20


@torch.no_grad()
def statistics(
    rows: Tensor,
    cols: Tensor,
    row_scale: Tensor,
    col_scale: Tensor | None,
    *,
    pairs: Pairs,
    tile_bytes: int | None = None,
) -> tuple[Statistics, Statistics | None]:
    """Equals `reference.statistics`; a tile of similarities serves both directions."""
    rows, cols = products.operand(rows), products.operand(cols)
    by_rows, by_cols = _Running.empty(rows), None if col_scale is None else _Running.empty(cols)
    for tile in _tiles(rows, cols, pairs, buffers=2, tile_bytes=tile_bytes):
        similarity, logits = tile.buffers
        products.similarities(rows[tile.rows], cols[tile.cols], out=similarity)
        torch.mul(similarity, _column(row_scale, tile.rows), out=logits)
        by_rows.add(tile.rows, 1, tile.leave_out(logits, -torch.inf), similarity)
        if by_cols is not None and col_scale is not None:
            torch.mul(similarity, _row(col_scale, tile.cols), out=logits)
            by_cols.add(tile.cols, 0, tile.leave_out(logits, -torch.inf), similarity)
    return by_rows.result(), None if by_cols is None else by_cols.result()


@torch.no_grad()
def gradients(
    rows: Tensor,
    cols: Tensor,
    row_terms: Terms | None,
    col_terms: Terms | None,
    diagonal: Tensor,
    *,
    pairs: Pairs,
    needs: tuple[bool, bool] = (True, True),
    tile_bytes: int | None = None,
) -> Gradients:
    """Equals `reference.gradients`."""
    rows, cols = products.operand(rows), products.operand(cols)
    sink = _Sink(rows, cols, needs)
    for tile in _tiles(rows, cols, pairs, buffers=2, tile_bytes=tile_bytes):
        similarity, weights = tile.buffers
        products.similarities(rows[tile.rows], cols[tile.cols], out=similarity)
        if row_terms is None:
            weights.zero_()
        else:
            torch.mul(similarity, _column(row_terms.scale, tile.rows), out=weights)
            weights.add_(row_terms.log_weight[tile.rows, None]).exp_()
        if col_terms is not None:
            similarity.mul_(_row(col_terms.scale, tile.cols)).add_(col_terms.log_weight[None, tile.cols])
            weights.add_(similarity.exp_())
        sink.add(tile, tile.leave_out(weights, 0.0), diagonal)
    return sink.gradients


@torch.no_grad()
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
    tile_bytes: int | None = None,
) -> Pairwise:
    """Equals `reference.pairwise`."""
    rows, cols = products.operand(rows), products.operand(cols)
    sink = _Sink(rows, cols, needs)
    softplus, weight_sum, weighted = (_zeros(rows, len(rows)) for _ in range(3))
    for tile in _tiles(rows, cols, pairs, buffers=3, tile_bytes=tile_bytes):
        similarity, logits, scratch = tile.buffers
        products.similarities(rows[tile.rows], cols[tile.cols], out=similarity)
        torch.mul(similarity, scale, out=logits).add_(bias)
        # softplus(z) = max(z, 0) + log(1 + exp(-|z|)) is exact everywhere; torch's softplus is cut off at 20.
        torch.abs(logits, out=scratch).neg_().exp_().log1p_().add_(logits.clamp_min(0))
        softplus[tile.rows] += tile.leave_out(scratch, 0.0).sum(1)
        sigmoid = tile.leave_out(logits.sigmoid_(), 0.0)
        weight_sum[tile.rows] += sigmoid.sum(1)
        weighted[tile.rows] += similarity.mul_(sigmoid).sum(1)
        sink.add(tile, sigmoid.mul_(weight), diagonal)
    return Pairwise(softplus, weight_sum, weighted, sink.gradients)


class _Tile(NamedTuple):
    """A block of the matrix, with buffers of its shape."""

    rows: slice
    cols: slice
    buffers: tuple[Tensor, ...]
    pairs: Pairs
    left_out: Tensor | None  # a mask, only where groups are given

    def positives(self, matrix: Tensor) -> Tensor:
        """A view of the positives inside this tile, possibly empty."""
        shift = self.rows.start + self.pairs.offset - self.cols.start
        if not -matrix.shape[0] < shift < matrix.shape[1]:
            return matrix[:0, 0]
        return matrix.diagonal(shift)

    def leave_out(self, matrix: Tensor, value: float) -> Tensor:
        """Put `value` at the pairs that do not count."""
        if self.left_out is not None:
            matrix.masked_fill_(self.left_out, value)
        elif self.pairs.mask_positives:
            self.positives(matrix).fill_(value)
        return matrix


class _Running(NamedTuple):
    """Log-sum-exp and weighted mean of one side, with the largest logit seen so far taken out."""

    largest: Tensor
    sum: Tensor
    weighted: Tensor

    @classmethod
    def empty(cls, anchors: Tensor) -> "_Running":
        zeros = _zeros(anchors, len(anchors))
        return cls(zeros - torch.inf, zeros, zeros.clone())

    def add(self, anchors: slice, dim: int, logits: Tensor, similarity: Tensor) -> None:
        """Overwrites `logits`; pairs that do not count are -inf in it."""
        before = self.largest[anchors]
        largest = torch.maximum(before, logits.amax(dim))
        # Where nothing counted yet the shift must not be -inf: -inf - -inf is nan.
        shift = largest.masked_fill(largest == -torch.inf, 0.0)
        shrink = (before - shift).exp_()
        logits.sub_(shift.unsqueeze(dim)).exp_()
        self.sum[anchors] = self.sum[anchors].mul_(shrink).add_(logits.sum(dim))
        self.weighted[anchors] = self.weighted[anchors].mul_(shrink).add_(logits.mul_(similarity).sum(dim))
        self.largest[anchors] = largest

    def result(self) -> Statistics:
        # The largest term is exp(0), so the sum is at least 1 unless nothing counted.
        return Statistics(self.largest + self.sum.clamp_min(1.0).log_(), self.weighted / self.sum.clamp_min(1.0))


class _Sink:
    """Where the weights of a tile go: into the gradients of both sides."""

    def __init__(self, rows: Tensor, cols: Tensor, needs: tuple[bool, bool]) -> None:
        self.rows, self.cols = products.factor(rows), products.factor(cols)
        self.gradients = Gradients(
            _zeros(rows, *rows.shape) if needs[0] else None, _zeros(cols, *cols.shape) if needs[1] else None
        )

    def add(self, tile: _Tile, weights: Tensor, diagonal: Tensor) -> None:
        first = max(tile.rows.start, tile.cols.start - tile.pairs.offset)
        positives = tile.positives(weights)
        positives.add_(diagonal[first : first + len(positives)])
        weights = weights.to(self.rows.dtype)
        if self.gradients.rows is not None:
            products.accumulate(self.gradients.rows[tile.rows], weights, self.cols[tile.cols])
        if self.gradients.cols is not None:
            products.accumulate(self.gradients.cols[tile.cols], weights.T, self.rows[tile.rows])


def _tiles(rows: Tensor, cols: Tensor, pairs: Pairs, *, buffers: int, tile_bytes: int | None) -> Iterator[_Tile]:
    dtype = products.accumulator_dtype(rows.dtype)
    tile_bytes = tile_bytes or (CPU_TILE_BYTES if rows.device.type == "cpu" else GPU_TILE_BYTES)
    height, width = _tile_shape(len(rows), len(cols), tile_bytes // (buffers * dtype.itemsize))
    storage = [torch.empty(height * width, dtype=dtype, device=rows.device) for _ in range(buffers)]
    for row in range(0, len(rows), height):
        inside_rows = slice(row, min(row + height, len(rows)))
        for col in range(0, len(cols), width):
            inside_cols = slice(col, min(col + width, len(cols)))
            shape = (inside_rows.stop - row, inside_cols.stop - col)
            views = tuple(flat[: shape[0] * shape[1]].view(shape) for flat in storage)
            yield _Tile(inside_rows, inside_cols, views, pairs, _left_out(inside_rows, inside_cols, pairs))


def _tile_shape(num_rows: int, num_cols: int, elements: int) -> tuple[int, int]:
    """About four times as wide as high: reductions along rows are the fast ones."""
    width = max(1, min(num_cols, int((4 * elements) ** 0.5)))
    height = max(1, min(num_rows, elements // width))
    return height, max(1, min(num_cols, elements // height))


def _left_out(rows: slice, cols: slice, pairs: Pairs) -> Tensor | None:
    if pairs.row_groups is None or pairs.col_groups is None:
        return None
    same = pairs.row_groups[rows, None] == pairs.col_groups[None, cols]
    shift = rows.start + pairs.offset - cols.start
    if -same.shape[0] < shift < same.shape[1]:
        same.diagonal(shift).fill_(pairs.mask_positives)
    return same


def _column(scale: Tensor, rows: slice) -> Tensor:
    return scale[rows, None] if scale.ndim else scale


def _row(scale: Tensor, cols: slice) -> Tensor:
    return scale[None, cols] if scale.ndim else scale


def _zeros(like: Tensor, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=products.accumulator_dtype(like.dtype), device=like.device)

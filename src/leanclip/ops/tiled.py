"""Chunked PyTorch, for any device and dtype: walks the similarity matrix in tiles and keeps only sums.

Equal to `reference` up to rounding; sums are float32 (float64 for float64 inputs). Maxima are kept online, so that
no temperature overflows. Nothing here waits for the device.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from leanclip.ops import products
from leanclip.ops.types import Gradients, Needs, Pairs, Pairwise, Sigmoid, Statistics, Terms

# Bytes of all tile buffers together. On CPUs a tile should stay in the last-level cache, on GPUs fill the chip.
CPU_TILE_BYTES = 12 << 20
GPU_TILE_BYTES = 192 << 20


@torch.no_grad()
def statistics(pairs: Pairs, row_scale: Tensor, col_scale: Tensor | None) -> tuple[Statistics, Statistics | None]:
    """Equals `reference.statistics`; a tile of similarities serves both directions."""
    pairs = _operands(pairs)
    by_rows, by_cols = _Running.empty(pairs.rows), None if col_scale is None else _Running.empty(pairs.cols)
    for tile in _tiles(pairs, buffers=2):
        similarity, logits = tile.buffers
        torch.mul(similarity, _column(row_scale, tile.rows), out=logits)
        by_rows.add(tile.rows, 1, tile.leave_out(logits, -torch.inf), similarity)
        if by_cols is not None and col_scale is not None:
            torch.mul(similarity, _row(col_scale, tile.cols), out=logits)
            by_cols.add(tile.cols, 0, tile.leave_out(logits, -torch.inf), similarity)
    return by_rows.result(), None if by_cols is None else by_cols.result()


@torch.no_grad()
def gradients(
    pairs: Pairs, row_terms: Terms, col_terms: Terms, diagonal: Tensor, *, needs: Needs = (True, True)
) -> Gradients:
    """Equals `reference.gradients`."""
    pairs = _operands(pairs)
    sums = _GradientSums(pairs, needs)
    for tile in _tiles(pairs, buffers=2):
        similarity, weights = tile.buffers
        torch.mul(similarity, _column(row_terms.scale, tile.rows), out=weights)
        weights.add_(row_terms.log_weight[tile.rows, None]).exp_()
        similarity.mul_(_row(col_terms.scale, tile.cols)).add_(col_terms.log_weight[None, tile.cols])
        weights.add_(similarity.exp_())
        sums.add(tile, tile.leave_out(weights, 0.0), diagonal)
    return sums.gradients


@torch.no_grad()
def pairwise(pairs: Pairs, sigmoid: Sigmoid, diagonal: Tensor, *, needs: Needs = (True, True)) -> Pairwise:
    """Equals `reference.pairwise`."""
    pairs = _operands(pairs)
    sums = _GradientSums(pairs, needs)
    softplus, weight, weighted = (_zeros(pairs.rows, len(pairs.rows)) for _ in range(3))
    for tile in _tiles(pairs, buffers=3):
        similarity, logits, scratch = tile.buffers
        torch.mul(similarity, sigmoid.scale, out=logits).add_(sigmoid.bias)
        # softplus(z) = max(z, 0) + log(1 + exp(-|z|)) is exact everywhere; torch's softplus is cut off at 20.
        torch.abs(logits, out=scratch).neg_().exp_().log1p_().add_(logits.clamp_min(0))
        weights = logits.sigmoid_()
        if sigmoid.sides is not None:
            factor = sigmoid.sides[0][tile.rows, None] + sigmoid.sides[1][None, tile.cols]
            scratch.mul_(factor)
            weights.mul_(factor)
        softplus[tile.rows] += tile.leave_out(scratch, 0.0).sum(1)
        weights = tile.leave_out(weights, 0.0)
        weight[tile.rows] += weights.sum(1)
        weighted[tile.rows] += similarity.mul_(weights).sum(1)
        sums.add(tile, weights.mul_(sigmoid.weight), diagonal)
    return Pairwise(softplus, weight, weighted, sums.gradients)


class _Tile(NamedTuple):
    """A block of the matrix: buffers of its shape, of which the first holds the similarities."""

    rows: slice
    cols: slice
    buffers: tuple[Tensor, ...]
    pairs: Pairs
    left_out: Tensor | None  # a mask, only with groups

    def leave_out(self, matrix: Tensor, value: float) -> Tensor:
        """Put `value` at the pairs that do not count."""
        if self.left_out is not None:
            matrix.masked_fill_(self.left_out, value)
        elif self.pairs.mask_positives:
            _positives(matrix, self.rows, self.cols, self.pairs).fill_(value)
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


class _GradientSums:
    """The gradients of both sides, to which the weights of every tile contribute."""

    def __init__(self, pairs: Pairs, needs: Needs) -> None:
        self.factors = products.factor(pairs.rows), products.factor(pairs.cols)
        sides = zip((pairs.rows, pairs.cols), needs, strict=True)
        self.gradients = Gradients(*(_zeros(side, *side.shape) if need else None for side, need in sides))

    def add(self, tile: _Tile, weights: Tensor, diagonal: Tensor) -> None:
        first = max(tile.rows.start, tile.cols.start - tile.pairs.offset)
        positives = _positives(weights, tile.rows, tile.cols, tile.pairs)
        positives.add_(diagonal[first : first + len(positives)])
        rows, cols = self.factors
        weights = weights.to(rows.dtype)
        if self.gradients.rows is not None:
            products.accumulate(self.gradients.rows[tile.rows], weights, cols[tile.cols])
        if self.gradients.cols is not None:
            products.accumulate(self.gradients.cols[tile.cols], weights.T, rows[tile.rows])


def _operands(pairs: Pairs) -> Pairs:
    return replace(pairs, rows=products.operand(pairs.rows), cols=products.operand(pairs.cols))


def _tiles(pairs: Pairs, *, buffers: int) -> Iterator[_Tile]:
    rows, cols = pairs.rows, pairs.cols
    dtype = products.accumulator_dtype(rows.dtype)
    tile_bytes = CPU_TILE_BYTES if rows.device.type == "cpu" else GPU_TILE_BYTES
    height, width = _tile_shape(len(rows), len(cols), tile_bytes // (buffers * dtype.itemsize))
    storage = [torch.empty(height * width, dtype=dtype, device=rows.device) for _ in range(buffers)]
    for row in range(0, len(rows), height):
        inside_rows = slice(row, min(row + height, len(rows)))
        for col in range(0, len(cols), width):
            inside_cols = slice(col, min(col + width, len(cols)))
            shape = (inside_rows.stop - row, inside_cols.stop - col)
            views = tuple(flat[: shape[0] * shape[1]].view(shape) for flat in storage)
            products.similarities(rows[inside_rows], cols[inside_cols], out=views[0])
            yield _Tile(inside_rows, inside_cols, views, pairs, _left_out(inside_rows, inside_cols, pairs))


def _tile_shape(num_rows: int, num_cols: int, elements: int) -> tuple[int, int]:
    """About four times as wide as high: reductions along rows are the fast ones."""
    width = max(1, min(num_cols, int((4 * elements) ** 0.5)))
    height = max(1, min(num_rows, elements // width))
    return height, max(1, min(num_cols, elements // height))


def _left_out(rows: slice, cols: slice, pairs: Pairs) -> Tensor | None:
    if pairs.groups is None:
        return None
    same = pairs.groups[0][rows, None] == pairs.groups[1][None, cols]
    _positives(same, rows, cols, pairs).fill_(pairs.mask_positives)
    return same


def _positives(matrix: Tensor, rows: slice, cols: slice, pairs: Pairs) -> Tensor:
    """A view of the positives inside the tile `matrix`, possibly empty."""
    shift = rows.start + pairs.offset - cols.start
    return matrix.diagonal(shift) if -matrix.shape[0] < shift < matrix.shape[1] else matrix[:0, 0]


def _column(scale: Tensor, rows: slice) -> Tensor:
    return scale[rows, None] if scale.ndim else scale


def _row(scale: Tensor, cols: slice) -> Tensor:
    return scale[None, cols] if scale.ndim else scale


def _zeros(like: Tensor, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=products.accumulator_dtype(like.dtype), device=like.device)

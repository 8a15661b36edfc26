"""Shared by the kernels: one tile of similarities, which of its pairs count, and the order of the tiles.

Exponentials are base 2, as in the hardware. Scales are in natural units and are converted by the kernels.
"""

# Outside a kernel a jit function cannot be called, and is typed so.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false

import triton
import triton.language as tl

# Extents and positions change from block to block and batch to batch; no code should be compiled for their values.
RUN_TIME = (
    "first_row",
    "end_row",
    "first_col",
    "end_col",
    "num_rows",
    "num_cols",
    "num_samples",
    "offset",
    "first_strip",
    "num_strips",
    "first",
    "end",
    "num_others",
    "num_partials",
)

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Stands for the similarity of a pair that does not count: finite, and no exponential of it is left, since scales are
# kept from being smaller than SMALLEST_SCALE.
LEFT_OUT = tl.constexpr(-1e30)
SMALLEST_SCALE = tl.constexpr(1e-20)


@triton.jit
def load_block(
    source, row, k, num_rows, DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr
):
    """Rows `row:row + BLOCK`, features `k:k + BLOCK_K` of embeddings, zeros outside."""
    if TMA:
        block = source.load([row, k])
    else:
        at = row + tl.arange(0, BLOCK)
        feature = k + tl.arange(0, BLOCK_K)
        pointers = source + at.to(tl.int64)[:, None] * DIM + feature[None, :]
        block = tl.load(pointers, (at < num_rows)[:, None] & (feature < DIM)[None, :], 0.0)
    return block


@triton.jit
def similarity_tile(
    rows, cols, row, col, num_rows, num_cols,
    DIM: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """rows[row:row + BLOCK_R] @ cols[col:col + BLOCK_C].T in float32."""
    sums = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for k in range(0, DIM, BLOCK_K):
        left = load_block(rows, row, k, num_rows, DIM, BLOCK_R, BLOCK_K, TMA)
        right = load_block(cols, col, k, num_cols, DIM, BLOCK_C, BLOCK_K, TMA)
        sums = tl.dot(left, right.T, sums)
    return sums


@triton.jit
def is_plain(row, col, end_row, end_col, offset, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, GROUPS: tl.constexpr):
    """Whether a tile lies inside the matrix, holds no positive and needs no comparison of groups."""
    inside = (row + BLOCK_R <= end_row) & (col + BLOCK_C <= end_col)
    apart = (row + offset >= col + BLOCK_C) | (row + offset + BLOCK_R <= col)
    return inside & apart & (not GROUPS)


@triton.jit
def leave_out(
    similarity, row, col, end_row, end_col, offset, row_groups, col_groups,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, MASK_POSITIVES: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Put LEFT_OUT where a pair does not count: `reference.counted_pairs`, cut to the matrix."""
    at_row = row + tl.arange(0, BLOCK_R)
    at_col = col + tl.arange(0, BLOCK_C)
    inside = (at_row < end_row)[:, None] & (at_col < end_col)[None, :]
    positive = (at_row + offset)[:, None] == at_col[None, :]
    counted = inside
    if GROUPS:
        row_group = tl.load(row_groups + at_row, at_row < end_row, 0)
        col_group = tl.load(col_groups + at_col, at_col < end_col, 0)
        other = row_group[:, None] != col_group[None, :]
        counted = inside & (other & (positive == 0) if MASK_POSITIVES else other | positive)
    elif MASK_POSITIVES:
        counted = inside & (positive == 0)
    return tl.where(counted, similarity, LEFT_OUT)


@triton.jit
def halves(tile, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Left and right half of a tile, in the registers that hold it. Epilogues by halves need fewer registers."""
    return tl.split(tl.permute(tl.reshape(tile, (BLOCK_R, 2, BLOCK_C // 2)), (0, 2, 1)))


@triton.jit
def exponential(x):
    """exp(x)"""
    return tl.exp2(x * LOG2_E)


@triton.jit
def load_scales(source, at, end, VECTOR: tl.constexpr):
    """Each anchor's scale in float32, or the one that serves all."""
    if VECTOR:
        value = tl.load(source + at, at < end, 0.0).to(tl.float32)
    else:
        value = tl.load(source).to(tl.float32) + tl.zeros_like(at).to(tl.float32)
    return tl.maximum(value, SMALLEST_SCALE)


@triton.jit
def grouped_order(program, num_fast, num_slow, GROUP: tl.constexpr):
    """Programs that run together share rows and columns: GROUP fast blocks by all slow ones, then the next GROUP."""
    per_group = GROUP * num_slow
    first = (program // per_group) * GROUP
    size = tl.minimum(num_fast - first, GROUP)
    inside = program % per_group
    return first + inside % size, inside // size

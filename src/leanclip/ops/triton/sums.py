"""Kernels of `statistics`: sums of exponentials by rows and columns from one pass over the tiles.

Instead of a maximum per row, one reference per anchor is taken out of all exponents:

    reference_i = max(0, scale_i largest|x| largest|y| - HEADROOM)      in powers of two

No term exceeds 2^HEADROOM, so nothing overflows, and one exponential per pair serves both directions when they
share a scale. Only where temperatures are under about 0.016 can an anchor's terms all vanish; `finish` detects that
by a small sum and computes those anchors again with a running maximum.
"""

# Outside a kernel a jit function cannot be called, and is typed so.
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

from leanclip.ops.triton.tiles import (
    LEFT_OUT,
    LN_2,
    LOG2_E,
    RUN_TIME,
    exponential,
    grouped_order,
    halves,
    is_plain,
    leave_out,
    load_scales,
    similarity_tile,
)

# Sums of 2^18 terms of 2^90, weighted by similarities up to 2^19, stay inside float32.
HEADROOM = tl.constexpr(90.0)
# Terms that vanish are under 2^-126; below this sum they might have mattered.
SMALLEST_SUM = tl.constexpr(2.0**-80)


@triton.jit(do_not_specialize=RUN_TIME)
def largest_norms(
    rows, cols, squares, num_rows, num_cols, DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr
):
    """squares[0] = max |rows_i|^2, squares[1] = max |cols_j|^2; `squares` starts as zeros."""
    side = tl.program_id(1)
    source = rows if side == 0 else cols
    end = num_rows if side == 0 else num_cols
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in range(0, DIM, BLOCK_K):
        feature = k + tl.arange(0, BLOCK_K)
        pointers = source + at.to(tl.int64)[:, None] * DIM + feature[None, :]
        value = tl.load(pointers, (at < end)[:, None] & (feature < DIM)[None, :], 0.0).to(tl.float32)
        total += tl.sum(value * value, 1)
    if tl.program_id(0) * BLOCK < end:
        tl.atomic_max(squares + side, tl.max(total))


@triton.jit
def reference_exponent(scale, squares):
    bound = tl.sqrt(tl.load(squares)) * tl.sqrt(tl.load(squares + 1))
    return tl.maximum(scale * LOG2_E * bound - HEADROOM, 0.0)


@triton.jit
def sum_within_threads(values, SLOTS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Adds up rows that one thread of the matrix unit's layout holds, which needs no exchange between threads."""
    parts = tl.reshape(values, (BLOCK_R // (16 * SLOTS), SLOTS, 2, 8, BLOCK_C))
    return tl.sum(tl.sum(parts, 2), 0)


@triton.jit
def half_sums(
    similarity, row_scales, col_scales, squares, kept, kept_weighted,
    SLOTS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BY_COLS: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Sums and weighted sums of half a tile: by rows, and added to what is kept by columns."""
    reference = reference_exponent(row_scales, squares)
    terms = tl.exp2(similarity * (row_scales * LOG2_E)[:, None] - reference[:, None])
    weighted = terms * similarity
    sums = tl.sum(terms, 1)
    weighted_sums = tl.sum(weighted, 1)
    if BY_COLS:
        if not SHARED:
            reference = reference_exponent(col_scales, squares)
            terms = tl.exp2(similarity * (col_scales * LOG2_E)[None, :] - reference[None, :])
            weighted = terms * similarity
        kept += sum_within_threads(terms, SLOTS, BLOCK_R, BLOCK_C)
        kept_weighted += sum_within_threads(weighted, SLOTS, BLOCK_R, BLOCK_C)
    return sums, weighted_sums, kept, kept_weighted


@triton.jit
def strip_sums(
    rows, cols, row_scale, col_scale, squares, row_groups, col_groups, row_partial, col_partial,
    first_row, end_row, num_cols, offset, first_strip, num_strips, row_stride, col_stride,
    DIM: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, STRIP: tl.constexpr,
    GROUP: tl.constexpr, SLOTS: tl.constexpr, ROW_VECTOR: tl.constexpr, COL_VECTOR: tl.constexpr,
    BY_COLS: tl.constexpr, SHARED: tl.constexpr,
    MASK_POSITIVES: tl.constexpr, GROUPS: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """One strip, for `statistics_kernel`. With SHARED the columns' scale is the rows'."""
    num_blocks = tl.cdiv(num_cols, BLOCK_C)
    panel_strips = tl.cdiv(end_row - first_row, BLOCK_R * STRIP)
    block, strip = grouped_order(tl.program_id(0), num_blocks, panel_strips, GROUP)
    HALF: tl.constexpr = BLOCK_C // 2
    col = block * BLOCK_C
    left_col = col + tl.arange(0, HALF)
    left_scales = load_scales(col_scale, left_col, num_cols, COL_VECTOR)
    right_scales = load_scales(col_scale, left_col + HALF, num_cols, COL_VECTOR)
    left_kept = tl.zeros((SLOTS, 8, HALF), tl.float32)
    left_kept_weighted = tl.zeros((SLOTS, 8, HALF), tl.float32)
    right_kept = tl.zeros((SLOTS, 8, HALF), tl.float32)
    right_kept_weighted = tl.zeros((SLOTS, 8, HALF), tl.float32)
    strip_row = first_row + strip * STRIP * BLOCK_R
    for row in range(strip_row, tl.minimum(strip_row + STRIP * BLOCK_R, end_row), BLOCK_R):
        similarity = similarity_tile(rows, cols, row, col, end_row, num_cols, DIM, BLOCK_R, BLOCK_C, BLOCK_K, TMA)
        if not is_plain(row, col, end_row, num_cols, offset, BLOCK_R, BLOCK_C, GROUPS):
            similarity = leave_out(
                similarity, row, col, end_row, num_cols, offset, row_groups, col_groups,
                BLOCK_R, BLOCK_C, MASK_POSITIVES, GROUPS,
            )  # fmt: skip
        at_row = row + tl.arange(0, BLOCK_R)
        row_scales = load_scales(row_scale, at_row, end_row, ROW_VECTOR)
        left, right = halves(similarity, BLOCK_R, BLOCK_C)
        left_sums, left_weighted, left_kept, left_kept_weighted = half_sums(
            left, row_scales, left_scales, squares, left_kept, left_kept_weighted,
            SLOTS, BLOCK_R, HALF, BY_COLS, SHARED,
        )  # fmt: skip
        right_sums, right_weighted, right_kept, right_kept_weighted = half_sums(
            right, row_scales, right_scales, squares, right_kept, right_kept_weighted,
            SLOTS, BLOCK_R, HALF, BY_COLS, SHARED,
        )  # fmt: skip
        to_row = row_partial + block * row_stride + (at_row - first_row)
        tl.store(to_row, left_sums + right_sums, at_row < end_row)
        tl.store(to_row + num_blocks * row_stride, left_weighted + right_weighted, at_row < end_row)
    if BY_COLS:
        inside = left_col < num_cols
        to_col = col_partial + (first_strip + strip) * col_stride + left_col
        to_weighted = to_col + num_strips * col_stride
        tl.store(to_col, tl.sum(tl.sum(left_kept, 0), 0), inside)
        tl.store(to_weighted, tl.sum(tl.sum(left_kept_weighted, 0), 0), inside)
        inside = left_col + HALF < num_cols
        tl.store(to_col + HALF, tl.sum(tl.sum(right_kept, 0), 0), inside)
        tl.store(to_weighted + HALF, tl.sum(tl.sum(right_kept_weighted, 0), 0), inside)


@triton.jit(do_not_specialize=RUN_TIME)
def statistics_kernel(
    rows, cols, row_scale, col_scale, squares, row_groups, col_groups, row_partial, col_partial,
    first_row, end_row, num_cols, offset, first_strip, num_strips, row_stride, col_stride,
    DIM: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, STRIP: tl.constexpr,
    GROUP: tl.constexpr, SLOTS: tl.constexpr, ROW_VECTOR: tl.constexpr, COL_VECTOR: tl.constexpr,
    BY_COLS: tl.constexpr,
    MASK_POSITIVES: tl.constexpr, GROUPS: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Partial sums of a strip of STRIP tiles, one below the other: a program keeps its columns' in registers.

    row_partial (2, column blocks, rows) and col_partial (2, strips, columns) hold sums of exponentials, then of
    exponentials times similarities. Where two single scales are equal, one exponential serves both directions.
    """
    shared = False
    if BY_COLS and not ROW_VECTOR and not COL_VECTOR:
        shared = tl.load(row_scale) == tl.load(col_scale)
    if shared:
        strip_sums(
            rows, cols, row_scale, col_scale, squares, row_groups, col_groups, row_partial, col_partial,
            first_row, end_row, num_cols, offset, first_strip, num_strips, row_stride, col_stride, DIM,
            BLOCK_R, BLOCK_C, BLOCK_K, STRIP, GROUP, SLOTS, ROW_VECTOR, COL_VECTOR, BY_COLS, True,
            MASK_POSITIVES, GROUPS, TMA,
        )  # fmt: skip
    else:
        strip_sums(
            rows, cols, row_scale, col_scale, squares, row_groups, col_groups, row_partial, col_partial,
            first_row, end_row, num_cols, offset, first_strip, num_strips, row_stride, col_stride, DIM,
            BLOCK_R, BLOCK_C, BLOCK_K, STRIP, GROUP, SLOTS, ROW_VECTOR, COL_VECTOR, BY_COLS, False,
            MASK_POSITIVES, GROUPS, TMA,
        )  # fmt: skip


@triton.jit(do_not_specialize=RUN_TIME)
def finish(
    anchors, others, scale, squares, anchor_groups, other_groups, partial, log_sum, mean,
    first, end, num_others, offset, stride, num_partials,
    DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr,
    VECTOR: tl.constexpr, MASK_POSITIVES: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Statistics of anchors `first:end` from their partial sums; where those vanished, from the similarities."""
    row = first + tl.program_id(0) * BLOCK
    at = row + tl.arange(0, BLOCK)
    scales = load_scales(scale, at, end, VECTOR)
    total = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, num_partials, CHUNK):
        part = start + tl.arange(0, CHUNK)
        inside = (part < num_partials)[:, None] & (at < end)[None, :]
        where = partial + part[:, None] * stride + (at - first)[None, :]
        total += tl.sum(tl.load(where, inside, 0.0), 0)
        weighted += tl.sum(tl.load(where + num_partials * stride, inside, 0.0), 0)
    reference = reference_exponent(scales, squares)
    largest = reference * LN_2
    lost = (reference > 0) & (total < SMALLEST_SUM) & (at < end)
    if tl.max(lost.to(tl.int32)) > 0:
        exact_largest, exact_total, exact_weighted = running_sums(
            anchors, others, scales, anchor_groups, other_groups, row, end, num_others, offset,
            DIM, BLOCK, BLOCK_C, BLOCK_K, MASK_POSITIVES, GROUPS,
        )  # fmt: skip
        largest = tl.where(lost, exact_largest, largest)
        total = tl.where(lost, exact_total, total)
        weighted = tl.where(lost, exact_weighted, weighted)
    store_statistics(log_sum, mean, at, end, largest, total, weighted)


@triton.jit
def store_statistics(log_sum, mean, at, end, largest, total, weighted):
    any_pair = total > 0
    safe = tl.where(any_pair, total, 1.0)
    tl.store(log_sum + at, tl.where(any_pair, tl.log(safe) + largest, float("-inf")), at < end)
    tl.store(mean + at, weighted / safe, at < end)


@triton.jit
def running_sums(
    anchors, others, scales, anchor_groups, other_groups, row, end, num_others, offset,
    DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr,
    MASK_POSITIVES: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Largest logit, sum and weighted sum relative to it, kept online: slow, and right at any scale."""
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)
    for col in range(0, num_others, BLOCK_C):
        similarity = similarity_tile(anchors, others, row, col, end, num_others, DIM, BLOCK, BLOCK_C, BLOCK_K, False)
        similarity = leave_out(
            similarity, row, col, end, num_others, offset, anchor_groups, other_groups,
            BLOCK, BLOCK_C, MASK_POSITIVES, GROUPS,
        )  # fmt: skip
        largest, total, weighted = add_tile(similarity, scales, largest, total, weighted)
    return tl.where(largest == float("-inf"), 0.0, largest), total, weighted


@triton.jit
def add_tile(similarity, scales, largest, total, weighted):
    """The running sums with the columns of one more tile, where LEFT_OUT marks pairs that do not count."""
    logits = tl.where(similarity == LEFT_OUT, float("-inf"), similarity * scales[:, None])
    now = tl.maximum(largest, tl.max(logits, 1))
    shift = tl.where(now == float("-inf"), 0.0, now)
    shrink = exponential(largest - shift)
    terms = exponential(logits - shift[:, None])
    return now, total * shrink + tl.sum(terms, 1), weighted * shrink + tl.sum(terms * similarity, 1)


@triton.jit(do_not_specialize=RUN_TIME)
def dense_statistics(
    similarities, row_scale, col_scale, row_groups, col_groups, by_rows, by_cols, num_rows, num_cols, offset,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, ROW_VECTOR: tl.constexpr, COL_VECTOR: tl.constexpr,
    MASK_POSITIVES: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Statistics from a stored matrix: of its rows in the programs (i, 0), of its columns in those (i, 1).

    by_rows (2, rows) and by_cols (2, columns) receive the log-sums, then the means.
    """
    if tl.program_id(1) == 0:
        dense_side(
            similarities, row_scale, row_groups, col_groups, by_rows, num_rows, num_cols, offset,
            BLOCK, CHUNK, False, ROW_VECTOR, MASK_POSITIVES, GROUPS,
        )  # fmt: skip
    else:
        dense_side(
            similarities, col_scale, col_groups, row_groups, by_cols, num_cols, num_rows, -offset,
            BLOCK, CHUNK, True, COL_VECTOR, MASK_POSITIVES, GROUPS,
        )  # fmt: skip


@triton.jit
def dense_side(
    similarities, scale, anchor_groups, other_groups, result, num_anchors, num_others, offset,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, TRANSPOSED: tl.constexpr, VECTOR: tl.constexpr,
    MASK_POSITIVES: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK
    at = first + tl.arange(0, BLOCK)
    scales = load_scales(scale, at, num_anchors, VECTOR)
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, num_others, CHUNK):
        other = start + tl.arange(0, CHUNK)
        if TRANSPOSED:  # loaded as it lies in memory
            inside = (other < num_others)[:, None] & (at < num_anchors)[None, :]
            tile = tl.trans(tl.load(similarities + other[:, None] * num_anchors + at[None, :], inside, 0.0))
        else:
            inside = (at < num_anchors)[:, None] & (other < num_others)[None, :]
            tile = tl.load(similarities + at[:, None] * num_others + other[None, :], inside, 0.0)
        tile = leave_out(
            tile, first, start, num_anchors, num_others, offset, anchor_groups, other_groups,
            BLOCK, CHUNK, MASK_POSITIVES, GROUPS,
        )  # fmt: skip
        largest, total, weighted = add_tile(tile, scales, largest, total, weighted)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    store_statistics(result, result + num_anchors, at, num_anchors, largest, total, weighted)

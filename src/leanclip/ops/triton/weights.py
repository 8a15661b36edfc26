"""Kernels that write the weights of a block of pairs: for `gradients`, and for `pairwise` with its sums."""

# Outside a kernel a jit function cannot be called, and is typed so.
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

import triton
import triton.language as tl

from leanclip.ops.triton.tiles import (
    LN_2,
    LOG2_E,
    RUN_TIME,
    SMALLEST_SCALE,
    exponential,
    grouped_order,
    halves,
    is_plain,
    leave_out,
    load_scales,
    similarity_tile,
)

# The largest spread of a tile's log-weights that one exponential per pair may span.
WIDEST_SPREAD = tl.constexpr(40.0)


@triton.jit
def log_weight_range(log_weight):
    """Smallest and largest of the log-weights that are not -inf (which is a weight of zero)."""
    lowest = tl.min(tl.where(log_weight == float("-inf"), float("inf"), log_weight))
    return lowest, tl.max(log_weight)


@triton.jit
def exponential_weights(
    similarity, row_scales, row_log_weight, col_scales, col_log_weight, same_scale,
    ONE_SCALE: tl.constexpr,
):  # fmt: skip
    """exp(row scale s + row log-weight) + exp(col scale s + col log-weight).

    Where the scales are one and log-weights of similar size, exp(scale s + top) (exp(row - top) + exp(col - top)):
    the second factor costs BLOCK_R + BLOCK_C exponentials only.
    """
    if ONE_SCALE:
        row_lowest, row_top = log_weight_range(row_log_weight)
        col_lowest, col_top = log_weight_range(col_log_weight)
        top = tl.maximum(row_top, col_top)
        top = tl.where(top == float("-inf"), 0.0, top)
        if same_scale & (top - tl.minimum(row_lowest, col_lowest) < WIDEST_SPREAD):
            exponent = similarity * (row_scales * LOG2_E)[:, None] + top * LOG2_E
            row_factor = exponential(row_log_weight - top)
            col_factor = exponential(col_log_weight - top)
            weights = tl.exp2(exponent) * (row_factor[:, None] + col_factor[None, :])
        else:
            weights = exponential(similarity * row_scales[:, None] + row_log_weight[:, None])
            weights += exponential(similarity * col_scales[None, :] + col_log_weight[None, :])
    else:
        weights = exponential(similarity * row_scales[:, None] + row_log_weight[:, None])
        weights += exponential(similarity * col_scales[None, :] + col_log_weight[None, :])
    return weights


@triton.jit
def add_positives(weights, diagonal, row, col, end_row, offset, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    at_row = row + tl.arange(0, BLOCK_R)
    at_col = col + tl.arange(0, BLOCK_C)
    values = tl.load(diagonal + at_row, at_row < end_row, 0.0).to(tl.float32)
    return weights + tl.where((at_row + offset)[:, None] == at_col[None, :], values[:, None], 0.0)


@triton.jit
def store_block(
    out, weights, row, col, height, width, stride, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, TMA: tl.constexpr
):
    """`row`, `col` inside the block buffer `out`, of which height x width are in use."""
    if TMA:
        out.store([row, col], weights.to(out.dtype))
    else:
        at_row = row + tl.arange(0, BLOCK_R)
        at_col = col + tl.arange(0, BLOCK_C)
        inside = (at_row < height)[:, None] & (at_col < width)[None, :]
        pointers = out + at_row.to(tl.int64)[:, None] * stride + at_col[None, :]
        tl.store(pointers, weights.to(out.dtype.element_ty), inside)


@triton.jit
def block_tile(
    rows, cols, first_row, end_row, first_col, end_col, num_rows, num_cols,
    DIM: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """The first row and column of this program's tile of the block, and its similarities."""
    col_block, row_block = grouped_order(
        tl.program_id(0), tl.cdiv(end_col - first_col, BLOCK_C), tl.cdiv(end_row - first_row, BLOCK_R), GROUP
    )
    row = first_row + row_block * BLOCK_R
    col = first_col + col_block * BLOCK_C
    return row, col, similarity_tile(rows, cols, row, col, num_rows, num_cols, DIM, BLOCK_R, BLOCK_C, BLOCK_K, TMA)


@triton.jit
def masked_halves(
    similarity, row, col, end_row, end_col, offset, row_groups, col_groups,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, MASK_POSITIVES: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Both halves of a tile without the pairs that do not count, and whether all of them do."""
    plain = is_plain(row, col, end_row, end_col, offset, BLOCK_R, BLOCK_C, GROUPS)
    if not plain:
        similarity = leave_out(
            similarity, row, col, end_row, end_col, offset, row_groups, col_groups,
            BLOCK_R, BLOCK_C, MASK_POSITIVES, GROUPS,
        )  # fmt: skip
    left, right = halves(similarity, BLOCK_R, BLOCK_C)
    return left, right, plain


@triton.jit(do_not_specialize=RUN_TIME)
def weights_kernel(
    rows, cols, row_scale, row_log_weight, col_scale, col_log_weight, diagonal, row_groups, col_groups, out,
    first_row, end_row, first_col, end_col, num_rows, num_cols, offset, stride,
    DIM: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    ROW_VECTOR: tl.constexpr, COL_VECTOR: tl.constexpr,
    MASK_POSITIVES: tl.constexpr, GROUPS: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """The weights W of `reference.gradients` for rows first_row:end_row and columns first_col:end_col."""
    row, col, similarity = block_tile(
        rows, cols, first_row, end_row, first_col, end_col, num_rows, num_cols,
        DIM, BLOCK_R, BLOCK_C, BLOCK_K, GROUP, TMA,
    )  # fmt: skip
    at_row = row + tl.arange(0, BLOCK_R)
    row_scales = load_scales(row_scale, at_row, end_row, ROW_VECTOR)
    row_weight = tl.load(row_log_weight + at_row, at_row < end_row, float("-inf")).to(tl.float32)
    left, right, plain = masked_halves(
        similarity, row, col, end_row, end_col, offset, row_groups, col_groups,
        BLOCK_R, BLOCK_C, MASK_POSITIVES, GROUPS,
    )  # fmt: skip
    HALF: tl.constexpr = BLOCK_C // 2
    ONE_SCALE: tl.constexpr = not ROW_VECTOR and not COL_VECTOR
    same_scale = tl.load(row_scale) == tl.load(col_scale)
    parts = (left, right)
    for side in tl.static_range(2):
        part_col = col + side * HALF
        at_col = part_col + tl.arange(0, HALF)
        col_scales = load_scales(col_scale, at_col, end_col, COL_VECTOR)
        col_weight = tl.load(col_log_weight + at_col, at_col < end_col, float("-inf")).to(tl.float32)
        weights = exponential_weights(
            parts[side], row_scales, row_weight, col_scales, col_weight, same_scale, ONE_SCALE
        )
        if not plain:
            weights = add_positives(weights, diagonal, row, part_col, end_row, offset, BLOCK_R, HALF)
        store_block(
            out, weights, row - first_row, part_col - first_col, end_row - first_row, end_col - first_col, stride,
            BLOCK_R, HALF, TMA,
        )  # fmt: skip


@triton.jit
def log_one_plus(x):
    """log(1 + x) for x in [0, 1] with relative error 2.3e-7: x times a minimax polynomial."""
    p = x * -0.008539180271327496 + 0.044089533388614655
    p = p * x - 0.10768157988786697
    p = p * x + 0.17745232582092285
    p = p * x - 0.24495460093021393
    p = p * x + 0.33275479078292847
    p = p * x - 0.4999740421772003
    p = p * x + 0.9999998211860657
    return p * x


@triton.jit
def join_products(a, b):
    """(1 + a)(1 + b) - 1 without cancellation."""
    return a + (a * b + b)


@triton.jit
def sigmoid_and_softplus(similarity, scale, bias, row_factor, col_factor, WEIGHTED: tl.constexpr):
    """sigmoid(z) and the rows' sums of softplus(z) = max(z, 0) + log(1 + exp(-|z|)), for z = scale s + bias.

    This takes one logarithm per row, of the product of all 1 + exp(-|z|); each is at most 2, so that float32
    holds the product over 64 columns and more. 1 / (1 + x) comes from a reciprocal root: division costs far more.
    If WEIGHTED, each pair has the factor of its row plus that of its column; different ones need a logarithm each.
    """
    power = similarity * (scale * LOG2_E) + bias * LOG2_E
    small = tl.exp2(-tl.abs(power))
    root = tl.rsqrt(1.0 + small)
    sigmoid = tl.where(power >= 0, 1.0, small) * (root * root)
    if WEIGHTED:
        sigmoid *= row_factor[:, None] + col_factor[None, :]
        row_top, col_top = tl.max(row_factor), tl.max(col_factor)
        if (row_top == tl.min(row_factor)) & (col_top == tl.min(col_factor)):  # one factor: as without
            softplus = product_softplus(power, small) * (row_top + col_top)
        else:
            single = tl.maximum(power, 0.0) * LN_2 + log_one_plus(small)
            softplus = tl.sum(single * (row_factor[:, None] + col_factor[None, :]), 1)
    else:
        softplus = product_softplus(power, small)
    return sigmoid, softplus


@triton.jit
def product_softplus(power, small):
    product = tl.reduce(small, 1, join_products)
    logarithm = tl.where(product < 1.0, log_one_plus(product), tl.log(1.0 + product))
    return tl.sum(tl.maximum(power, 0.0), 1) * LN_2 + logarithm


@triton.jit(do_not_specialize=RUN_TIME)
def pairwise_kernel(
    rows, cols, scale, bias, weight, diagonal, row_weight, col_weight, row_groups, col_groups, out, partial,
    first_row, end_row, first_col, end_col, num_rows, num_cols, offset, stride, kind_stride, block_stride,
    DIM: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    STORE: tl.constexpr, WEIGHTED: tl.constexpr, MASK_POSITIVES: tl.constexpr, GROUPS: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """The weights of `reference.pairwise` (if STORE) and each row's three sums over a tile's columns.

    `partial` (3, column blocks, rows) receives the sums of softplus, sigmoid, and sigmoid times similarity.
    """
    row, col, similarity = block_tile(
        rows, cols, first_row, end_row, first_col, end_col, num_rows, num_cols,
        DIM, BLOCK_R, BLOCK_C, BLOCK_K, GROUP, TMA,
    )  # fmt: skip
    left, right, plain = masked_halves(
        similarity, row, col, end_row, end_col, offset, row_groups, col_groups,
        BLOCK_R, BLOCK_C, MASK_POSITIVES, GROUPS,
    )  # fmt: skip
    HALF: tl.constexpr = BLOCK_C // 2
    scale_value = tl.maximum(tl.load(scale).to(tl.float32), SMALLEST_SCALE)
    bias_value = tl.load(bias).to(tl.float32)
    softplus_sum = tl.zeros((BLOCK_R,), tl.float32)
    sigmoid_sum = tl.zeros((BLOCK_R,), tl.float32)
    weighted_sum = tl.zeros((BLOCK_R,), tl.float32)
    at_row = row + tl.arange(0, BLOCK_R)
    row_factor = tl.full((BLOCK_R,), 0.5, tl.float32)  # outside the matrix, where no pair counts, any will do
    col_factor = tl.full((HALF,), 0.5, tl.float32)
    if WEIGHTED:
        row_factor = tl.load(row_weight + at_row, at_row < end_row, 0.5).to(tl.float32)
    parts = (left, right)
    for side in tl.static_range(2):
        part_col = col + side * HALF
        part = parts[side]
        if WEIGHTED:
            at_col = part_col + tl.arange(0, HALF)
            col_factor = tl.load(col_weight + at_col, at_col < end_col, 0.5).to(tl.float32)
        sigmoid, softplus = sigmoid_and_softplus(part, scale_value, bias_value, row_factor, col_factor, WEIGHTED)
        softplus_sum += softplus
        sigmoid_sum += tl.sum(sigmoid, 1)
        weighted_sum += tl.sum(sigmoid * part, 1)
        if STORE:
            weights = sigmoid * tl.load(weight).to(tl.float32)
            if not plain:
                weights = add_positives(weights, diagonal, row, part_col, end_row, offset, BLOCK_R, HALF)
            store_block(
                out, weights, row - first_row, part_col - first_col, end_row - first_row, end_col - first_col,
                stride, BLOCK_R, HALF, TMA,
            )  # fmt: skip
    to = partial + (col // BLOCK_C) * block_stride + (at_row - first_row)
    tl.store(to, softplus_sum, at_row < end_row)
    tl.store(to + kind_stride, sigmoid_sum, at_row < end_row)
    tl.store(to + 2 * kind_stride, weighted_sum, at_row < end_row)

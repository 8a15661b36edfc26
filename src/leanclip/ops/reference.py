"""The specification: plain PyTorch on the whole similarity matrix, in the precision of the inputs.

Every other implementation has these signatures and must agree with this file. Gradients come from autograd, so
that nothing here is derived by hand.
"""

import torch
from torch import Tensor

from leanclip.ops.types import Gradients, Needs, Pairs, Pairwise, Sigmoid, Statistics, Terms


def statistics(pairs: Pairs, row_scale: Tensor, col_scale: Tensor | None) -> tuple[Statistics, Statistics | None]:
    """Log-sum-exp of each row's scaled similarities and the mean similarity under that softmax.

    With `col_scale` the same for the columns, from the same matrix: for the symmetric, single-process case.
    """
    similarity_RC, counted_RC = similarities(pairs.rows, pairs.cols), counted_pairs(pairs)
    by_rows = _one_side(similarity_RC, row_scale, counted_RC)
    by_cols = None if col_scale is None else _one_side(similarity_RC.T, col_scale, counted_RC.T)
    return by_rows, by_cols


def gradients(
    pairs: Pairs, row_terms: Terms, col_terms: Terms, diagonal: Tensor, *, needs: Needs = (True, True)
) -> Gradients:
    """d_rows = W cols and d_cols = W^T rows, where over the pairs that count

        W_ij = exp(row scale_i s_ij + row log_weight_i) + exp(col scale_j s_ij + col log_weight_j)

    and `diagonal` (R,) is added to W at the positives.
    """
    similarity_RC, counted_RC = similarities(pairs.rows, pairs.cols), counted_pairs(pairs)
    by_row_RC = (_scaled(row_terms.scale, similarity_RC) + row_terms.log_weight[:, None]).exp()
    by_col_RC = (_scaled(col_terms.scale, similarity_RC.T) + col_terms.log_weight[:, None]).exp().T
    weights_RC = (by_row_RC + by_col_RC).masked_fill(~counted_RC, 0.0) + _positives(diagonal, pairs)
    return _pull_back(pairs, weights_RC, needs)


def pairwise(pairs: Pairs, sigmoid: Sigmoid, diagonal: Tensor, *, needs: Needs = (True, True)) -> Pairwise:
    """Statistics and gradients at once, for a sigmoid of z = scale s + bias, which needs no normaliser.

    The gradients are those of W_ij = weight * sigmoid(z_ij), plus `diagonal` (R,) at the positives.
    """
    similarity_RC, counted_RC = similarities(pairs.rows, pairs.cols), counted_pairs(pairs)
    logits_RC = sigmoid.scale * similarity_RC + sigmoid.bias
    factor_RC = counted_RC.to(logits_RC.dtype)
    if sigmoid.sides is not None:
        factor_RC *= sigmoid.sides[0][:, None] + sigmoid.sides[1][None, :]
    sigmoid_RC = logits_RC.sigmoid() * factor_RC
    weights_RC = sigmoid.weight * sigmoid_RC + _positives(diagonal, pairs)
    return Pairwise(
        softplus=(softplus(logits_RC) * factor_RC).sum(1),
        weight=sigmoid_RC.sum(1),
        similarity=(sigmoid_RC * similarity_RC).sum(1),
        gradients=_pull_back(pairs, weights_RC, needs),
    )


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp x). Above 40 it is x to float64's last digit; torch's default cut at 20 is not."""
    return torch.nn.functional.softplus(x, threshold=40)


def similarities(rows: Tensor, cols: Tensor) -> Tensor:
    """rows @ cols.T in the precision of the inputs."""
    if rows.device.type == "cpu" and rows.dtype in (torch.bfloat16, torch.float16):
        # The same product, rounded once. CPUs differ in their half-precision instructions; some crash on them.
        return (rows.float() @ cols.float().T).to(rows.dtype)
    return rows @ cols.T


def counted_pairs(pairs: Pairs) -> Tensor:
    """The (R, C) mask of the pairs that count."""
    row, col = (torch.arange(len(side), device=side.device) for side in (pairs.rows, pairs.cols))
    positive_RC = row[:, None] + pairs.offset == col[None, :]
    if pairs.groups is None:
        return ~positive_RC if pairs.mask_positives else torch.ones_like(positive_RC)
    same_RC = pairs.groups[0][:, None] == pairs.groups[1][None, :]
    return ~(same_RC | positive_RC) if pairs.mask_positives else ~same_RC | positive_RC


def _one_side(similarity_RC: Tensor, scale: Tensor, counted_RC: Tensor) -> Statistics:
    logits_RC = _scaled(scale, similarity_RC).masked_fill(~counted_RC, -torch.inf)
    log_sum = logits_RC.logsumexp(1)
    probability_RC = torch.where(counted_RC, (logits_RC - log_sum[:, None]).exp(), 0.0)
    return Statistics(log_sum, (probability_RC * similarity_RC).sum(1))


def _scaled(scale: Tensor, similarity_RC: Tensor) -> Tensor:
    return (scale[:, None] if scale.ndim else scale) * similarity_RC


def _positives(diagonal: Tensor, pairs: Pairs) -> Tensor:
    """(R, C) zeros with `diagonal` at the positives."""
    row, num_cols = torch.arange(len(diagonal), device=diagonal.device), len(pairs.cols)
    inside = (row + pairs.offset >= 0) & (row + pairs.offset < num_cols)
    matrix = diagonal.new_zeros(len(diagonal), num_cols)
    matrix[row[inside], row[inside] + pairs.offset] = diagonal[inside]
    return matrix


def _pull_back(pairs: Pairs, weights_RC: Tensor, needs: Needs) -> Gradients:
    """Differentiate sum_ij W_ij s_ij with W constant."""
    with torch.enable_grad():
        sides = [
            side.detach().requires_grad_(need) for side, need in zip((pairs.rows, pairs.cols), needs, strict=True)
        ]
        inputs = [side for side in sides if side.requires_grad]
        if not inputs:
            return Gradients(None, None)
        value = (weights_RC.detach() * similarities(*sides)).sum()
        results = iter(torch.autograd.grad(value, inputs))
    return Gradients(*(next(results) if need else None for need in needs))

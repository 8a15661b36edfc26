"""The scalar stage of a loss with one temperature on one process: what each anchor needs beside its similarities.

`prepare` runs before the matrix is read, `anchors` or `sigmoid_sums` after it. Each is one launch instead of some
twenty, which at small batches take longer than the products. The losses have the same in plain PyTorch, for all
other settings: `GlobalTemperature.settle`, `SampleState`, the normalizers and objectives.
"""

# Outside a kernel a jit function cannot be called, and is typed so.
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from leanclip.ops.blocking import ceil_div
from leanclip.ops.triton.kernel_cache import on_device, run
from leanclip.ops.triton.tiles import RUN_TIME
from leanclip.ops.triton.weights import log_one_plus
from leanclip.ops.types import AnchorForm, Estimates, Pairwise, Statistics, StoredTemperature

PREPARE_BLOCK, CHUNK = 16, 1024  # anchors of a program, and those that the one program of a sum reads at once

# Positions in `Prepared.places`: gamma is float64, as its bits; then the ids, and where each is last.
VISITED, VALID, GAMMA, IDS_BEGIN = (tl.constexpr(position) for position in range(4))
# Positions in `Prepared.head`.
TAU, INVERSE, BIAS, WEIGHT, SLOPE, BIAS_SLOPE = (tl.constexpr(position) for position in range(6))
# Rows of `Prepared.vectors`, two for each vector after the first two.
POSITIVE, DIAGONAL = tl.constexpr(0), tl.constexpr(1)
PAIRS = {name: 2 * number for number, name in enumerate(
    ("log_weight", "log_g", "mean_l", "log_norm", "log_u", "ratio", "old"), start=1
)}  # fmt: skip
LOG_WEIGHT, LOG_G, MEAN_L, LOG_NORM, LOG_U, RATIO, OLD = (tl.constexpr(row) for row in PAIRS.values())
PLAIN, PUBLISHED, EXACT = (tl.constexpr(kind) for kind in range(1, 4))
SLOPES = {None: 0, "plain": 1, "published": 2, "exact": 3}


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The buffers of one call. Nobody else writes to them."""

    head: Tensor  # (8,) float32
    vectors: Tensor  # (rows, B) float32
    places: Tensor | None  # (3 + 2 B,) int64, for a loss with estimates

    tau = property(lambda self: self.head[TAU.value])
    inverse = property(lambda self: self.head[INVERSE.value])  # 1 / tau
    bias = property(lambda self: self.head[BIAS.value])
    weight = property(lambda self: self.head[WEIGHT.value])  # of a sigmoid
    slope = property(lambda self: self.head[SLOPE.value])  # of the value for log(1/tau)
    bias_slope = property(lambda self: self.head[BIAS_SLOPE.value])
    diagonal = property(lambda self: self.vectors[DIAGONAL.value])  # the positives' weights
    visited = property(lambda self: self.places[VISITED.value])  # before this call
    valid = property(lambda self: self.places[VALID.value])  # whether all ids are
    gamma = property(lambda self: self.places[GAMMA.value].view(torch.float64))
    positions = property(lambda self: self.places[IDS_BEGIN.value :][: self.vectors.shape[1]])  # in the tables

    def pair(self, name: str) -> Tensor:
        """(2, B): a vector of both sides."""
        return self.vectors[PAIRS[name] : PAIRS[name] + 2]


def prepare(
    image: Tensor,
    text: Tensor,
    temperature: StoredTemperature,
    *,
    ids: Tensor | None = None,
    bias: Tensor | None = None,
) -> Prepared:
    """The similarities of the positives and the temperature, after its clamp.

    Of ids, the last position of each. With a bias the weights of a sigmoid loss.
    """
    image, text = image.contiguous(), text.contiguous()
    ids = None if ids is None else ids.contiguous()
    batch, dim = image.shape
    head = torch.empty(8, dtype=torch.float32, device=image.device)
    vectors = torch.empty(16 if bias is None else 2, batch, dtype=torch.float32, device=image.device)
    places = None if ids is None else torch.empty(IDS_BEGIN.value + 2 * batch, dtype=torch.int64, device=image.device)
    with on_device(image):
        run(
            prepare_kernel,
            (ceil_div(batch, PREPARE_BLOCK), 1, 1),
            (
                image,
                text,
                temperature.stored,
                head if temperature.previous is None else temperature.previous,
                head if ids is None else ids,
                head if bias is None else bias,
                head,
                vectors,
                head if places is None else places,
                batch,
                *temperature.bounds,
                temperature.drop_above,
                temperature.drop_to,
            ),
            {
                "DIM": dim,
                "BLOCK": PREPARE_BLOCK,
                "BLOCK_K": 128,
                "CHUNK": 256,
                "LEARNED": temperature.learned,
                "DROPS": temperature.previous is not None,
                "IDS": ids is not None,
                "SIGMOID": bias is not None,
            },
            {"num_warps": 4},
        )
    return Prepared(head=head, vectors=vectors, places=places)


def anchors(
    prepared: Prepared, by_image: Statistics, by_text: Statistics, form: AnchorForm, estimates: Estimates | None
) -> Tensor:
    """The value of the loss; everything else goes to the rows of `prepared`, and new estimates to their tables."""
    batch = prepared.vectors.shape[1]
    head, log_negatives = prepared.head, math.log(batch - 1)
    value = torch.empty((), dtype=torch.float32, device=head.device)
    with on_device(head):
        run(
            anchors_kernel,
            (1, 1, 1),
            (
                *by_image,
                *by_text,
                *((head,) * 4 if estimates is None else estimates[:4]),
                head if prepared.places is None else prepared.places,
                head,
                prepared.vectors,
                value,
                batch,
                0 if estimates is None else len(estimates.image),
                log_negatives,
                -(log_negatives + math.log(2 * batch)),
                form.log_eps,
                form.rho,
                form.slope_factor,
            ),
            {
                "BLOCK": CHUNK,
                "RUNNING": estimates is not None,
                "DECOUPLED": form.decoupled,
                "TIMES_TAU": form.times_tau,
                "WEIGHT_BY_TAU": form.weight_by_tau,
                "SLOPE_KIND": SLOPES[form.slope],
                "WRITE": estimates is not None and estimates.update,
            },
            {"num_warps": 8},
        )
    return value


def sigmoid_sums(prepared: Prepared, pairwise: Pairwise) -> Tensor:
    """The value of the sigmoid loss; the slopes of its temperature and bias go to the head of `prepared`."""
    head, batch = prepared.head, prepared.vectors.shape[1]
    value = torch.empty((), dtype=torch.float32, device=head.device)
    with on_device(head):
        run(
            sigmoid_sums_kernel,
            (1, 1, 1),
            (*pairwise[:3], head, prepared.vectors, value, batch),
            {"BLOCK": CHUNK},
            {"num_warps": 8},
        )
    return value


@triton.jit(do_not_specialize=RUN_TIME)
def prepare_kernel(
    image, text, stored, previous, ids, bias, head, vectors, places, num_rows, low, high, drop_above, drop_to,
    DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr,
    LEARNED: tl.constexpr, DROPS: tl.constexpr, IDS: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_rows
    positive = tl.zeros((BLOCK,), tl.float32)
    for k in range(0, DIM, BLOCK_K):
        feature = k + tl.arange(0, BLOCK_K)
        where = at.to(tl.int64)[:, None] * DIM + feature[None, :]
        present = inside[:, None] & (feature < DIM)[None, :]
        left = tl.load(image + where, present, 0.0).to(tl.float32)
        positive += tl.sum(left * tl.load(text + where, present, 0.0).to(tl.float32), 1)
    tl.store(vectors + POSITIVE * num_rows + at, positive, inside)
    if IDS:
        mine = tl.load(ids + at, inside, 0).to(tl.int64)
        last = at
        for start in range(0, num_rows, CHUNK):
            other = start + tl.arange(0, CHUNK)
            theirs = tl.load(ids + other, other < num_rows, 0).to(tl.int64)
            same = (mine[:, None] == theirs[None, :]) & (other < num_rows)[None, :]
            last = tl.maximum(last, tl.max(tl.where(same, other[None, :], 0), 1))
        tl.store(places + IDS_BEGIN + at, mine, inside)
        tl.store(places + IDS_BEGIN + num_rows + at, last.to(tl.int64), inside)
    # Of a temperature that drops, only one program may read what that program replaces. A clamp can be repeated.
    if SIGMOID or tl.program_id(0) == 0:
        value = tl.load(stored)
        if LEARNED:
            value = settle(value, stored, previous, low, high, drop_above, drop_to, DROPS)
            tau = tl.exp(-value)
        else:
            tau = value
        inverse = 1.0 / tau
        tl.store(head + TAU, tau)
        tl.store(head + INVERSE, inverse)
        if SIGMOID:
            weight = inverse / num_rows
            tl.store(head + BIAS, tl.load(bias))
            tl.store(head + WEIGHT, weight)
            tl.store(vectors + DIAGONAL * num_rows + at, tl.zeros((BLOCK,), tl.float32) - weight, inside)


@triton.jit
def settle(value, stored, previous, low, high, drop_above, drop_to, DROPS: tl.constexpr):
    """`GlobalTemperature.settle`; NaN stays NaN."""
    if DROPS:
        before = tl.load(previous)
        step = value - before
        value = before + tl.where(before >= drop_above, step * drop_to, step)
    value = tl.where(value < low, low, value)
    value = tl.where(value > high, high, value)
    tl.store(stored, value)
    if DROPS:
        tl.store(previous, value)
    return value


@triton.jit
def log_add_exp(a, b):
    """NaN where one is; -inf of two that are."""
    distance = tl.abs(tl.where(a == b, 0.0, a) - tl.where(a == b, 0.0, b))
    return tl.maximum(a, b) + log_one_plus(tl.exp(-distance))


@triton.jit
def log_of(share):
    """-inf of 0."""
    return tl.where(share > 0, tl.log(tl.where(share > 0, share, 1.0).to(tl.float32)), float("-inf"))


@triton.jit
def side_scalars(
    log_sum, mean, table, vectors, num_rows, row: tl.constexpr, at, inside, ids, known, positive, inverse,
    log_keep, log_add, log_negatives, log_share, log_eps,
    RUNNING: tl.constexpr, DECOUPLED: tl.constexpr, WEIGHT_BY_TAU: tl.constexpr,
):  # fmt: skip
    """Of the anchors of one side: their log norm, estimate before and after, ratio and slope."""
    logit = positive * inverse
    log_g = tl.load(log_sum + at, inside, 0.0) - (logit + log_negatives)
    mean_l = (tl.load(mean + at, inside, 0.0) - positive) * inverse
    old = log_g
    log_u = log_g
    if RUNNING:
        old = tl.load(table + ids, known, float("-inf"))
        log_u = tl.where(old == float("-inf"), log_g, log_add_exp(old + log_keep, log_g + log_add))
        log_norm = log_add_exp(log_u, tl.zeros_like(log_u) + log_eps)
        tl.store(vectors + (OLD + row) * num_rows + at, old, inside)
        tl.store(vectors + (LOG_U + row) * num_rows + at, log_u, inside)
    elif DECOUPLED:
        log_norm = tl.where(log_g == float("-inf"), 0.0, log_g)
    else:
        x = log_g + log_negatives
        log_norm = tl.maximum(x, 0.0) + log_one_plus(tl.exp(-tl.abs(x))) - log_negatives
    ratio = tl.exp(log_g - log_norm)
    log_weight = log_share - (log_norm + logit)
    if not WEIGHT_BY_TAU:
        log_weight += tl.log(inverse)
    tl.store(vectors + (LOG_G + row) * num_rows + at, log_g, inside)
    tl.store(vectors + (MEAN_L + row) * num_rows + at, mean_l, inside)
    tl.store(vectors + (LOG_NORM + row) * num_rows + at, log_norm, inside)
    tl.store(vectors + (RATIO + row) * num_rows + at, ratio, inside)
    tl.store(vectors + (LOG_WEIGHT + row) * num_rows + at, log_weight, inside)
    finite_log_u = tl.where(log_u == float("-inf"), log_norm, log_u)
    return log_norm, old, log_u, finite_log_u, ratio, ratio * mean_l


@triton.jit(do_not_specialize=RUN_TIME)
def anchors_kernel(
    image_log_sum, image_mean, text_log_sum, text_mean, shares, image_table, text_table, visited, places, head,
    vectors, value, num_rows, num_samples, log_negatives, log_share, log_eps, rho, slope_factor,
    BLOCK: tl.constexpr, RUNNING: tl.constexpr, DECOUPLED: tl.constexpr, TIMES_TAU: tl.constexpr,
    WEIGHT_BY_TAU: tl.constexpr, SLOPE_KIND: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    """Steps 2 to 4 of `losses.global_contrastive`, in one program, whose sums have a fixed order.

    The last position of an id stores its estimate. All positions that read the table have done so by then: they are
    earlier, or in the same chunk before the barrier.
    """
    tau = tl.load(head + TAU)
    inverse = tl.load(head + INVERSE)
    log_keep = 0.0
    log_add = 0.0
    if RUNNING:
        gamma = tl.load(shares + 1)
        tl.store(places + GAMMA, gamma.to(tl.int64, bitcast=True))
        log_keep = log_of(tl.load(shares))
        log_add = log_of(gamma)
    norms = tl.zeros((BLOCK,), tl.float32)
    estimates = tl.zeros((BLOCK,), tl.float32)
    slopes = tl.zeros((BLOCK,), tl.float32)
    invalid = tl.zeros((BLOCK,), tl.int64)
    first_visits = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, num_rows, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < num_rows
        ids = at.to(tl.int64)
        known = inside
        if RUNNING:
            ids = tl.load(places + IDS_BEGIN + at, inside, 0)
            known = inside & (ids >= 0) & (ids < num_samples)
            invalid += (inside & (known == 0)).to(tl.int64)
        positive = tl.load(vectors + POSITIVE * num_rows + at, inside, 0.0)
        image_norm, old, image_log_u, image_finite, image_ratio, image_slope = side_scalars(
            image_log_sum, image_mean, image_table, vectors, num_rows, 0, at, inside, ids, known, positive, inverse,
            log_keep, log_add, log_negatives, log_share, log_eps, RUNNING, DECOUPLED, WEIGHT_BY_TAU,
        )  # fmt: skip
        text_norm, _, text_log_u, text_finite, text_ratio, text_slope = side_scalars(
            text_log_sum, text_mean, text_table, vectors, num_rows, 1, at, inside, ids, known, positive, inverse,
            log_keep, log_add, log_negatives, log_share, log_eps, RUNNING, DECOUPLED, WEIGHT_BY_TAU,
        )  # fmt: skip
        total = image_ratio + text_ratio
        if not WEIGHT_BY_TAU:
            total *= inverse
        tl.store(vectors + DIAGONAL * num_rows + at, total / (-2.0 * num_rows), inside)
        norms += tl.where(inside, image_norm + text_norm, 0.0)
        estimates += tl.where(inside, image_finite + text_finite, 0.0)
        slopes += tl.where(inside, image_slope + text_slope, 0.0)
        if WRITE:
            tl.debug_barrier()
            owner = known & (tl.load(places + IDS_BEGIN + num_rows + at, inside, -1) == at)
            tl.store(image_table + ids, image_log_u, owner)
            tl.store(text_table + ids, text_log_u, owner)
            new = owner & (old == float("-inf")) & (image_log_u != float("-inf"))
            first_visits += new.to(tl.int64)
    if RUNNING:
        before = tl.load(visited)
        tl.store(places + VISITED, before)
        tl.store(places + VALID, (tl.sum(invalid) == 0).to(tl.int64))
        if WRITE:
            tl.store(visited, before + tl.sum(first_visits))
    norm = tl.sum(norms) / (2.0 * num_rows)
    slope = tl.sum(slopes) / (2.0 * num_rows)
    tl.store(value, 2 * tau * (norm + rho) if TIMES_TAU else norm + log_negatives)
    if SLOPE_KIND == PLAIN:
        tl.store(head + SLOPE, slope_factor * slope)
    elif SLOPE_KIND == EXACT:
        tl.store(head + SLOPE, tau * (slope - rho - norm))
    elif SLOPE_KIND == PUBLISHED:
        tl.store(head + SLOPE, tau * (2 * slope - rho - tl.sum(estimates) / (2.0 * num_rows)))


@triton.jit(do_not_specialize=RUN_TIME)
def sigmoid_sums_kernel(softplus, weight, similarity, head, vectors, value, num_rows, BLOCK: tl.constexpr):
    """The sums of `losses.sigmoid`, in one program, whose order is fixed."""
    scale = tl.load(head + INVERSE)
    bias = tl.load(head + BIAS)
    values = tl.zeros((BLOCK,), tl.float32)
    similarities = tl.zeros((BLOCK,), tl.float32)
    weights = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, num_rows, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < num_rows
        positive = tl.load(vectors + POSITIVE * num_rows + at, inside, 0.0)
        values += tl.where(inside, tl.load(softplus + at, inside, 0.0) - (scale * positive + bias), 0.0)
        similarities += tl.load(similarity + at, inside, 0.0) - positive
        weights += tl.load(weight + at, inside, 0.0)
    tl.store(value, tl.sum(values) / num_rows)
    tl.store(head + SLOPE, scale * (tl.sum(similarities) / num_rows))
    tl.store(head + BIAS_SLOPE, tl.sum(weights) / num_rows - 1.0)

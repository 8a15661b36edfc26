"""Weights of pairs that a run learns: the probability that a caption belongs to its image.

A visit's score is tau log g of both directions, added and standardised within its global batch; every sample keeps
the mean over its visits. Wrong pairs score high. At the start of each epoch, and inside long ones, two normals are
fitted to the histogram of these means, and a pair's weight is the probability of not being of the upper one. Samples
with fewer than two visits stay out of the fit and have weight 1.

The fit alone calls some pairs wrong in any data. A gate estimates how many are: each image is also scored with the
caption of its neighbour in the batch, which is the distribution of wrong pairs. Half of it lies beyond its mean, so
that twice the share of samples beyond this mean estimates the share of wrong pairs. `learned` always weighs by the
fit, `auto` only where this share is above 1%.

Where a sample has several captions, the tables can hold a score for each: a row per sample, a column per caption. A
caption with fewer than two visits is then judged by the mean over all visits to its sample.
"""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from leanclip.errors import ArgumentError
from leanclip.losses.sample_state import Ids, SampleState, last_occurrence

Mode = Literal["off", "learned", "auto"]
TABLES = {"score": 0.0, "scored": 0.0}  # the mean over the visits, and their number
NULL = "null"  # sum and number of the scores of wrong pairs
MIN_VISITS = 2  # of a sample, before which its score says little
VISITS_PER_FIT = 1_000_000  # where an epoch has more, it has several fits
SMALLEST_SHARE = 0.01  # of wrong pairs, up to which `auto` leaves all pairs at weight 1
CLEARLY_APART = 2.0  # Ashman's D of two normals, from which on they are two groups (Ashman, Bird and Zepf 1994)
LARGE_GROUP, LEAST_SAMPLES = 0.2, 1000  # smaller shares of fewer samples lie apart by chance
SEEN_AS_WRONG = 0.25  # of the upper normal's share, which the gate has to see: it may be another kind of right pairs
RANGE, BINS, LOGGED_BINS = 8.0, 1024, 128  # of the histogram, in standard deviations on both sides
ITERATIONS, SMALLEST_SPREAD = 300, 0.02
CHUNK = 1 << 22  # values counted at a time, which bounds the memory


class Comparison(NamedTuple):
    """A global batch, compared with itself: what its scores are made of."""

    images: Tensor  # (B, d)
    texts: Tensor
    tau: Tensor  # () or (2, B)
    log_sum: Tensor  # (2, B) log-sum-exp of s_ij / tau_i over the negatives j
    log_g: Tensor  # (2, B) log mean_j exp((s_ij - s_ii) / tau_i)
    groups: Tensor | None  # (B,)
    negatives: Tensor | None  # (B,) how many an anchor has; None: all others


class Visits(NamedTuple):
    """What the tables take from one batch."""

    values: dict[str, Tensor]  # by table, of the shapes that it was read in
    sums: dict[str, Tensor]  # to be added to the buffers of these names


class Fit(NamedTuple):
    """Two normals. Right pairs are of the lower one."""

    low: float
    low_spread: float
    high: float
    high_spread: float
    share: float  # of the upper one

    @property
    def apart(self) -> float:
        """Ashman's D."""
        return (self.high - self.low) * math.sqrt(2) / math.hypot(self.low_spread, self.high_spread)


class Refit(NamedTuple):
    """What a new fit found, on the host."""

    on: bool  # whether the weights are those of the fit; otherwise they are all 1
    wrong_pairs: float  # their share by the gate
    fit: Fit
    counts: tuple[int, ...]  # of the samples' scores, in equal bins from -RANGE to RANGE

    @property
    def described(self) -> str:
        if not self.on and self.wrong_pairs > SMALLEST_SHARE:  # the estimate is not certain
            return "pair weights: off, the model does not tell right from wrong captions well enough yet"
        state = "on" if self.on else f"off (up to {SMALLEST_SHARE:.0%} they stay off)"
        return f"pair weights: {self.wrong_pairs:.1%} of the pairs look wrong; weights are {state}"


class PairWeights(nn.Module):
    """The current fit, on the device: a CUDA graph reads it at every replay."""

    fit: Tensor  # whether it is used, the numbers of a `Fit`, the share of wrong pairs by the gate, which fit it is

    def __init__(self, state: SampleState, mode: Mode, captions_per_sample: int = 1) -> None:
        super().__init__()
        self.gated, self.captions_per_sample = mode == "auto", captions_per_sample
        self.register_buffer("fit", torch.tensor([0.0, 0.0, 1.0, 0.0, 1.0, 0.5, 0.0, -1.0]))
        state.register_buffer(NULL, torch.zeros(2))
        self._turn, self._refit = -1, None
        self.register_load_state_dict_post_hook(PairWeights.loaded)

    def loaded(self, incompatible: object = None) -> None:
        """The fit may be an earlier one now."""
        self._turn = -1

    def fit_again(self) -> None:
        """At the next epoch, whichever it is: fits are counted in epochs of another length now."""
        self._turn = -1
        self.fit[-1] = -1

    def columns(self, caption_numbers: Tensor | None, count: int) -> Tensor | None:
        """In which column of the tables each pair is; None where they have one. Captions beyond the columns share
        those of earlier ones."""
        if self.captions_per_sample == 1:
            return None
        if caption_numbers is None or caption_numbers.shape != (count,):
            raise ArgumentError(
                f"the loss scores {self.captions_per_sample} captions of a sample each by itself: give"
                f" caption_numbers, {count} integers that say which of its sample's captions each text is",
                code="loss.no_caption_numbers",
            )
        return (caption_numbers % self.captions_per_sample).long()

    def weights(self, stored: dict[str, Tensor], columns: Tensor | None = None) -> Tensor:
        """(B,) from the tables before this step."""
        score, scored = pair_scores(stored, columns)
        used, *fit = self.fit[:6].to(score.dtype).unbind()
        return torch.where((used > 0) & (scored >= MIN_VISITS), torch.sigmoid(log_odds(score, *fit)), 1.0)

    def visit(self, batch: Comparison, stored: dict[str, Tensor], ids: Ids, columns: Tensor | None = None) -> Visits:
        """Score the batch; of an id that occurs twice one occurrence counts."""
        valid = ~batch.log_g.isneginf().any(0)
        images, texts = ids
        counted = valid & (last_occurrence(texts) == torch.arange(len(texts), device=texts.device))
        score = torch.where(valid, (batch.tau * batch.log_g).sum(0), 0.0)
        number = counted.sum().clamp_min(1)
        mean = torch.where(counted, score, 0.0).sum() / number
        variance = torch.where(counted, score - mean, 0.0).square().sum() / number
        spread = variance.sqrt().clamp_min(torch.finfo(score.dtype).eps)
        null, with_null = null_score(batch)
        with_null &= counted & (images != images.roll(-1))
        if texts is not images:
            with_null &= texts != texts.roll(-1)
        null_sum = torch.where(with_null, (null - mean) / spread, 0.0).sum()
        if columns is not None:  # of each pair's row its own column changes
            own_column = torch.arange(self.captions_per_sample, device=columns.device) == columns[:, None]
            score, valid = score[:, None], valid[:, None] & own_column
        scored = stored["scored"] + 1
        updated = stored["score"] + ((score - mean) / spread - stored["score"]) / scored
        values = {
            "score": torch.where(valid, updated, stored["score"]),
            "scored": torch.where(valid, scored, stored["scored"]),
        }
        return Visits(values, {NULL: torch.stack([null_sum, with_null.sum().to(null_sum.dtype)])})

    @torch.no_grad()
    def set_epoch(self, epoch: float, state: SampleState) -> None:
        """Fit again where one is due, which follows from the epoch alone; all ranks call it. A fit waits for the
        device."""
        turn = math.floor(epoch * max(1, state.num_samples // VISITS_PER_FIT))
        if turn == self._turn:
            return
        self._turn = turn
        if turn <= int(self.fit[-1]):  # a resumed run has the fit
            return
        counts = count_scores(state.table("score"), state.table("scored"))
        counts = state.ranks.sum(counts, purpose="pair weights").cpu().double()
        if (wrong := gate(counts, state.get_buffer(NULL))) is None:
            self.fit[-1] = turn
            return
        share, fit, used = wrong.share, wrong.fit, wrong.open or not self.gated
        self.fit.copy_(torch.tensor([float(used), *fit, share, float(turn)]))
        logged = counts.view(LOGGED_BINS, -1).sum(1).long().tolist()
        self._refit = Refit(used, share, fit, tuple(logged))

    def metrics(self) -> dict[str, Tensor]:
        return {"wrong_pairs": self.fit[6].clone()}

    def take_refit(self) -> Refit | None:
        """What the newest fit found, once, for the log."""
        refit, self._refit = self._refit, None
        return refit


def pair_scores(stored: dict[str, Tensor], columns: Tensor | None) -> tuple[Tensor, Tensor]:
    """(B,) the score of each pair and the number of visits that it comes from: of a caption with too few visits those
    to all captions of its sample."""
    score, scored = stored["score"], stored["scored"]
    if columns is None:
        return score, scored
    total, at = scored.sum(1), columns[:, None]
    mean = (score * scored).sum(1) / total.clamp_min(1)
    score, scored = score.gather(1, at)[:, 0], scored.gather(1, at)[:, 0]
    few = scored < MIN_VISITS
    return torch.where(few, mean, score), torch.where(few, total, scored)


def never_scored(stored: dict[str, Tensor]) -> Tensor:
    """(B,) samples without an earlier visit."""
    return (stored["scored"] == 0).view(len(stored["scored"]), -1).all(1)


def null_score(batch: Comparison) -> tuple[Tensor, Tensor]:
    """(B,) the score of image i with the caption of sample i + 1, and where there is one.

    Both true partners are left out: the own one already is, and the other's term is taken out of the sums.
    """
    log_sum, groups = batch.log_sum, batch.groups
    similarity = (batch.images.to(log_sum.dtype) * batch.texts.roll(-1, 0)).sum(1)
    tau = batch.tau.expand(2, len(similarity))
    negatives = torch.full_like(similarity, len(similarity) - 1)
    if batch.negatives is not None:
        negatives.copy_(batch.negatives)
    sides = (tau[0], log_sum[0], negatives), (tau[1].roll(-1), log_sum[1].roll(-1), negatives.roll(-1))
    score = torch.zeros_like(similarity)
    there = torch.ones_like(similarity, dtype=torch.bool)
    for tau_i, total, count in sides:
        logit = similarity / tau_i
        without = total + torch.log1p(-(logit - total).clamp_max(-1e-6).exp())
        score = score + tau_i * (without - logit - (count - 1).clamp_min(1).log())
        there &= count > 1
    if groups is not None:
        there &= groups != groups.roll(-1)
    return score, there & score.isfinite()


def _centres() -> Tensor:
    return (torch.arange(BINS, dtype=torch.float64) + 0.5) * (2 * RANGE / BINS) - RANGE


def log_odds(
    score: Tensor, low: Tensor, low_spread: Tensor, high: Tensor, high_spread: Tensor, share: Tensor
) -> Tensor:
    """Of being of the lower normal of a fit."""
    at = torch.minimum(torch.maximum(score, low), high)  # beyond the means the tails would decide
    upper = share.log() - high_spread.log() - ((at - high) / high_spread).square() / 2
    lower = torch.log1p(-share) - low_spread.log() - ((at - low) / low_spread).square() / 2
    return lower - upper


class Gate(NamedTuple):
    share: float  # of wrong pairs, estimated
    open: bool  # whether enough of them are wrong, and the model can tell
    fit: Fit


def gate(counts: Tensor, null: Tensor) -> Gate | None:
    """On the host; None without two scores, or without any of a wrong pair.

    Where a model can hardly tell right from wrong, right pairs lie beyond the mean of wrong ones, too; as many then
    lie as far below the median. So the gate stays closed if these are half as many. The share has to be above the
    limit by its standard error.

    Many wrong pairs move the median. So it opens, too, where the fit has two groups, if enough of the upper one lies
    beyond the mean of wrong pairs: half of it would, if none were learned by heart.
    """
    null_sum, null_number = null.tolist()
    total = float(counts.sum())
    if null_number == 0 or total < 2:
        return None
    x, mean, fit = _centres(), null_sum / null_number, fit_two_normals(counts)
    median = float(x[int((counts.cumsum(0) < total / 2).sum())])
    beyond, mirrored = float(counts[x > mean].sum()), float(counts[x < 2 * median - mean].sum())
    share, error = min(1.0, 2 * beyond / total), 2 * math.sqrt(beyond) / total
    clear = total >= LEAST_SAMPLES and fit.share > LARGE_GROUP and fit.apart > CLEARLY_APART
    clear = clear and share > SEEN_AS_WRONG * fit.share
    enough = share - error > SMALLEST_SHARE
    return Gate(share, enough and (clear or mirrored < beyond / 2), fit)


def count_scores(score: Tensor, scored: Tensor, min_visits: int = MIN_VISITS) -> Tensor:
    """A histogram: whole numbers, whose sum over the ranks is the same on any number of ranks."""
    counts = torch.zeros(BINS + 1, dtype=torch.int64, device=score.device)
    for part, visits in zip(score.flatten().split(CHUNK), scored.flatten().split(CHUNK), strict=True):
        bins = ((part.double() + RANGE) * (BINS / (2 * RANGE))).floor().clamp(0, BINS - 1).long()
        counts += torch.bincount(torch.where(visits >= min_visits, bins, BINS), minlength=BINS + 1)
    return counts[:BINS]


def fit_two_normals(counts: Tensor) -> Fit:
    """By expectation and maximisation on a histogram over `_centres`."""
    x, total = _centres(), counts.sum()
    below = counts.cumsum(0) / total
    mean = (counts * x).sum() / total
    spread = max(SMALLEST_SPREAD, math.sqrt(float((counts * (x - mean).square()).sum() / total)))
    low, high = (float(x[int(torch.searchsorted(below, quantile).clamp_max(BINS - 1))]) for quantile in (0.3, 0.95))
    fit = Fit(low, spread / 2, high, spread / 2, 0.1)
    for _ in range(ITERATIONS):
        upper = fit.share / fit.high_spread * torch.exp(-((x - fit.high) / fit.high_spread).square() / 2)
        lower = (1 - fit.share) / fit.low_spread * torch.exp(-((x - fit.low) / fit.low_spread).square() / 2)
        of_upper = counts * (upper / (upper + lower).clamp_min(1e-300))
        fit = Fit(*_normal(counts - of_upper, x), *_normal(of_upper, x), float(of_upper.sum() / total))
        fit = fit._replace(share=min(max(fit.share, 1e-4), 1 - 1e-4))
    return fit if fit.low <= fit.high else Fit(*fit[2:4], *fit[:2], 1 - fit.share)


def _normal(counts: Tensor, x: Tensor) -> tuple[float, float]:
    total = counts.sum().clamp_min(1e-12)
    mean = (counts * x).sum() / total
    spread = ((counts * (x - mean).square()).sum() / total).sqrt()
    return float(mean), max(SMALLEST_SPREAD, float(spread))

"""What an anchor's weights are divided by: the batch's own sum, or a running estimate over the data set.

Both work on log g, the log of the mean over the negatives of exp((s_ij - s_ii) / tau_i); linear space would overflow
float32 at tau = 0.01.
"""

import math
from typing import Protocol

import torch
from torch import Tensor

from leanclip.ops.reference import softplus


class Normalizer(Protocol):
    def __call__(
        self, log_g: Tensor, log_u: Tensor | None, *, negatives: int, shares: Tensor, shift: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The log of what g is divided by, and log u to be stored (log g itself where nothing is stored)."""
        ...


def batch(
    log_g: Tensor, log_u: Tensor | None, *, negatives: int, shares: Tensor, shift: Tensor | None
) -> tuple[Tensor, Tensor]:
    """InfoNCE: (1 + (B-1) g) / (B-1), the softmax's denominator."""
    log_negatives = math.log(max(negatives, 1))
    return softplus(log_g + log_negatives) - log_negatives, log_g


class RunningEstimate:
    """eps + u with u <- (1 - gamma) u + gamma g, and u = g on a sample's first visit.

    With a `shift` it is eps exp(shift) + u.
    """

    def __init__(self, eps: float) -> None:
        self.log_eps = math.log(eps)

    def __call__(
        self, log_g: Tensor, log_u: Tensor | None, *, negatives: int, shares: Tensor, shift: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        assert log_u is not None
        updated = update_estimate(log_u.to(log_g.dtype), log_g, shares)
        log_eps = torch.full_like(updated, self.log_eps) if shift is None else self.log_eps + shift
        return torch.logaddexp(updated, log_eps), updated


def update_estimate(log_u: Tensor, log_g: Tensor, shares: Tensor) -> Tensor:
    """log of (1 - gamma) u + gamma g, given the two shares; `log_u` is -inf where the sample was never visited."""
    kept, taken = shares.log().unbind()
    averaged = torch.logaddexp(log_u + kept, log_g + taken)
    return torch.where(log_u.isneginf(), log_g, averaged)

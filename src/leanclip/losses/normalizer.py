"""The normaliser of an anchor's weights, and gamma, the share of the newest batch in a running estimate.

The normalisers take log g, the log of the mean over the negatives of exp((s_ij - s_ii) / tau_i); linear space would
overflow float32 at tau = 0.01. They return the log of what g is divided by, and log u to be stored.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from leanclip.losses.config import LossConfig
from leanclip.ops.reference import softplus

# (log g, log of the number of negatives, log u, shares of old and new, shift) -> (log norm, new log u)
Normalizer = Callable[[Tensor, Tensor | float, Tensor | None, Tensor, Tensor | None], tuple[Tensor, Tensor]]


def batch_sum(
    log_g: Tensor, log_negatives: Tensor | float, log_u: Tensor | None, shares: Tensor, shift: Tensor | None
) -> tuple[Tensor, Tensor]:
    """InfoNCE: (1 + n g) / n with n negatives, the softmax's denominator. It stores nothing."""
    return softplus(log_g + log_negatives) - log_negatives, log_g


def batch_mean(
    log_g: Tensor, log_negatives: Tensor | float, log_u: Tensor | None, shares: Tensor, shift: Tensor | None
) -> tuple[Tensor, Tensor]:
    """dcl: g itself, the denominator without the positive. 1 for an anchor without negatives."""
    return log_g.masked_fill(log_g.isneginf(), 0.0), log_g


def running_estimate(
    eps: float,
    log_g: Tensor,
    log_negatives: Tensor | float,
    log_u: Tensor | None,
    shares: Tensor,
    shift: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """eps + u with u <- (1 - gamma) u + gamma g; u = g on a sample's first visit, before which log u is -inf.

    An anchor without negatives leaves u: its log g is -inf. With a `shift` it is eps exp(shift) + u.
    """
    assert log_u is not None
    log_keep, log_add = shares.log().unbind()
    averaged = torch.logaddexp(log_u + log_keep, log_g + log_add)
    updated = torch.where(log_u.isneginf(), log_g, averaged)
    if isinstance(log_negatives, Tensor):
        updated = torch.where(log_g.isneginf(), log_u, updated)
    log_eps = torch.full_like(updated, math.log(eps)) if shift is None else math.log(eps) + shift
    return torch.logaddexp(updated, log_eps), updated


def inner_rate(config: LossConfig, epoch: float, epochs: int) -> float:
    """gamma in this epoch; a fraction of `epoch` counts only with `gamma_per_step`.

    The first epoch has gamma 1, because there is nothing to average with yet.
    """
    if not config.gamma_per_step:
        epoch = math.floor(epoch)
    constant = config.gamma_schedule == "constant"
    if epoch < 1 and (constant or not config.gamma_per_step):
        return 1.0
    gamma_min, decay_epochs = config.gamma_min, config.gamma_decay_epochs or max(1, epochs // 2)
    if config.gamma_schedule == "auto":  # a power law in the number of epochs through the published settings
        gamma_min, decay_epochs = min(1.0, 4.177 * epochs**-0.7265), epochs
    assert gamma_min is not None
    if constant or epoch >= decay_epochs:
        return gamma_min
    return 0.5 * (1 + math.cos(math.pi * epoch / decay_epochs)) * (1 - gamma_min) + gamma_min

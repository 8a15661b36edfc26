"""The value of each objective at the current estimates, and its gradient for a global temperature.

The values are for the log: the gradients for the embeddings do not come from them.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor


class Anchors(NamedTuple):
    """The batch and the estimator at each anchor, with l_ij = (s_ij - s_ii) / tau_i over the negatives j.

    Tensors with a leading dimension of 2 hold both directions: image anchors first, text anchors second.
    """

    tau: Tensor  # () or (2, B)
    log_g: Tensor  # (2, B) log mean_j exp(l_ij)
    mean_l: Tensor  # (2, B) mean of l under the softmax over the negatives
    log_norm: Tensor  # (2, B) log of what g is divided by: log(eps + u), or the batch's own
    log_u: Tensor  # (2, B) the running estimate after the update
    ratio: Tensor  # (2, B) g / norm
    log_negatives: Tensor | float  # log of how many negatives an anchor has; (B,) where groups leave some out
    weight: Tensor | None  # (B,) of a pair in every mean over the batch, 0 without negatives; None: all have 1

    def mean(self, values: Tensor) -> Tensor:
        """Over the batch and both directions, weighted."""
        if self.weight is None:
            return values.mean()
        return torch.where(self.weight > 0, values * self.weight, 0.0).mean()

    def mean_weight(self) -> Tensor | float:
        return 1.0 if self.weight is None else self.weight.mean()

    def finite_log_u(self) -> Tensor:
        """log u, or the normaliser's floor log(eps) for an anchor that never had a negative."""
        return torch.where(self.log_u.isneginf(), self.log_norm, self.log_u)

    def effective_negatives(self) -> Tensor:
        return (self.log_g + self.log_negatives - self.mean_l).exp()

    def estimate_gap(self) -> Tensor:
        return (self.log_g - self.log_u).nan_to_num(0.0, 0.0, 0.0).abs()

    def slope(self) -> Tensor:
        """-tau d/dtau of g / norm, norm held constant."""
        return self.ratio * self.mean_l


def cross_entropy(anchors: Anchors) -> Tensor:
    """In both directions: the mean of log(1 + n g) with n negatives; for dcl, without the positive, of log(n g)."""
    return anchors.mean(anchors.log_norm + anchors.log_negatives)


def gcl(anchors: Anchors) -> Tensor:
    """Global contrastive loss: tau mean_i[log(eps + u1) + log(eps + u2)]."""
    return 2 * anchors.tau * anchors.mean(anchors.log_norm)


def rgcl(rho: float, anchors: Anchors) -> Tensor:
    """Robust global contrastive loss: mean_i[tau1 (log(eps + u1) + rho) + tau2 (log(eps + u2) + rho)].

    With one global tau this is RGCL-g.
    """
    return 2 * anchors.mean(anchors.tau * (anchors.log_norm + rho))


def plain_gradient(factor: float, anchors: Anchors) -> Tensor:
    """d/dlog(1/tau) of factor * mean_i[g1/norm1 + g2/norm2], norms constant. 1/2: InfoNCE, dcl; 1: fastclip-v0."""
    return 2 * factor * anchors.mean(anchors.slope())


def robust_gradient(rho: float, form: Literal["published", "exact"], anchors: Anchors) -> Tensor:
    """fastclip-v3: d/dlog(1/tau) of half the RGCL-g objective. `published` counts the first term twice."""
    slope, penalty = anchors.mean(anchors.slope()), rho * anchors.mean_weight()
    if form == "exact":
        return anchors.tau * (slope - penalty - anchors.mean(anchors.log_norm))
    return anchors.tau * (2 * slope - penalty - anchors.mean(anchors.finite_log_u()))

"""The value of each objective at the current estimates, and its gradient for a global temperature.

The values are for the log: the gradients for the embeddings do not come from them.
"""

import math
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

    def finite_log_u(self) -> Tensor:
        """log u, or the normaliser's floor log(eps) for an anchor that never had a negative."""
        return torch.where(self.log_u.isneginf(), self.log_norm, self.log_u)

    def slope(self) -> Tensor:
        """-tau d/dtau of g / norm, norm held constant."""
        return self.ratio * self.mean_l


def infonce(anchors: Anchors) -> Tensor:
    """Cross-entropy in both directions: the mean of log(1 + (B-1) g)."""
    return anchors.log_norm.mean() + math.log(max(anchors.log_g.shape[1] - 1, 1))


def gcl(anchors: Anchors) -> Tensor:
    """Global contrastive loss: tau mean_i[log(eps + u1) + log(eps + u2)]."""
    return 2 * anchors.tau * anchors.log_norm.mean()


def rgcl(rho: float, anchors: Anchors) -> Tensor:
    """Robust global contrastive loss: mean_i[tau1 (log(eps + u1) + rho) + tau2 (log(eps + u2) + rho)].

    With one global tau this is RGCL-g.
    """
    return 2 * (anchors.tau * (anchors.log_norm + rho)).mean()


def plain_gradient(factor: float, anchors: Anchors) -> Tensor:
    """d/dlog(1/tau) of factor * mean_i[g1/norm1 + g2/norm2], norms constant: InfoNCE (1/2), fastclip-v0 (1)."""
    return 2 * factor * anchors.slope().mean()


def robust_gradient(rho: float, form: Literal["published", "exact"], anchors: Anchors) -> Tensor:
    """fastclip-v3: d/dlog(1/tau) of half the RGCL-g objective. `published` counts the first term twice."""
    slope = anchors.slope().mean()
    if form == "exact":
        return anchors.tau * (slope - rho - anchors.log_norm.mean())
    return anchors.tau * (2 * slope - rho - anchors.finite_log_u().mean())

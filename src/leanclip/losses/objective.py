"""The value of each objective at the current estimates: what the log shows. The gradients do not come from here."""

import math

from torch import Tensor

from leanclip.losses.temperature import Anchors


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

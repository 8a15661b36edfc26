"""The value of each objective at the current estimates: what the log shows. The gradients do not come from here."""

import math

from torch import Tensor

from leanclip.losses.temperature import Anchors
from leanclip.ops.reference import softplus


def infonce(image: Anchors, text: Anchors) -> Tensor:
    """Cross-entropy in both directions: 1/2 mean log(1 + (B-1) g)."""
    log_negatives = math.log(max(len(image.log_g) - 1, 1))
    return 0.5 * (softplus(image.log_g + log_negatives) + softplus(text.log_g + log_negatives)).mean()


def gcl(image: Anchors, text: Anchors) -> Tensor:
    """Global contrastive loss: tau mean[log(eps + u1) + log(eps + u2)]."""
    return image.tau * (image.log_norm + text.log_norm).mean()


def rgcl(rho: float, image: Anchors, text: Anchors) -> Tensor:
    """Robust global contrastive loss: mean[tau1 (log(eps + u1) + rho) + tau2 (log(eps + u2) + rho)].

    With one global tau this is RGCL-g.
    """
    return (image.tau * (image.log_norm + rho) + text.tau * (text.log_norm + rho)).mean()

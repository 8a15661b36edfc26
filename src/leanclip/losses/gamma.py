"""The inner learning rate: how much a sample's newest batch counts in its running estimate."""

import math
from dataclasses import dataclass

from leanclip.losses.config import GammaSchedule


@dataclass(frozen=True, kw_only=True)
class InnerRate:
    """gamma as a function of the epoch. The first epoch always has gamma 1: there is nothing to average with yet."""

    schedule: GammaSchedule
    gamma_min: float | None
    decay_epochs: int | None
    per_step: bool

    def __call__(self, epoch: float, epochs: int) -> float:
        """`epoch` may have a fraction, which counts only with `per_step`."""
        if not self.per_step:
            epoch = math.floor(epoch)
        if epoch < 1 and (not self.per_step or self.schedule == "constant"):
            return 1.0
        if self.schedule == "auto":
            return cosine(epoch, epochs, auto_gamma_min(epochs))
        assert self.gamma_min is not None
        if self.schedule == "constant":
            return self.gamma_min
        return cosine(epoch, self.decay_epochs or max(1, epochs // 2), self.gamma_min)


def cosine(epoch: float, decay_epochs: int, gamma_min: float) -> float:
    if epoch >= decay_epochs:
        return gamma_min
    return 0.5 * (1 + math.cos(math.pi * epoch / decay_epochs)) * (1 - gamma_min) + gamma_min


def auto_gamma_min(epochs: int) -> float:
    """A power law in the number of epochs through the published settings."""
    return min(1.0, 4.177 * epochs**-0.7265)

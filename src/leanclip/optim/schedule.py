"""The learning rate as a pure function of the step."""

import math

from torch.optim import Optimizer


def learning_rate(step: int, *, steps: int, warmup: int, peak: float, floor: float = 0.0) -> float:
    """Linear warm-up to `peak`, then a cosine to `floor` at the end of the run."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return floor + 0.5 * (peak - floor) * (1 + math.cos(math.pi * progress))


def set_learning_rate(optimizer: Optimizer, lr: float, *, peak: float) -> None:
    """Move every group that follows the model's schedule, in proportion to its own peak."""
    for group in optimizer.param_groups:
        if group.get("follows_schedule", True):
            group["lr"] = group["peak_lr"] * lr / peak

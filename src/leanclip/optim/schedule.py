"""The learning rate as a pure function of the step."""

import math

from torch.optim import Optimizer

from leanclip.optim.config import OptimConfig


def scheduled(config: OptimConfig, step: int, *, steps: int, steps_per_epoch: int) -> float:
    """The learning rate of a step: linear warm-up, then the schedule of the configuration."""
    assert config.lr is not None and config.warmup is not None
    peak, warmup, floor = config.lr, config.warmup, min(config.lr_floor, config.lr)
    if step < warmup:
        return peak * (step + 1) / warmup
    if config.lr_scheduler == "cosine":
        progress = (step - warmup) / max(1, steps - warmup)
        return floor + 0.5 * (peak - floor) * (1 + math.cos(math.pi * progress))
    start = max(warmup, steps - (config.epochs_cooldown or 0) * steps_per_epoch)
    if config.lr_scheduler == "const" or step < start:
        return peak
    remaining = 1 - (step - start) / (steps - start)
    return floor + (peak - floor) * remaining**config.lr_cooldown_power


def set_learning_rate(optimizer: Optimizer, lr: float, *, peak: float) -> None:
    """Set every group that follows the schedule, in proportion to its own peak."""
    for group in optimizer.param_groups:
        if group.get("follows_schedule", True):
            group["lr"] = group["peak_lr"] * lr / peak

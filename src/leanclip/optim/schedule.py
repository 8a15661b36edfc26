"""The learning rate as a pure function of the step."""

import math

from torch.optim import Optimizer

from leanclip.optim.config import OptimConfig


def learning_rate(step: int, *, steps: int, warmup: int, peak: float, floor: float = 0.0) -> float:
    """Linear warm-up to `peak`, then a cosine to `floor` at the end of the run."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return floor + 0.5 * (peak - floor) * (1 + math.cos(math.pi * progress))


def scheduled(config: OptimConfig, step: int, *, steps: int, steps_per_epoch: int) -> float:
    """The learning rate of a step, by the schedule of the configuration."""
    assert config.lr is not None and config.warmup is not None
    floor = min(config.lr_floor, config.lr)
    if step < config.warmup or config.lr_scheduler == "cosine":
        return learning_rate(step, steps=steps, warmup=config.warmup, peak=config.lr, floor=floor)
    cooldown = (config.epochs_cooldown or 0) * steps_per_epoch
    start = max(config.warmup, steps - cooldown)
    if config.lr_scheduler == "const" or step < start:
        return config.lr
    remaining = 1 - (step - start) / (steps - start)
    return floor + (config.lr - floor) * remaining**config.lr_cooldown_power


def set_learning_rate(optimizer: Optimizer, lr: float, *, peak: float) -> None:
    """Set every group that follows the schedule, in proportion to its own peak."""
    for group in optimizer.param_groups:
        if group.get("follows_schedule", True):
            group["lr"] = group["peak_lr"] * lr / peak

"""The optimizer's part of the configuration."""

import math
from dataclasses import dataclass
from typing import Literal

from leanclip.settings import POSITIVE, Limits, at_least, check_limits, common, setting

NOT_NEGATIVE = Limits("finite, 0 or more", lambda value: 0 <= value < math.inf)
SHARE = Limits("in [0, 1)", lambda value: 0 <= value < 1)


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Optimizer"""

    opt: str = setting("adamw", common=True, resume="fixed")
    """adamw, lamb, lion, sgdm or another optimizer of timm."""
    lr: float | None = common(None, POSITIVE)
    """Peak learning rate. Default: interpolated from the published settings, which are AdamW's; 0.2 times that for
    lion, 600 times for sgdm (docs/algorithm.md)."""
    lr_image: float | None = setting(None, limits=POSITIVE, resume="fixed")
    """Peak learning rate of the image tower's trunk. Default: --lr."""
    lr_text: float | None = setting(None, limits=POSITIVE, resume="fixed")
    """Peak learning rate of the text tower's trunk. Default: --lr."""
    lr_head: float | None = setting(None, limits=POSITIVE, resume="fixed")
    """Peak learning rate of both projections. Default: --lr."""
    layer_decay: float = setting(1.0, limits=Limits("in (0, 1]", lambda value: 0 < value <= 1), resume="fixed")
    """The learning rate of each layer of a trunk is this share of that of the layer after it."""
    lr_floor: float = setting(0.0, limits=NOT_NEGATIVE)
    """Learning rate at the end of the schedule."""
    lr_scheduler: Literal["cosine", "const", "const-cooldown"] = "cosine"
    """Learning rate after the warm-up: a cosine to --lr-floor, constant, or constant with a decay to --lr-floor in
    the last --epochs-cooldown epochs."""
    epochs_cooldown: int | None = setting(None, limits=at_least(1))
    """Epochs of the decay of const-cooldown."""
    lr_cooldown_power: float = setting(1.0, limits=POSITIVE)
    """Shape of the decay of const-cooldown: 1 is linear, 2 quadratic."""
    wd: float | None = common(None, NOT_NEGATIVE)
    """Weight decay, of matrices only. Default: 0.1; lion 0.5, sgdm 1e-5."""
    beta1: float | None = setting(None, limits=SHARE)
    """Default: by model, 0.9."""
    beta2: float | None = setting(None, limits=SHARE)
    """Default: by model, 0.98 for ViTs and 0.999 for ResNets; lion 0.99."""
    eps_opt: float | None = setting(None, limits=POSITIVE)
    """The optimizer's epsilon. Default: by model, 1e-6 for ViTs and 1e-8 for ResNets."""
    momentum: float = setting(0.9, limits=SHARE)
    """Momentum of sgdm."""
    warmup: int | None = common(None, at_least(0))
    """Steps of linear warm-up. Default: a tenth of the run, at most 10,000."""
    grad_clip_norm: float | None = setting(None, limits=POSITIVE)
    """Scale gradients down to this norm."""

    def __post_init__(self) -> None:
        check_limits(self)
        if (self.lr_scheduler == "const-cooldown") != (self.epochs_cooldown is not None):
            raise ValueError(
                "--lr-scheduler const-cooldown and --epochs-cooldown need each other; give both or neither"
            )

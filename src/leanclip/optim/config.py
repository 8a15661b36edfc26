"""The optimizer's part of the configuration."""

import math
from dataclasses import dataclass
from typing import Literal

from leanclip.settings import common, setting


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Optimizer"""

    opt: str = setting("adamw", common=True, resume="fixed")
    """adamw, lamb, lion, sgdm or another optimizer of timm."""
    lr: float | None = common(None)
    """Peak learning rate. Default: interpolated from the published settings, which are AdamW's; 0.2 times that for
    lion, 600 times for sgdm (docs/algorithm.md)."""
    lr_image: float | None = setting(None, resume="fixed")
    """Peak learning rate of the image tower's trunk. Default: --lr."""
    lr_text: float | None = setting(None, resume="fixed")
    """Peak learning rate of the text tower's trunk. Default: --lr."""
    lr_head: float | None = setting(None, resume="fixed")
    """Peak learning rate of both projections. Default: --lr."""
    layer_decay: float = setting(1.0, resume="fixed")
    """The learning rate of each layer of a trunk is this share of that of the layer after it."""
    lr_floor: float = 0.0
    """Learning rate at the end of the schedule."""
    lr_scheduler: Literal["cosine", "const", "const-cooldown"] = "cosine"
    """Learning rate after the warm-up: a cosine to --lr-floor, constant, or constant with a decay to --lr-floor in
    the last --epochs-cooldown epochs."""
    epochs_cooldown: int | None = None
    """Epochs of the decay of const-cooldown."""
    lr_cooldown_power: float = 1.0
    """Shape of the decay of const-cooldown: 1 is linear, 2 quadratic."""
    wd: float | None = common(None)
    """Weight decay, of matrices only. Default: 0.1; lion 0.5, sgdm 1e-5."""
    beta1: float | None = None
    """Default: by model, 0.9."""
    beta2: float | None = None
    """Default: by model, 0.98 for ViTs and 0.999 for ResNets; lion 0.99."""
    eps_opt: float | None = None
    """The optimizer's epsilon. Default: by model, 1e-6 for ViTs and 1e-8 for ResNets."""
    momentum: float = 0.9
    """Momentum of sgdm."""
    warmup: int | None = common(None)
    """Steps of linear warm-up. Default: a tenth of the run, at most 10,000."""
    grad_clip_norm: float | None = None
    """Scale gradients down to this norm."""

    def __post_init__(self) -> None:
        for names, valid, allowed in (
            (
                ("lr", "lr_image", "lr_text", "lr_head", "lr_cooldown_power", "eps_opt", "grad_clip_norm"),
                lambda x: 0 < x < math.inf,
                "positive and finite",
            ),
            (("lr_floor", "wd"), lambda x: 0 <= x < math.inf, "finite, 0 or more"),
            (("beta1", "beta2", "momentum"), lambda x: 0 <= x < 1, "in [0, 1)"),
            (("layer_decay",), lambda x: 0 < x <= 1, "in (0, 1]"),
            (("epochs_cooldown",), lambda x: x >= 1, "at least 1"),
            (("warmup",), lambda x: x >= 0, "0 or more steps"),
        ):
            for name in names:
                value = getattr(self, name)
                if value is not None and not valid(value):
                    raise ValueError(f"{name} is {value}; it must be {allowed}")
        if (self.lr_scheduler == "const-cooldown") != (self.epochs_cooldown is not None):
            raise ValueError(
                "--lr-scheduler const-cooldown and --epochs-cooldown need each other; give both or neither"
            )

"""The optimizer's part of the configuration."""

import math
from dataclasses import dataclass
from typing import Literal

from leanclip.settings import common


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Optimizer"""

    opt: str = common("adamw")
    """adamw, lamb, lion, sgdm or another optimizer of timm."""
    lr: float | None = common(None)
    """Peak learning rate. Default: interpolated from the published settings (docs/algorithm.md)."""
    lr_floor: float = 0.0
    """The schedule ends here."""
    lr_scheduler: Literal["cosine", "const", "const-cooldown"] = "cosine"
    """How the learning rate goes on after the warm-up: along a cosine to --lr-floor, constant, or constant and in the
    last --epochs-cooldown epochs down to --lr-floor."""
    epochs_cooldown: int | None = None
    """The epochs over which const-cooldown goes down."""
    lr_cooldown_power: float = 1.0
    """How const-cooldown goes down: 1 in a line, 2 in a parabola."""
    wd: float | None = common(None)
    """Weight decay, of matrices only. Default: 0.1."""
    beta1: float | None = None
    """Default: by model, 0.9."""
    beta2: float | None = None
    """Default: by model, 0.98 for ViTs and 0.999 for ResNets."""
    eps_opt: float | None = None
    """The optimizer's epsilon. Default: by model, 1e-6 for ViTs and 1e-8 for ResNets."""
    momentum: float = 0.9
    """Momentum of sgdm."""
    warmup: int | None = common(None)
    """Steps of linear warm-up. Default: a tenth of the run, at most 10,000."""
    grad_clip_norm: float | None = None
    """Scale gradients down to this norm."""

    def __post_init__(self) -> None:
        for name in ("lr", "lr_cooldown_power", "eps_opt", "grad_clip_norm"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}; it must be positive and finite")
        for name in ("lr_floor", "wd"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value}; it must be finite, 0 or more")
        for name in ("beta1", "beta2", "momentum"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                raise ValueError(f"{name} is {value}; it must lie in [0, 1)")
        if (self.lr_scheduler == "const-cooldown") != (self.epochs_cooldown is not None):
            raise ValueError("--lr-scheduler const-cooldown and --epochs-cooldown go together; give both or neither")
        if self.epochs_cooldown is not None and self.epochs_cooldown < 1:
            raise ValueError(f"epochs_cooldown is {self.epochs_cooldown}; it must be at least 1")
        if self.warmup is not None and self.warmup < 0:
            raise ValueError(f"warmup is {self.warmup}; it must be 0 or more steps")

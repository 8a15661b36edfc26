"""leanclip: train CLIP models on few GPUs."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from leanclip.version import __version__

if TYPE_CHECKING:
    from leanclip.api import EvaluationConfig, SetResult, TrainConfig, TrainedRun, evaluate, load, train
    from leanclip.errors import UserError
    from leanclip.losses import LOSSES, ContrastiveLoss, LossOutput, create_loss

_HOMES = {
    "leanclip.api": ("EvaluationConfig", "SetResult", "TrainConfig", "TrainedRun", "evaluate", "load", "train"),
    "leanclip.errors": ("UserError",),
    "leanclip.losses": ("LOSSES", "ContrastiveLoss", "LossOutput", "create_loss"),
}
__all__ = [
    "LOSSES",
    "ContrastiveLoss",
    "EvaluationConfig",
    "LossOutput",
    "SetResult",
    "TrainConfig",
    "TrainedRun",
    "UserError",
    "__version__",
    "create_loss",
    "evaluate",
    "load",
    "train",
]


def __getattr__(name: str) -> Any:
    """Public names are imported on first use: they load torch, which `leanclip --help` does not need."""
    if name == "losses":
        return import_module("leanclip.losses")
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""leanclip: train CLIP models on few GPUs."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leanclip.losses import LOSSES, ContrastiveLoss, LossOutput, create_loss
    from leanclip.models import TwoTower

__version__ = "0.1.0"
__all__ = ["LOSSES", "ContrastiveLoss", "LossOutput", "__version__", "create_loss", "load"]


def load(run_or_checkpoint: str | Path) -> "tuple[TwoTower, Any, Any]":
    """The model of a run or checkpoint for inference, its image preprocessing and its tokenizer.

    model, preprocess, tokenizer = leanclip.load("logs/demo")
    image = model.encode_image(preprocess(picture)[None])
    text = model.encode_text(tokenizer(["a cat", "a dog"]))
    image @ text.T
    """
    from leanclip.inference import load  # brings open_clip, which the losses alone do not need

    return load(run_or_checkpoint)


def __getattr__(name: str) -> Any:
    """The losses, once they are asked for: they bring torch, and `leanclip --help` should not wait for it."""
    if name not in ("losses", *__all__):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    losses = import_module("leanclip.losses")
    return losses if name == "losses" else getattr(losses, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

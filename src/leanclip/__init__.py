"""leanclip: train CLIP models on few GPUs."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from leanclip.losses import LOSSES, ContrastiveLoss, LossOutput, create_loss

if TYPE_CHECKING:
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

"""leanclip: train CLIP models on few GPUs."""

from leanclip.losses import LOSSES, ContrastiveLoss, LossOutput, create_loss

__version__ = "0.1.0"
__all__ = ["LOSSES", "ContrastiveLoss", "LossOutput", "__version__", "create_loss"]

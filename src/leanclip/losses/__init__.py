"""The losses, by name: `create_loss`."""

from leanclip.losses.base import ContrastiveLoss, LossOutput
from leanclip.losses.config import LossConfig
from leanclip.losses.registry import LOSSES, create_loss, loss_from_config

__all__ = ["LOSSES", "ContrastiveLoss", "LossConfig", "LossOutput", "create_loss", "loss_from_config"]

"""The models: open_clip's, behind a two-tower interface."""

from leanclip.models.config import ModelConfig
from leanclip.models.tokens import TokenCounter
from leanclip.models.two_tower import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    TwoTower,
    create_model,
    is_resnet,
    load_model,
    model_config_of,
)

__all__ = [
    "CONFIG_FILE",
    "WEIGHTS_FILE",
    "ModelConfig",
    "TokenCounter",
    "TwoTower",
    "create_model",
    "is_resnet",
    "load_model",
    "model_config_of",
]

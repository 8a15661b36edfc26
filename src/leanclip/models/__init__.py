"""The models: open_clip's, behind a two-tower interface."""

from leanclip.models.caption_length import TokenCounter
from leanclip.models.config import ModelConfig
from leanclip.models.two_tower import (
    CONFIG_FILE,
    PROMPT_SETS,
    WEIGHTS_FILE,
    TwoTower,
    create_model,
    imagenet_classnames,
    is_model_name,
    is_resnet,
    load_model,
    model_config_of,
    named_architecture,
    prompt_templates,
    saved_architecture,
    with_temperature,
)
from leanclip.models.untrusted import read_torch_file

__all__ = [
    "CONFIG_FILE",
    "PROMPT_SETS",
    "WEIGHTS_FILE",
    "ModelConfig",
    "TokenCounter",
    "TwoTower",
    "create_model",
    "imagenet_classnames",
    "is_model_name",
    "is_resnet",
    "load_model",
    "model_config_of",
    "named_architecture",
    "prompt_templates",
    "read_torch_file",
    "saved_architecture",
    "with_temperature",
]

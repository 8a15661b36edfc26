"""Models: open_clip's, behind a two-tower interface. Their public names."""

from leanclip.models.build import check_vocabulary, create_model, load_model
from leanclip.models.config import ModelConfig
from leanclip.models.open_clip_api import (
    HUB,
    IMAGENET_CLASSNAMES,
    TEMPLATES,
    is_model_name,
    is_resnet,
    model_config_of,
    named_architecture,
)
from leanclip.models.saved import CONFIG_FILE, WEIGHTS_FILE, find_weights, step_directories
from leanclip.models.tokenizer import TokenCounter, create_tokenizer
from leanclip.models.towers.compose import adapters_only, heads_only
from leanclip.models.two_tower import TwoTower
from leanclip.models.untrusted import read_torch_file
from leanclip.models.weights import architecture_of_file, config_of_file, new_projections, with_temperature

__all__ = [
    "CONFIG_FILE",
    "HUB",
    "IMAGENET_CLASSNAMES",
    "TEMPLATES",
    "WEIGHTS_FILE",
    "ModelConfig",
    "TokenCounter",
    "TwoTower",
    "adapters_only",
    "architecture_of_file",
    "check_vocabulary",
    "config_of_file",
    "create_model",
    "create_tokenizer",
    "find_weights",
    "heads_only",
    "is_model_name",
    "is_resnet",
    "load_model",
    "model_config_of",
    "named_architecture",
    "new_projections",
    "read_torch_file",
    "step_directories",
    "with_temperature",
]

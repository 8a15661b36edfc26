"""Models from their configuration, and from what a run saved."""

import math
from pathlib import Path
from typing import Any

import torch

from leanclip.errors import UserError
from leanclip.models.config import ModelConfig
from leanclip.models.open_clip_api import model_config_of, open_clip, registered
from leanclip.models.saved import CONFIG_FILE, WEIGHTS_FILE
from leanclip.models.tokenizer import with_cache
from leanclip.models.towers.compose import compose
from leanclip.models.towers.layers import Side
from leanclip.models.towers.sizes import check_preprocessing, check_sizes
from leanclip.models.two_tower import TwoTower
from leanclip.models.untrusted import without_code
from leanclip.models.weights import config_of_file, load_tower, load_weights, pretrained_weights, saved_preprocessing


def create_model(
    config: ModelConfig, *, siglip: bool = False, double: bool = False, shapes_only: bool = False
) -> TwoTower:
    """Build the model on the CPU. For siglip it starts at tau 0.1 and bias -10, as open_clip's does.

    `double` makes it float64 before weights are loaded, so that those of a float64 run are restored exactly.
    With `shapes_only` it is built on the meta device, without weights, in no time.
    """
    assert config.model is not None
    name, architecture = model_config_of(config.model)
    tower_preprocess: dict[str, Any] = {}
    if config.composed:
        name = str(config.title)
        architecture, tower_preprocess = compose(config, architecture)
    siglip_start = {"init_logit_scale": math.log(10), "init_logit_bias": -10.0} if siglip else {}
    architecture = _with_overrides(siglip_start | architecture, config, name)
    if shapes_only:
        with torch.device("meta"):
            return build_model(
                name, architecture, None, tower_preprocess | config.preprocess, double=double, device="meta"
            )
    weights, preprocess = pretrained_weights(config)
    model = build_model(name, architecture, weights, tower_preprocess | preprocess | config.preprocess, double=double)
    model.weights = dict.fromkeys(model.weights, config.pretrained)
    towers: dict[Side, str | None] = {"image": config.pretrained_image, "text": config.pretrained_text}
    for side, source in towers.items():
        if source is not None:
            if load_tower(model.clip, side, source):
                model.new_projections.add(side)
            model.weights[side] = source
    return model


def _with_overrides(architecture: dict[str, Any], config: ModelConfig, name: str) -> dict[str, Any]:
    vision, text = architecture["vision_cfg"], architecture["text_cfg"]
    if config.force_image_size is not None:
        vision["image_size"] = config.force_image_size
    if config.force_context_length is not None:
        text["context_length"] = config.force_context_length
    if config.force_patch_dropout is not None:
        if not isinstance(vision.get("layers"), int):
            raise UserError(
                f"--force-patch-dropout does not work with {name}: its image tower has no patches to drop",
                code="model.unsupported_option",
            )
        vision["patch_dropout"] = config.force_patch_dropout
    forced = {"quick_gelu": config.force_quick_gelu, "custom_text": config.force_custom_text}
    return architecture | {key: True for key, value in forced.items() if value}


def check_vocabulary(model: TwoTower) -> None:
    """Refuse a tokenizer with tokens that the text tower has no entry for: the first of them would end the run."""
    text = model.config["text_cfg"]
    if text.get("hf_tokenizer_name") and not text.get("hf_model_name"):
        return  # SigLIP's tokenizers count tokens that they never give
    tokenizer: Any = model.tokenizer
    tokens: int = getattr(tokenizer, "tokenizer", tokenizer).vocab_size
    vocabulary: int = (model.clip if hasattr(model.clip, "vocab_size") else model.clip.text).vocab_size  # CoCa's
    if vocabulary < tokens:
        raise UserError(
            f"{model.name} has a vocabulary of {vocabulary} entries, and its tokenizer {tokens}",
            code="model.small_vocabulary",
        )


def load_model(saved: Path) -> TwoTower:
    """The model of a checkpoint directory, or of an exported file, whose header or .json holds its architecture."""
    path = config_of_file(saved) if saved.is_file() else saved / CONFIG_FILE
    assert path is not None
    _, config = model_config_of(str(path))
    weights = saved if saved.is_file() else saved / WEIGHTS_FILE
    model = build_model(str(saved), config, weights, saved_preprocessing(path))
    check_vocabulary(model)
    model.weights = dict.fromkeys(model.weights, str(saved))
    return model


def is_resized(visual: Any) -> bool:
    """Whether the image tower is one of timm with a fixed image size, and not at that of its weights."""
    trunk: Any = getattr(visual, "trunk", None)
    if getattr(getattr(trunk, "patch_embed", None), "img_size", None) is None:
        return False
    return tuple(trunk.pretrained_cfg["input_size"][1:]) != tuple(visual.image_size)


def build_model(
    name: str,
    config: dict[str, Any],
    weights: Path | None,
    preprocess: dict[str, Any],
    *,
    double: bool = False,
    device: str = "cpu",
) -> TwoTower:
    """The model of an open_clip config, with the weights of a file or random ones."""
    check_sizes(config, name, in_memory=device != "meta")
    check_preprocessing(preprocess, name)
    with registered(config) as registered_name:
        try:
            clip: Any = open_clip.create_model(
                registered_name, device=device, force_preprocess_cfg=preprocess, pretrained_text=False
            )
            tokenizer = with_cache(open_clip.get_tokenizer(registered_name))
        except Exception as error:  # of many types: whatever the libraries make of a wrong config
            raise UserError(f"cannot build {name}: {without_code(error)}", code="model.bad_config") from error
    if is_resized(clip.visual):  # open_clip builds timm's vision transformers at their own image size
        clip.visual.set_input_size(clip.visual.image_size)
    if double:
        clip = clip.double()
    if weights is not None:
        load_weights(clip, weights, name, config)
    return TwoTower(clip, name, config, tokenizer)

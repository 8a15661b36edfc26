"""Two towers put together: the open_clip config of any image tower with any text tower."""

from pathlib import Path
from typing import Any

from leanclip.errors import UserError
from leanclip.filesystem import read_json
from leanclip.models.config import ModelConfig
from leanclip.models.open_clip_api import HF_TEXT_MODELS, hub_file, model_config_of, timm_settings
from leanclip.models.towers.layers import unlocked_of_trunk

TIMM, HUGGING_FACE = "timm:", "hf:"
RESIZE_MODES = {"center": "shortest", "squash": "squash", "border": "longest"}  # timm's words and open_clip's
CONTEXT = 77  # at most: longer captions cost more and say little


def heads_only(config: ModelConfig) -> bool:
    """Whether only the projections behind both towers are trained."""
    return config.lock_image and config.lock_text and not _trains_trunk_layers(config)


def adapters_only(config: ModelConfig) -> bool:
    """Whether no trunk is trained, but adapters of one."""
    image, text = bool(config.lora_image), bool(config.lora_text)
    frozen = (image or config.lock_image) and (text or config.lock_text)
    return (image or text) and frozen and not _trains_trunk_layers(config)


def _trains_trunk_layers(config: ModelConfig) -> bool:
    """Whether a locked tower has trained layers before its projection."""
    image, text = config.lock_image_unlocked_groups, config.lock_text_unlocked_layers
    if not image and not text:
        return False
    assert config.model is not None
    _, base = model_config_of(config.model)
    towers = compose(config, base)[0] if config.composed else base
    return unlocked_of_trunk(towers["vision_cfg"], image) + unlocked_of_trunk(towers["text_cfg"], text) > 0


def compose(config: ModelConfig, base: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The config of the towers that are named, in place of those of `base`, and the preprocessing of the image tower.

    It is a CustomTextCLIP, whose parameter names do not depend on the kind of text tower.
    """
    activations = {"--model": base.get("quick_gelu", False)}
    parts, preprocess = {"vision_cfg": base["vision_cfg"], "text_cfg": base["text_cfg"]}, {}
    if config.image_tower is not None and config.image_tower.startswith(TIMM):
        parts["vision_cfg"], preprocess = _timm(config.image_tower.removeprefix(TIMM), config.head)
    elif config.image_tower is not None:
        _, named = model_config_of(config.image_tower)
        parts["vision_cfg"], activations["--image-tower"] = named["vision_cfg"], named.get("quick_gelu", False)
    if config.text_tower is not None and config.text_tower.startswith(HUGGING_FACE):
        parts["text_cfg"] = _hugging_face(config.text_tower.removeprefix(HUGGING_FACE), config.head)
    elif config.text_tower is not None:
        _, named = model_config_of(config.text_tower)
        parts["text_cfg"], activations["--text-tower"] = named["text_cfg"], named.get("quick_gelu", False)
    if config.image_tower is not None and config.text_tower is not None:
        del activations["--model"]
    if len(set(activations.values())) > 1:
        chosen = " and ".join(f"{flag} with{'' if quick else 'out'} QuickGELU" for flag, quick in activations.items())
        raise UserError(f"the towers use different activations: {chosen}", code="model.other_activation")
    options = {"custom_text": True} | ({"quick_gelu": True} if any(activations.values()) else {})
    return {"embed_dim": config.embed_dim or base["embed_dim"], **parts, **options}, preprocess


def _timm(name: str, head: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The size and the preprocessing are those that timm's weights were trained with."""
    settings = timm_settings(name)
    height, width = settings["input_size"][1:]
    vision = {
        "timm_model_name": name,
        "timm_model_pretrained": False,
        "timm_pool": "",  # timm's own
        "timm_proj": head,
        "image_size": height if height == width else [height, width],
    }
    preprocess = {
        "mean": list(settings["mean"]),
        "std": list(settings["std"]),
        "resize_mode": RESIZE_MODES.get(settings.get("crop_mode", ""), "shortest"),
    }
    interpolation = settings.get("interpolation")
    return vision, preprocess | ({"interpolation": interpolation} if interpolation in ("bicubic", "bilinear") else {})


def _hugging_face(source: str, head: str) -> dict[str, Any]:
    directory = Path(source)
    if directory.is_dir() or source.startswith((".", "/", "~")):
        directory = directory.expanduser().absolute()
        if not (directory / "config.json").is_file():
            raise UserError(f"no config.json in {directory}; --text-tower hf: takes the directory of a model of"
                            " transformers, or its name on the hub", code="model.config_not_found")  # fmt: skip
        source, path = str(directory), directory / "config.json"
    else:
        path = hub_file(source, "config.json")
    settings = read_json(path)
    kind = settings.get("model_type") if isinstance(settings, dict) else None
    if not isinstance(kind, str) or kind not in HF_TEXT_MODELS:
        raise UserError(
            f"{path} describes a model of type {kind!r}; open_clip takes {', '.join(sorted(HF_TEXT_MODELS))}",
            code="model.unsupported_text_tower",
        )
    positions = settings.get("max_position_embeddings", CONTEXT)
    return {
        "hf_model_name": source,
        "hf_model_pretrained": False,
        "hf_tokenizer_name": source,
        "hf_proj_type": head,
        "hf_pooler_type": "mean_pooler",
        "context_length": min(CONTEXT, positions) if isinstance(positions, int) else CONTEXT,
    }

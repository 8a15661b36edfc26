"""Checks of a model's configuration before anything is built: sizes that fit together and into memory."""

import math
import os
from collections.abc import Mapping
from typing import Any

from leanclip.errors import UserError

SIZES = {
    "embed_dim",
    "image_size",
    "patch_size",
    "width",
    "head_width",
    "heads",
    "layers",
    "context_length",
    "vocab_size",
}
MOST, MOST_OF = 1 << 17, {"layers": 1024, "vocab_size": 1 << 22}
FEWEST_OF = {"context_length": 3}
REALS = (
    "init_logit_scale",
    "init_logit_bias",
    "mlp_ratio",
    "ls_init_value",
    "patch_dropout",
    "timm_drop",
    "timm_drop_path",
)
SIDES, STAGES = {"image_size": 2, "patch_size": 2}, {"layers": 4}  # lists of so many; the stages are a ResNet's
PARTS = ("vision_cfg", "text_cfg", "multimodal_cfg")
BYTES = 4  # of a number


def check_sizes(config: Mapping[str, Any], name: str, *, in_memory: bool = True) -> None:
    """Refuse sizes that no model can have, or, with `in_memory`, that this machine cannot hold. What open_clip
    refuses by itself, such as heads that do not divide a width, is left to it."""

    def require(holds: bool, otherwise: str) -> None:
        if not holds:
            raise UserError(f"{name} cannot be built: {otherwise}", code="model.bad_config")

    for part in PARTS:
        require(isinstance(config.get(part, {}), Mapping), f"{part} is not an object")
    vision, resnet = config["vision_cfg"], _is_resnet(config["vision_cfg"])
    for part in (config, *(config[part] for part in PARTS if part in config)):
        lengths = SIDES | (STAGES if part is vision else {})
        for key in sorted((SIZES - {"patch_size"} if resnet else SIZES) & part.keys()):  # null in that of a ResNet
            several, fewest, most = isinstance(part[key], list | tuple), FEWEST_OF.get(key, 1), MOST_OF.get(key, MOST)
            require(not several or len(part[key]) == lengths.get(key), f"{key} is {_shown(part[key])}")
            for size in part[key] if several else [part[key]]:
                whole = f"{key} is {_shown(size)}; it must be a whole number from {fewest} to {most:,}"
                require(type(size) is int and fewest <= size <= most, whole)
        for key, value in ((key, part.get(key)) for key in REALS):
            finite = value is None or (isinstance(value, int | float) and abs(value) < 1e6)
            require(finite, f"{key} is {_shown(value)}; it must be a finite number")
    image = min(_sides(vision, "image_size", 224))
    if resnet:
        require(image >= 32, f"image_size is {image}; a ResNet needs at least 32")
    elif not vision.get("timm_model_name"):
        patch = max(_sides(vision, "patch_size", 16))
        require(patch <= image, f"patch_size is {patch}, more than the image_size {image}")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if in_memory and BYTES * (numbers := _numbers(config)) > memory:
        raise UserError(
            f"{name} has about {numbers / 1e9:,.1f} billion numbers, which need {BYTES * numbers / 2**30:,.0f} GiB;"
            f" this machine has {memory / 2**30:,.0f} GiB",
            code="model.too_large",
        )


def _is_resnet(vision: Mapping[str, Any]) -> bool:
    return isinstance(vision.get("layers"), list | tuple)


def _sides(vision: Mapping[str, Any], key: str, default: int) -> tuple[int, int]:
    """Height and width, which a configuration gives as one number or as two."""
    value = vision.get(key, default)
    return (value, value) if isinstance(value, int) else tuple(value)


def _numbers(config: Mapping[str, Any]) -> int:
    """About how many a model holds, without towers of timm and transformers, whose sizes these know."""
    vision, embedding, numbers = config["vision_cfg"], config["embed_dim"], 0
    if _is_resnet(vision):
        width = vision.get("width", 768)
        numbers = 4 * (32 * width) ** 2
        numbers += sum(count * 17 * (width * 2**stage) ** 2 for stage, count in enumerate(vision["layers"]))
    elif not vision.get("timm_model_name"):
        (height, width), (high, wide) = _sides(vision, "image_size", 224), _sides(vision, "patch_size", 16)
        tokens = (height // high) * (width // wide) + 1
        numbers = _transformer(vision, 768, tokens + 3 * high * wide + embedding)
    for text in (config[part] for part in PARTS[1:] if part in config):
        if not text.get("hf_model_name"):
            context = text.get("context_length", 77)
            # the mask of causal attention is a table, too
            numbers += _transformer(text, 512, text.get("vocab_size", 49408) + context + embedding) + context**2
    return numbers


def _transformer(part: Mapping[str, Any], default_width: int, rows: int) -> int:
    """Of its blocks, and of so many rows beside them."""
    width = part.get("width", default_width)
    return int(part.get("layers", 12) * width**2 * (4 + 2 * part.get("mlp_ratio", 4.0))) + width * rows


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:50]}..."


def check_preprocessing(preprocess: Mapping[str, Any], name: str) -> None:
    """Refuse means and deviations that would make every pixel nothing or infinite."""
    allowed = {"interpolation": ("bicubic", "bilinear", "random"), "resize_mode": ("shortest", "longest", "squash")}
    for key, values in allowed.items():
        if preprocess.get(key, values[0]) not in values:
            raise UserError(f"{name}: {key} must be one of {', '.join(values)}", code="model.bad_preprocessing")
    for key, least in (("mean", -math.inf), ("std", 0.0)):
        values = preprocess.get(key, (1.0, 1.0, 1.0))
        numbers = isinstance(values, list | tuple) and all(isinstance(value, int | float) for value in values)
        if not numbers or len(values) != 3 or not all(least < value < 1e6 for value in values):
            raise UserError(
                f"{name}: {key} must be three {'positive ' if key == 'std' else ''}finite numbers",
                code="model.bad_preprocessing",
            )

"""Checks of a model's configuration before anything is built: sizes that fit together and into memory."""

import math
import os
from collections.abc import Mapping
from typing import Any

from leanclip.errors import UserError

LARGEST = 1 << 17  # of widths, heads, context lengths and image sizes
DEEPEST = 1024  # layers
VOCABULARY = 1 << 22
FLOATS = ("mlp_ratio", "ls_init_value", "patch_dropout", "timm_drop", "timm_drop_path")
BYTES = 4  # of a number


def check_sizes(config: Mapping[str, Any], name: str, *, in_memory: bool = True) -> None:
    """Refuse sizes that no model can have, or, with `in_memory`, that this machine cannot hold."""
    check = _Check(name)
    embedding = check.integer(config, "embed_dim", None, LARGEST)
    for key in ("init_logit_scale", "init_logit_bias"):
        check.real(config, key)
    numbers = _vision(check, config["vision_cfg"], embedding)
    for part in ("text_cfg", "multimodal_cfg"):
        if part in config:
            numbers += _text(check, check.part(config, part), embedding)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if in_memory and BYTES * numbers > memory:
        raise UserError(
            f"{name} has about {numbers / 1e9:,.1f} billion numbers, which need {BYTES * numbers / 2**30:,.0f} GiB;"
            f" this machine has {memory / 2**30:,.0f} GiB",
            code="model.too_large",
        )


def _vision(check: "_Check", vision: Mapping[str, Any], embedding: int) -> int:
    height, width_pixels = check.sides(vision, "image_size", 224)
    if vision.get("timm_model_name"):
        return 0  # timm knows the sizes
    width = check.integer(vision, "width", 768, LARGEST)
    head = check.integer(vision, "head_width", 64, LARGEST)
    layers = vision.get("layers", 12)
    if isinstance(layers, list | tuple):
        stages = [check.integer({"layers": count}, "layers", None, DEEPEST) for count in layers]
        check.that(len(stages) == 4, f"layers has {len(stages)} entries; a ResNet has four stages")
        check.that(min(height, width_pixels) >= 32, f"image_size is {height}; a ResNet needs at least 32")
        check.heads(32 * width, 32 * width // head)
        return sum(count * 17 * (width * 2**stage) ** 2 for stage, count in enumerate(stages)) + 4 * (32 * width) ** 2
    high, wide = check.sides(vision, "patch_size", 16)
    check.that(high <= height and wide <= width_pixels, f"patch_size is {high}, more than the image_size {height}")
    check.heads(width, width // head)
    tokens = (height // high) * (width_pixels // wide) + 1
    return _transformer(check, vision, width) + width * (tokens + 3 * high * wide + embedding)


def _text(check: "_Check", text: Mapping[str, Any], embedding: int) -> int:
    context = check.integer(text, "context_length", 77, LARGEST, least=3)
    if text.get("hf_model_name"):
        return 0
    width = check.integer(text, "width", 512, LARGEST)
    vocabulary = check.integer(text, "vocab_size", 49408, VOCABULARY)
    check.heads(width, check.integer(text, "heads", 8, LARGEST))
    # the mask of causal attention is a table, too
    return _transformer(check, text, width) + width * (vocabulary + context + embedding) + context**2


def _transformer(check: "_Check", part: Mapping[str, Any], width: int) -> int:
    for key in FLOATS:
        check.real(part, key)
    ratio = part.get("mlp_ratio", 4.0)
    check.that(0 < ratio <= 1000, f"mlp_ratio is {ratio}")
    return int(check.integer(part, "layers", 12, DEEPEST) * width**2 * (4 + 2 * ratio))


class _Check:
    """Reads numbers of a configuration; refuses those that are none."""

    def __init__(self, name: str) -> None:
        self.name = name

    def that(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise UserError(f"{self.name} cannot be built: {otherwise}", code="model.bad_config")

    def part(self, config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
        self.that(isinstance(config[key], Mapping), f"{key} is not an object")
        return config[key]

    def integer(self, part: Mapping[str, Any], key: str, default: int | None, most: int, *, least: int = 1) -> int:
        value = part.get(key, default)
        valid = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
        self.that(valid, f"{key} is {_shown(value)}; it must be a whole number from {least} to {most:,}")
        return value

    def sides(self, part: Mapping[str, Any], key: str, default: int) -> tuple[int, int]:
        """Height and width, which a configuration gives as one number or as two."""
        value = part.get(key, default)
        sides = value if isinstance(value, list | tuple) and len(value) == 2 else (value, value)
        high, wide = (self.integer({key: side}, key, None, LARGEST) for side in sides)
        return high, wide

    def real(self, part: Mapping[str, Any], key: str) -> None:
        value = part.get(key)
        valid = value is None or (isinstance(value, int | float) and abs(value) < 1e6)
        self.that(valid, f"{key} is {_shown(value)}; it must be a finite number")

    def heads(self, width: int, heads: int) -> None:
        fits = heads > 0 and width % heads == 0
        self.that(fits, f"a width of {width} does not divide into {heads} attention heads")


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

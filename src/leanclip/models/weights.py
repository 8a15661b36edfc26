"""Weights of models and of single towers: which file --pretrained names, and how it is loaded."""

import difflib
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from leanclip.errors import UserError
from leanclip.models.config import ModelConfig
from leanclip.models.open_clip_api import (
    HUB,
    PreprocessCfg,
    bad_config,
    exported_config,
    hub_file,
    model_config_of,
    named_architecture,
    open_clip,
    reach_hub,
    read_object,
    timm_settings,
)
from leanclip.models.saved import CONFIG_FILE, WEIGHTS_FILE, find_weights
from leanclip.models.towers.layers import PROJECTION, Side
from leanclip.models.untrusted import check_weights, read_torch_file

PREPROCESS_FIELDS = {field.name for field in fields(PreprocessCfg)}
SHOWN = 3  # parameters in a message
FILES = (
    WEIGHTS_FILE,
    "model.safetensors",
    "open_clip_pytorch_model.bin",
    "pytorch_model.bin",
)  # of a tower, in a directory


def pretrained_weights(config: ModelConfig) -> tuple[Path | None, dict[str, Any]]:
    """The weights file that --pretrained names, and the preprocessing it was trained with, as far as recorded."""
    if config.pretrained is None:
        return None, {}
    if config.pretrained.startswith(HUB):
        return hub_file(config.pretrained), saved_preprocessing(hub_file(config.pretrained, CONFIG_FILE))
    path = Path(config.pretrained)
    if path.is_dir():
        if (directory := find_weights(path)) is not None:
            return directory / WEIGHTS_FILE, saved_preprocessing(directory / CONFIG_FILE)
        raise UserError(
            f"no weights in {path}: expected {WEIGHTS_FILE} there or in its checkpoints/last",
            code="weights.not_found",
        )
    if not path.is_file():
        return _downloaded(config, config.pretrained)
    described = architecture_of_file(path)
    return path, {} if described is None else saved_preprocessing(described)


def config_of_file(weights: Path) -> Path | None:
    """The file that holds the architecture of a weights file: itself, or one that was written beside it."""
    if weights.suffix == ".safetensors" and exported_config(weights) is not None:
        return weights
    beside = (weights.parent / CONFIG_FILE) if weights.name == WEIGHTS_FILE else weights.with_suffix(".json")
    return beside if beside.is_file() else None


def architecture_of_file(weights: Path) -> Path | None:
    """The same where it is an open_clip config: beside weights of others may lie a JSON file of another kind."""
    try:
        path = config_of_file(weights)
        if path is not None:
            model_config_of(str(path))
    except UserError:
        return None
    return path


def saved_preprocessing(path: Path) -> dict[str, Any]:
    saved = read_object(path).get("preprocess_cfg", {}) if path.is_file() else {}
    if not isinstance(saved, dict):
        raise bad_config(path, "its preprocess_cfg is not an object")
    return {key: value for key, value in saved.items() if key in PREPROCESS_FIELDS and key != "size"}


def _downloaded(config: ModelConfig, tag: str) -> tuple[Path, dict[str, Any]]:
    assert config.model is not None
    tags = open_clip.list_pretrained_tags_by_model(config.model)
    if tag not in tags:
        near = difflib.get_close_matches(tag, tags, n=3) or tags[:3]
        raise UserError(
            f"--pretrained {tag}: no such file, and no open_clip tag of {config.model}"
            + (f" (nearest: {', '.join(near)})" if near else " (it has none)"),
            code="weights.not_found",
        )
    settings = open_clip.get_pretrained_cfg(config.model, tag)
    quick_gelu = settings.get("quick_gelu", False)
    if quick_gelu != (model_config_of(config.model)[1].get("quick_gelu", False) or config.force_quick_gelu):
        model = f"{config.model}-quickgelu" if quick_gelu else config.model.removesuffix("-quickgelu")
        raise _other_activation(tag, quick_gelu, model)
    reach_hub()
    try:
        path = Path(open_clip.download_pretrained(settings))
    except Exception as error:  # of many types, with one remedy
        raise UserError(
            f"could not download {config.model} {tag} ({type(error).__name__}); "
            "download the weights by hand and give the file to --pretrained",
            code="weights.download_failed",
        ) from error
    return path, {key: value for key, value in settings.items() if key in PREPROCESS_FIELDS}


def load_weights(clip: Any, path: Path, name: str, config: dict[str, Any]) -> None:
    check_weights(path)
    saved = path.parent / CONFIG_FILE
    saved_config = model_config_of(str(saved))[1] if saved.is_file() else config
    quick_gelu = bool(saved_config.get("quick_gelu"))
    if quick_gelu != bool(config.get("quick_gelu")):  # the weights would load, and compute something else
        raise _other_activation(path, quick_gelu, named_architecture(saved, ()))
    try:
        open_clip.load_checkpoint(clip, str(path), weights_only=True)
    except Exception as error:  # of many types, with one remedy
        reason = some(_mismatches(str(error))) or " ".join(str(error).split())[:200] or type(error).__name__
        other = saved_config != config
        remedy = f"use --model {named_architecture(saved, ())}" if other else "give the --model that they belong to"
        raise UserError(
            f"{path} does not hold weights of {name} ({reason}); {remedy}", code="weights.other_model"
        ) from error


def some(differing: Sequence[str]) -> str:
    """The first few, and how many more."""
    more = f", and {len(differing) - SHOWN:,} more" if len(differing) > SHOWN else ""
    return "; ".join(differing[:SHOWN]) + more


def _mismatches(message: str) -> list[str]:
    """Which parameters differ, by torch's error: what it compared is the state dict that open_clip had converted."""
    shapes = re.findall(r"size mismatch for (\S+): .*?Size\(\[(.*?)\]\).*?Size\(\[(.*?)\]\)", message)
    differing = [f"{name} is ({saved}) in the file and ({own}) in the model" for name, saved, own in shapes]
    for kind, words in (("Missing", "is missing"), ("Unexpected", "is not in the model")):
        for names in re.findall(rf"{kind} key\(s\) in state_dict: (.*)", message):
            differing += [f"{name} {words}" for name in re.findall(r'"(.+?)"', names)]
    return differing


def _other_activation(weights: object, quick_gelu: bool, model: str) -> UserError:
    trained = f"{weights} was trained with{'' if quick_gelu else 'out'} QuickGELU"
    return UserError(f"{trained}; use --model {model}", code="weights.other_activation")


def interpolate(start: Mapping[str, Tensor], end: Mapping[str, Tensor], weight: float) -> dict[str, Tensor]:
    """(1 - weight) start + weight end, and exactly one of them at 0 and 1.

    The log of the temperature and the statistics of batch norms are interpolated likewise; whole numbers, such as the
    batches that these have counted, are the end's.
    """
    shapes = [{name: tuple(value.shape) for name, value in weights.items()} for weights in (start, end)]
    differing = sorted(name for name, _ in shapes[0].items() ^ shapes[1].items())
    if differing:
        name = differing[0]
        raise UserError(
            f"weights of different architectures cannot be interpolated: {name} is {shapes[0].get(name, 'absent')} at"
            f" the start and {shapes[1].get(name, 'absent')} at the end ({len(set(differing))} parameters differ)",
            code="interpolate.other_model",
        )
    if weight in (0, 1):
        return dict(end if weight else start)
    return {
        name: start[name].lerp(value, weight) if value.is_floating_point() else value for name, value in end.items()
    }


def with_temperature(weights: dict[str, Tensor], tau: Tensor, bias: Tensor | None) -> dict[str, Tensor]:
    """An open_clip state dict with the loss's temperature and bias in it."""
    scale = weights["logit_scale"]
    filled = {"logit_scale": tau.log().neg().to(scale.dtype).expand_as(scale).clone()}
    if "logit_bias" in weights:
        filled["logit_bias"] = (torch.zeros(()) if bias is None else bias).to(scale.dtype).expand_as(scale).clone()
    return weights | filled


def load_tower(clip: Any, side: Side, source: str) -> bool:
    """Load weights into the trunk of a tower, and into its projection where the file has one; True if it has none."""
    path = _tower_file(source)
    check_weights(path)
    content: Any = open_clip.factory.load_state_dict(str(path), weights_only=True)
    weights: dict[str, Tensor] = {name: value for name, value in content.items() if isinstance(value, Tensor)}
    # The text tower of open_clip's plain CLIP lies in the model itself, beside `visual`.
    tower = clip.visual if side == "image" else getattr(clip, "text", clip)
    prefix = "visual." if side == "image" else "text."
    if any(name.startswith("visual.") for name in weights):  # a whole CLIP model
        if side == "text" and not any(name.startswith("text.") for name in weights):  # one without a text module
            weights = {f"text.{name}": value for name, value in weights.items() if not name.startswith("visual.")}
        target, weights = tower, {n.removeprefix(prefix): v for n, v in weights.items() if n.startswith(prefix)}
        weights = {name: value for name, value in weights.items() if not name.startswith("logit_")}
        optional = {name for name, _ in tower.named_parameters() if PROJECTION.match(prefix + name)}
    elif side == "image" and hasattr(tower, "trunk"):
        target, weights, optional = tower.trunk, _timm(tower.trunk, weights), set()
    elif side == "text" and hasattr(tower, "pooler"):
        target, weights, optional = tower.transformer, _hugging_face(tower.transformer, weights), set()
    else:
        target, optional = tower, {name for name, _ in tower.named_parameters() if PROJECTION.match(prefix + name)}
    _check_tower(target, weights, optional, path, side)
    target.load_state_dict(weights, strict=False)
    return target is not tower or not optional <= weights.keys()


def new_projections(config: ModelConfig) -> bool:
    """Whether a projection starts random though a tower has weights: of towers named one by one, of a tower without
    weights, and behind one whose weights are those of the tower alone."""
    if config.pretrained is not None:
        return False
    sides: dict[Side, str | None] = {"image": config.pretrained_image, "text": config.pretrained_text}
    return config.composed or not all(source and _has_projection(side, source) for side, source in sides.items())


def _has_projection(side: Side, source: str) -> bool:
    """By the names in a file. What is not here yet is not downloaded for this: mostly such weights are of the tower
    alone."""
    if not Path(source).expanduser().exists():
        return False
    path = _tower_file(source)
    check_weights(path)
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            names = [*file.keys()]
    else:
        content = read_torch_file(path, mapped=True)
        names = [name.removeprefix("module.") for name in content.get("state_dict", content)]
    projection = ("proj", "attnpool.c_proj.") if side == "image" else ("text_projection",)
    whole = any(name.startswith("visual.") for name in names)
    return whole or any(name.startswith(projection) for name in names)


def _tower_file(source: str) -> Path:
    """A file, a directory with one, `timm:NAME`, or a model on the hub."""
    path = Path(source).expanduser()
    if path.is_dir():
        file = next((path / name for name in FILES if (path / name).is_file()), None)
        if file is None:
            raise UserError(f"no weights in {path}: expected one of {', '.join(FILES)}", code="weights.not_found")
        return file
    if path.is_file():
        return path
    if source.startswith("timm:"):
        hub = timm_settings(source.removeprefix("timm:")).get("hf_hub_id")
        if not hub:
            raise UserError(f"timm has no weights of {source}", code="weights.not_found")
        return hub_file(hub, "model.safetensors")
    if source.startswith(HUB) or source.count("/") == 1:
        return hub_file(source, "model.safetensors")
    raise UserError(
        f"no such weights: {source}; give a file, a directory, timm:NAME or hf-hub:ORG/NAME", code="weights.not_found"
    )


def _timm(trunk: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the classifier; timm's own filter resizes position embeddings."""
    settings: Mapping[str, Any] = getattr(trunk, "pretrained_cfg", {})
    classifier = settings.get("classifier") or ()
    names = (classifier,) if isinstance(classifier, str) else tuple(classifier)
    prefixes = tuple(f"{name}." for name in names)
    convert = getattr(sys.modules[type(trunk).__module__], "checkpoint_filter_fn", None)
    if convert is not None:
        weights = convert(weights, trunk)
    return {name: value for name, value in weights.items() if not name.startswith(prefixes)}


def _hugging_face(transformer: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the heads of other tasks, and without the name of the model in front."""
    prefix = f"{transformer.base_model_prefix}."
    if any(name.startswith(prefix) for name in weights):
        weights = {name.removeprefix(prefix): v for name, v in weights.items() if name.startswith(prefix)}
    known = transformer.state_dict()
    unused = ("pooler.", "embeddings.position_ids")
    return {name: value for name, value in weights.items() if name in known or not name.startswith(unused)}


def _check_tower(target: nn.Module, weights: dict[str, Tensor], optional: set[str], path: Path, side: Side) -> None:
    """Refuse weights of another architecture, and say which parameters differ."""
    shapes = {
        name: tuple(value.shape)
        for name, value in target.state_dict().items()
        if not (hasattr(target, "visual") and name.startswith(("visual.", "logit_")))  # a plain CLIP's text tower
    }
    differing = [
        f"{name} is {tuple(weights[name].shape)} in the file and {shape} in the tower"
        for name, shape in shapes.items()
        if name in weights and tuple(weights[name].shape) != shape
    ]
    differing += [f"{name} is missing" for name in shapes if name not in weights and name not in optional]
    differing += [f"{name} is not in the tower" for name in weights if name not in shapes]
    if differing:
        raise UserError(
            f"{path} does not hold weights of this {side} tower: {some(differing)}", code="weights.other_model"
        )

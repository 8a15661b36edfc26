"""Weights of open_clip models: which file --pretrained names, and how it is loaded."""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
)
from leanclip.models.saved import CONFIG_FILE, WEIGHTS_FILE, find_weights
from leanclip.models.untrusted import check_weights

PREPROCESS_FIELDS = {field.name for field in fields(PreprocessCfg)}
SHOWN = 3  # parameters in a message


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

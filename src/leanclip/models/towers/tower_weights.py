"""Weights of one tower: of timm, of transformers, or the tower's part of a whole CLIP model."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from leanclip.errors import UserError
from leanclip.models.open_clip_api import HUB, hub_file, open_clip, timm_settings
from leanclip.models.saved import WEIGHTS_FILE
from leanclip.models.towers.layers import PROJECTION, Side
from leanclip.models.untrusted import check_weights
from leanclip.models.weights import some

FILES = (WEIGHTS_FILE, "model.safetensors", "open_clip_pytorch_model.bin", "pytorch_model.bin")


def load_tower(clip: Any, side: Side, source: str) -> bool:
    """Load weights into the trunk of a tower, and into its projection where the file has one; True if it has none."""
    path = _find(source)
    check_weights(path)
    content: Any = open_clip.factory.load_state_dict(str(path), weights_only=True)
    weights: dict[str, Tensor] = {name: value for name, value in content.items() if isinstance(value, Tensor)}
    tower = clip.visual if side == "image" else clip.text
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
    _check(target, weights, optional, path, side)
    target.load_state_dict(weights, strict=False)
    return target is not tower or not optional <= weights.keys()


def _find(source: str) -> Path:
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


def _check(target: nn.Module, weights: dict[str, Tensor], optional: set[str], path: Path, side: Side) -> None:
    """Refuse weights of another architecture, and say which parameters differ."""
    shapes = {name: tuple(value.shape) for name, value in target.state_dict().items()}
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

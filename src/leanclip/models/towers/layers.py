"""The layers of a tower, first to last: what is locked, and what a summary of a run says about it."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from leanclip.models.open_clip_api import timm_layers

Side = Literal["image", "text"]
BLOCK = re.compile(r"\b(?:resblocks|layers?|blocks?|h)\.\d+\.|\blayer\d+\.\d+\.")  # the latter in CLIP's ResNets
PROJECTION = re.compile(r"(visual\.(proj$|head\.|attnpool\.c_proj\.)|(text\.)?text_projection|text\.proj\.)")


@dataclass(frozen=True)
class TowerLayers:
    """Parameter names of a tower: of the layers of its trunk, first to last, and of its projection."""

    trunk: list[list[str]]
    projection: list[str]


def tower_layers(clip: Any, side: Side) -> TowerLayers:
    names = [name for name, _ in clip.named_parameters() if side_of(name) == side]
    classifier = _classifier(clip.visual) if side == "image" else None
    projection = [name for name in names if PROJECTION.match(name) or (classifier and name.startswith(classifier))]
    trunk = [name for name in names if name not in projection]
    if side == "image" and hasattr(clip.visual, "trunk"):
        groups = timm_layers(clip.visual.trunk)
        layers = [[f"visual.trunk.{name}" for name in group] for group in groups]
        return TowerLayers([[name for name in layer if name in trunk] for layer in layers], projection)
    return TowerLayers(_by_block(trunk), projection)


def side_of(name: str) -> str | None:
    """A CoCa model's decoder and the temperature belong to neither."""
    if name.startswith(("text_decoder.", "logit_")):
        return None
    return "image" if name.startswith("visual.") else "text"


def _classifier(visual: Any) -> str | None:
    """timm's classifier, where open_clip uses it as the projection."""
    trunk = getattr(visual, "trunk", None)
    if trunk is None or len(visual.head):
        return None
    return f"visual.trunk.{trunk.default_cfg.get('classifier')}."


def _by_block(names: list[str]) -> list[list[str]]:
    """Embeddings and what comes before the blocks, the blocks one by one; what comes after joins the last."""
    blocks = [match.group() if (match := BLOCK.search(name)) else None for name in names]
    order = list(dict.fromkeys(block for block in blocks if block is not None))
    layers: list[list[str]] = [[] for _ in range(len(order) + 1)]
    begun = False
    for name, block in zip(names, blocks, strict=True):
        begun = begun or block is not None
        outside = 0 if not begun or "embed" in name else -1
        layers[outside if block is None else order.index(block) + 1].append(name)
    return layers


def layer_rates(
    clip: Any, *, base: float, image: float | None, text: float | None, head: float | None, decay: float
) -> dict[str, float]:
    """Learning rates by parameter name, of those that differ from `base`: the last layer of a trunk has that of its
    tower, each layer before it a share of that of the layer after it."""
    rates: dict[str, float] = {}
    towers: dict[Side, float | None] = {"image": image, "text": text}
    for side, rate in towers.items():
        layers = tower_layers(clip, side)
        rates |= dict.fromkeys(layers.projection, base if head is None else head)
        for distance, names in enumerate(reversed(layers.trunk)):
            rates |= dict.fromkeys(names, (base if rate is None else rate) * decay**distance)
    return {name: rate for name, rate in rates.items() if rate != base}


def unlocked_of_trunk(tower: Mapping[str, Any], unlocked: int) -> int:
    """How many layers of the trunk are among the last of a tower with this config, counted as open_clip does: the
    projection is the last layer of its own transformers."""
    other = tower.get("timm_model_name") or tower.get("hf_model_name") or isinstance(tower.get("layers"), list)
    return unlocked if other else max(0, unlocked - 1)


def lock(clip: Any, side: Side, unlocked: int) -> None:
    """Freeze the trunk of a tower except its last layers. Its projection stays trained."""
    trunk = tower_layers(clip, side).trunk
    for name in (name for layer in trunk[: max(0, len(trunk) - unlocked)] for name in layer):
        clip.get_parameter(name).requires_grad_(False)


def roots(clip: Any, side: Side) -> list[nn.Module]:
    """The modules that make up a tower."""
    if side == "image" or hasattr(clip, "text"):
        return [clip.visual if side == "image" else clip.text]
    return [clip.transformer, clip.token_embedding, clip.ln_final]


def train_unfrozen(modules: Iterable[nn.Module], mode: bool) -> None:
    """Modules with frozen parameters run as in evaluation: no dropout, batch norm by its running averages."""
    for module in modules:
        frozen = [not parameter.requires_grad for parameter in module.parameters()]
        if any(frozen) or not frozen:
            module.training = False
            train_unfrozen(module.children(), mode)
        else:
            module.train(mode)


@dataclass(frozen=True, kw_only=True)
class TowerSummary:
    """What a run trains of a tower, and what it starts from."""

    side: Side
    weights: str | None  # where they come from; None if they are random
    parameters: int
    trained: int  # parameters
    layers: int  # of the trunk
    frozen_layers: int
    projection: bool  # whether the tower ends in one, which is trained
    new_projection: bool = False  # without weights, behind a tower with weights
    rank: int = 0  # of its adapters
    fixed_norms: bool = False  # whether its batch norms keep their averages, though it is trained

    def __str__(self) -> str:
        start = f"weights from {self.weights}" if self.weights else "random weights"
        start += " and a new projection" if self.new_projection else ""
        trained = f"{_millions(self.trained)} of {_millions(self.parameters)} parameters trained"
        line = f"{self.side} tower: {start}, {trained}{', batch norms fixed' if self.fixed_norms else ''}"
        if self.rank:
            return f"{line}: adapters of rank {self.rank}{' and its projection' if self.projection else ''}"
        if not self.frozen_layers:
            return line
        every = self.frozen_layers == self.layers
        frozen = (
            f"all {self.layers} layers frozen" if every else f"{self.frozen_layers} of {self.layers} layers frozen"
        )
        return f"{line}, {frozen}{', its projection trained' if self.projection else ''}"


def summarise(
    clip: Any, side: Side, weights: str | None, rank: int = 0, *, new: bool = False, fixed_norms: bool = False
) -> TowerSummary:
    layers = tower_layers(clip, side)
    names = [*layers.projection, *(name for layer in layers.trunk for name in layer)]
    sizes = {name: clip.get_parameter(name).numel() for name in names}
    trained = {name for name in names if clip.get_parameter(name).requires_grad}
    return TowerSummary(
        side=side,
        weights=weights,
        parameters=sum(sizes.values()),
        trained=sum(sizes[name] for name in trained),
        layers=len(layers.trunk),
        frozen_layers=sum(not trained & set(layer) for layer in layers.trunk),
        projection=bool(layers.projection),
        new_projection=new and bool(layers.projection),
        rank=rank,
        fixed_norms=fixed_norms,
    )


def _millions(number: int) -> str:
    return f"{number / 1e6:.1f} M" if number >= 1e6 else f"{number:,}"

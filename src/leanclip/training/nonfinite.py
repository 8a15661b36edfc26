"""Steps whose loss or gradient is not finite: how many in a row are borne, and what is written down then.

The step itself skips them, on all ranks alike. Here it is decided when to go back to the last checkpoint, which helps
against a fault that passes, and when to stop, because it came again.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor

from leanclip.data import Batch
from leanclip.distributed import local_tensor
from leanclip.errors import UserError
from leanclip.filesystem import write_atomically
from leanclip.training.step_context import StepContext

Verdict = Literal["go on", "reload", "stop"]


class NotFiniteError(UserError):
    """Training stopped because its numbers are no numbers any more."""

    exit_code = 4


class BadSteps:
    """Counts steps that were skipped. `limit` of them in a row are too many: the first time that means going back to
    the last checkpoint, where there is one, the second time stopping.

    An fp16 gradient that overflows only because of the loss scale does not count as long as the scale can be lowered:
    that is how the scale finds its value.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_a_row = 0
        self.reloaded = False

    def __call__(self, *, skipped: bool, excused: bool) -> Verdict:
        """What to do after a step. `excused`: skipped for no worse reason than the loss scale."""
        if not excused:
            self.in_a_row = self.in_a_row + 1 if skipped else 0
        if self.in_a_row < self.limit:
            return "go on"
        self.in_a_row = 0
        if self.reloaded:
            return "stop"
        self.reloaded = True
        return "reload"


@torch.no_grad()
def gradient_norms(context: StepContext) -> dict[str, float]:
    """The norm of every parameter's gradient, by its name. All ranks call it together; waits for the device."""
    named = [*context.towers.named_parameters(), *context.loss.named_parameters(prefix="loss")]
    found = {name.removeprefix("module.").removeprefix("clip."): p.grad for name, p in named if p.grad is not None}
    if not found:
        return {}
    squares = torch.stack([
        torch.linalg.vector_norm(local_tensor(gradient), dtype=torch.float64).square() for gradient in found.values()
    ])  # fmt: skip
    if any(split := [isinstance(gradient, DTensor) for gradient in found.values()]):
        mask = torch.tensor(split, device=squares.device)
        everyones = context.ranks.sum(torch.where(mask, squares, 0.0), purpose="diagnosis")
        squares = torch.where(mask, everyones, squares)
    return dict(zip(found, squares.sqrt().tolist(), strict=True))


def diagnosis(
    context: StepContext, batch: Batch, norms: Mapping[str, float], facts: Mapping[str, Any]
) -> dict[str, Any]:
    """What there is to know about a step that went wrong. All ranks call it together; all get the same."""
    towers: dict[str, dict[str, Any]] = {}
    for name, norm in norms.items():
        tower = towers.setdefault(_tower(name), {"gradient_norm": 0.0, "parameters": 0, "not_finite": []})
        tower["gradient_norm"] = math.hypot(tower["gradient_norm"], norm)
        tower["parameters"] += 1
        if not math.isfinite(norm):
            tower["not_finite"].append(name)
    return {
        **facts,
        "gradients": towers,
        "weights_not_finite": _broken_weights(context),
        "sample_ids": context.ranks.all_gather_objects(batch.sample_ids.tolist()),
        "gradient_norms": dict(norms),
    }


def write_diagnosis(path: Path, found: Mapping[str, Any]) -> None:
    """As JSON, which has no word for numbers that are none: they stand there as "nan", "inf" and "-inf"."""
    write_atomically(path, json.dumps(_spelled(found), indent=1, allow_nan=False))


def advice(found: Mapping[str, Any]) -> str:
    """What the user can do, by what is broken."""
    if found["weights_not_finite"]:
        return "weights are broken already: resume from an earlier checkpoint, with a lower --lr"
    return "lower --lr, set --grad-clip-norm 1, or look at the samples whose ids stand there"


@torch.no_grad()
def _broken_weights(context: StepContext) -> list[str]:
    """Parameters and batch-norm statistics that hold something that is no number."""
    values = {**context.towers.state_dict(), **{f"loss.{n}": p for n, p in context.loss.named_parameters()}}
    values = {name: value for name, value in values.items() if value.is_floating_point()}
    own = torch.stack([(~local_tensor(value).isfinite()).any() for value in values.values()]).to(torch.int32)
    broken = context.ranks.sum(own, purpose="diagnosis").tolist()
    return [name.removeprefix("module.").removeprefix("clip.") for name, n in zip(values, broken, strict=True) if n]


def _tower(name: str) -> str:
    if name.startswith("loss."):
        return "temperature"
    return "image tower" if name.startswith("visual.") else "text tower"


def _spelled(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _spelled(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_spelled(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value

"""Steps whose loss or gradient is not finite: when to reload a checkpoint, when to stop, and the diagnosis.

The step skips them, on all ranks. Reloading helps against a transient fault; a second series of them ends the run.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor

from leanclip.data import Batch
from leanclip.distributed import local_tensor
from leanclip.errors import UserError
from leanclip.training.step_context import StepContext

Verdict = Literal["continue", "reload", "stop"]


class NotFiniteError(UserError):
    """Training stopped, because too many steps in a row were not finite."""

    exit_code = 4


class NonFiniteSteps:
    """Counts skipped steps. The first `limit` in a row reload the last checkpoint, the second stop the run.

    An fp16 gradient that overflows does not count as long as the loss scale can be lowered: the scale is adjusted so.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_a_row = 0
        self.reloaded = False

    def __call__(self, *, skipped: bool, excused: bool) -> Verdict:
        """What to do after a step. `excused`: skipped because of the loss scale."""
        if not excused:
            self.in_a_row = self.in_a_row + 1 if skipped else 0
        if self.in_a_row < self.limit:
            return "continue"
        self.in_a_row = 0
        if self.reloaded:
            return "stop"
        self.reloaded = True
        return "reload"


@torch.no_grad()
def gradient_norms(context: StepContext) -> dict[str, float]:
    """The norm of the gradient of every parameter, by name. All ranks call it together; waits for the device."""
    named = [*context.towers.named_parameters(), *context.loss.named_parameters(prefix="loss")]
    gradients = {
        name.removeprefix("module.").removeprefix("clip."): p.grad for name, p in named if p.grad is not None
    }
    if not gradients:
        return {}
    norms = [torch.linalg.vector_norm(local_tensor(value), dtype=torch.float64) for value in gradients.values()]
    squares = torch.stack(norms).square()
    if any(split := [isinstance(gradient, DTensor) for gradient in gradients.values()]):
        mask = torch.tensor(split, device=squares.device)
        sums = context.ranks.sum(torch.where(mask, squares, 0.0), purpose="diagnosis")
        squares = torch.where(mask, sums, squares)
    return dict(zip(gradients, squares.sqrt().tolist(), strict=True))


def diagnosis(
    context: StepContext, batch: Batch, norms: Mapping[str, float], facts: Mapping[str, Any]
) -> dict[str, Any]:
    """The facts about a non-finite step. All ranks call it together and get the same."""
    towers = defaultdict[str, dict[str, float]](dict)
    for name, norm in norms.items():
        towers[_tower(name)][name] = norm
    return {
        **facts,
        "gradients": {
            tower: {
                "gradient_norm": math.hypot(*part.values()),
                "parameters": len(part),
                "not_finite": [name for name, norm in part.items() if not math.isfinite(norm)],
            }
            for tower, part in towers.items()
        },
        "weights_not_finite": _nonfinite_weights(context),
        "sample_ids": context.ranks.all_gather_objects(batch.sample_ids.tolist()),
        "gradient_norms": dict(norms),
    }


def advice(facts: Mapping[str, Any]) -> str:
    if facts["weights_not_finite"]:
        return "weights are not finite: resume from an earlier checkpoint, with a lower --lr"
    return "lower --lr, set --grad-clip-norm 1, or check the samples whose ids the diagnosis lists"


@torch.no_grad()
def _nonfinite_weights(context: StepContext) -> list[str]:
    """Parameters and batch-norm statistics with values that are not finite."""
    values = {**context.towers.state_dict(), **{f"loss.{n}": p for n, p in context.loss.named_parameters()}}
    values = {name: value for name, value in values.items() if value.is_floating_point()}
    counts = torch.stack([(~local_tensor(value).isfinite()).any() for value in values.values()]).to(torch.int32)
    broken = context.ranks.sum(counts, purpose="diagnosis").tolist()
    return [name.removeprefix("module.").removeprefix("clip.") for name, n in zip(values, broken, strict=True) if n]


def _tower(name: str) -> str:
    if name.startswith("loss."):
        return "temperature"
    return "image tower" if name.startswith("visual.") else "text tower"

"""One training step. It reads like the algorithm; everything else is elsewhere."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from leanclip.data import Batch
from leanclip.losses import ContrastiveLoss
from leanclip.models import TwoTower


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Everything stays on the device: reading a value waits for it."""

    loss: Tensor
    grad_norm: Tensor
    skipped: bool  # because a gradient was not finite
    metrics: Mapping[str, Tensor | float | str]


def training_step(
    model: TwoTower,
    loss: ContrastiveLoss,
    optimizer: Optimizer,
    batch: Batch,
    *,
    autocast: torch.autocast,
    grad_clip_norm: float | None,
) -> StepResult:
    """Embed both sides, compute the loss and its gradients, take one optimizer step."""
    with autocast:
        image, text = model(batch.images, batch.tokens)
        output = loss(image, text, batch.sample_ids)
    output.loss.backward()

    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip_norm or torch.inf)
    own = [parameter.grad for parameter in loss.parameters() if parameter.grad is not None]
    finite = bool(torch.isfinite(sum(own, grad_norm)))  # the one place where a step waits for the device
    if finite:
        optimizer.step()
    else:
        loss.rollback()
    optimizer.zero_grad(set_to_none=True)
    return StepResult(loss=output.loss.detach(), grad_norm=grad_norm, skipped=not finite, metrics=output.metrics)

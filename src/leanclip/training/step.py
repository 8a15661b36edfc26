"""One training step. It reads like the algorithm; everything else is elsewhere."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from leanclip.data import Batch
from leanclip.distributed import full_tensor
from leanclip.losses import LossOutput
from leanclip.training.gradient_caching import cached
from leanclip.training.nonfinite import gradient_norms
from leanclip.training.step_context import Pieces

ADDED = 1e-6  # to the norm by torch's clipping, which multiplies by 1 where the sum is below the limit


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Everything stays on the device: reading a value waits for it."""

    loss: Tensor
    grad_norm: Tensor
    skipped: bool  # because the loss or a gradient was not finite
    metrics: Mapping[str, Tensor | float | str]
    gradient_norms: Mapping[str, float] = field(default_factory=dict)  # by parameter, of a skipped step


def training_step(pieces: Pieces, batch: Batch) -> StepResult:
    """Embed both sides, compute the loss and its gradients, take one optimizer step."""
    loss, optimizer, scale = pieces.loss, pieces.optimizer, pieces.scale
    pieces.norms.remember()
    output = loss_and_gradients(pieces, batch)

    scale.remove([*pieces.parameters, *loss.parameters()])
    gradients = [parameter.grad for parameter in pieces.parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    grad_norm = full_tensor(norm)
    own = [parameter.grad for parameter in loss.parameters() if parameter.grad is not None]
    value = output.loss.detach()
    asked = [torch.isfinite(sum(own, grad_norm) + value)]
    if pieces.grad_clip_norm:
        asked.append(grad_norm + ADDED > pieces.grad_clip_norm)
    # The one place where a step waits for the device. All ranks have the same loss and norm, so all decide alike.
    finite, *large = torch.stack(asked).tolist()
    norms: Mapping[str, float] = {}
    if finite:
        if pieces.grad_clip_norm and any(large):
            torch.nn.utils.clip_grads_with_norm_(pieces.parameters, pieces.grad_clip_norm, norm)
        optimizer.step()
        pieces.norms.average(pieces.ranks)
    else:
        norms = gradient_norms(pieces)
        loss.rollback()
        pieces.norms.restore()
    scale.update(finite)
    optimizer.zero_grad(set_to_none=True)
    return StepResult(
        loss=value, grad_norm=grad_norm, skipped=not finite, metrics=output.metrics, gradient_norms=norms
    )


def loss_and_gradients(pieces: Pieces, batch: Batch) -> LossOutput:
    """Of the batch at once, of its micro-batches, or replayed from a recording."""
    if pieces.parts > 1:
        return cached(pieces, batch)
    recorded = None if pieces.recorder is None else pieces.recorder(pieces, batch)
    return direct(pieces, batch) if recorded is None else recorded.replay(pieces)


def direct(pieces: Pieces, batch: Batch) -> LossOutput:
    """Loss and gradients of a batch at once. The images' embeddings travel while the texts' are computed."""
    send = partial(pieces.loss.send_ahead, global_batch=pieces.batch)
    with pieces.autocast:
        image, text = pieces.towers(batch.images, pieces.texts(batch.tokens, batch.lengths), send)
        output = pieces.loss(image, text, batch.sample_ids, global_batch=pieces.batch)
    pieces.scale.apply(output.loss).backward()
    return output

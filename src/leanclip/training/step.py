"""One training step. It reads like the algorithm; everything else is elsewhere."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from leanclip.data import Batch
from leanclip.distributed import whole
from leanclip.losses import LossOutput
from leanclip.training.micro_batch import cached
from leanclip.training.pieces import Pieces
from leanclip.training.recorded import recorded


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Everything stays on the device: reading a value waits for it."""

    loss: Tensor
    grad_norm: Tensor
    skipped: bool  # because a gradient was not finite
    metrics: Mapping[str, Tensor | float | str]


def training_step(pieces: Pieces, batch: Batch) -> StepResult:
    """Embed both sides, compute the loss and its gradients, take one optimizer step."""
    loss, optimizer, scale = pieces.loss, pieces.optimizer, pieces.scale
    pieces.norms.remember()
    output = loss_and_gradients(pieces, batch)

    scale.remove([*pieces.towers.parameters(), *loss.parameters()])
    grad_norm = torch.nn.utils.clip_grad_norm_(pieces.towers.parameters(), pieces.grad_clip_norm or torch.inf)
    grad_norm = whole(grad_norm)
    own = [parameter.grad for parameter in loss.parameters() if parameter.grad is not None]
    finite = bool(torch.isfinite(sum(own, grad_norm)))  # the one place where a step waits for the device
    if finite:
        optimizer.step()
        pieces.norms.average(pieces.ranks)
    else:
        loss.rollback()
        pieces.norms.restore()
    scale.update(finite)
    optimizer.zero_grad(set_to_none=True)
    return StepResult(loss=output.loss.detach(), grad_norm=grad_norm, skipped=not finite, metrics=output.metrics)


def loss_and_gradients(pieces: Pieces, batch: Batch) -> LossOutput:
    """Of the batch at once, of its micro-batches, or with the towers replayed from a recording."""
    if pieces.parts > 1:
        return cached(pieces, batch)
    towers = None if pieces.recorder is None else pieces.recorder(batch)
    return direct(pieces, batch) if towers is None else recorded(pieces, batch, towers)


def direct(pieces: Pieces, batch: Batch) -> LossOutput:
    """Loss and gradients of a batch at once. The images' embeddings travel while the texts' are computed."""
    send = partial(pieces.loss.send_ahead, global_batch=pieces.batch)
    with pieces.autocast:
        image, text = pieces.towers(batch.images, pieces.texts(batch.tokens, batch.lengths), send)
        output = pieces.loss(image, text, batch.sample_ids, global_batch=pieces.batch)
    pieces.scale.apply(output.loss).backward()
    return output

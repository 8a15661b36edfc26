"""Gradient caching: the gradients of a large batch with the memory of a small one, exact for every loss.

1. Embed the micro-batches without keeping activations.
2. Compute the loss of all embeddings and its gradients, once: the estimators are updated once.
3. Embed each micro-batch again, now with activations and the same random numbers (dropout), and propagate its share
   of the gradients to the weights.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leanclip.data import Batch
from leanclip.distributed import gradient_sync
from leanclip.losses import LossOutput
from leanclip.training.step_context import StepContext


def cached(context: StepContext, batch: Batch) -> LossOutput:
    """Loss and gradients of a batch in `context.micro_batches` micro-batches."""
    parts = batch.split(context.micro_batches)
    device = batch.images.device
    inputs = [(part.images, part.captions) for part in parts]
    states, embeddings = [], []
    with torch.no_grad(), context.autocast:
        for micro_batch in context.norms.as_one_update(inputs):
            states.append(RandomState.now(device))
            embeddings.append(_embed(context, micro_batch))
    image, text = (torch.cat(side).requires_grad_() for side in zip(*embeddings, strict=True))

    context.phase("loss")
    with context.autocast:
        output = context.loss_of(image, text, batch)
    context.scale.apply(output.loss).backward()
    assert image.grad is not None and text.grad is not None

    sizes = [len(part) for part in parts]
    gradients = zip(image.grad.split(sizes), text.grad.split(sizes), strict=True)
    with context.norms.frozen():
        for number, (micro_batch, state, gradient) in enumerate(zip(inputs, states, gradients, strict=True), 1):
            state.restore(device)
            with gradient_sync(context.towers, number == len(parts)):
                with context.autocast:
                    pair = _embed(context, micro_batch)
                context.phase("backward")
                propagate(pair, gradient)
    return output


def _embed(context: StepContext, micro_batch: tuple[Tensor, Any]) -> tuple[Tensor, Tensor]:
    context.phase("image tower")
    return context.towers(*micro_batch, lambda _: context.phase("text tower"))


def propagate(embeddings: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """From the embeddings of both towers, of which one may be frozen, to the weights."""
    trained = [(side, grad) for side, grad in zip(embeddings, gradients, strict=True) if side.requires_grad]
    torch.autograd.backward([side for side, _ in trained], [grad for _, grad in trained])


class RandomState(NamedTuple):
    """Of the generators that a forward pass may draw from."""

    host: Tensor
    device: Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> "RandomState":
        return cls(torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None)

    def restore(self, device: torch.device) -> None:
        torch.set_rng_state(self.host)
        if self.device is not None:
            torch.cuda.set_rng_state(self.device, device)

"""Gradient caching: the gradients of a large batch with the memory of a small one, exact for every loss.

The micro-batches are embedded without keeping activations, the loss sees all embeddings and gives their gradients,
and each micro-batch is embedded again, now with activations, to carry its part of them to the weights. Random numbers
are replayed, so that dropout drops the same; the loss, and with it the estimators, is called once.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from leanclip.data import Batch
from leanclip.distributed import gradient_sync
from leanclip.losses import LossOutput
from leanclip.training.step_context import Pieces


def cached(pieces: Pieces, batch: Batch) -> LossOutput:
    """Loss and gradients of a batch in `pieces.parts` micro-batches."""
    parts = batch.split(pieces.parts)
    device = batch.images.device
    states, embedded = [], []
    inputs = [(part.images, pieces.texts(part.tokens, part.lengths)) for part in parts]
    with torch.no_grad(), pieces.autocast:
        for pair in pieces.norms.broadcast_from_first(inputs):
            states.append(RandomState.now(device))
            embedded.append(pieces.towers(*pair))
    image, text = (torch.cat(side).requires_grad_() for side in zip(*embedded, strict=True))

    with pieces.autocast:
        output = pieces.loss(image, text, batch.sample_ids, global_batch=pieces.batch)
    pieces.scale.apply(output.loss).backward()
    assert image.grad is not None and text.grad is not None

    sizes = [len(part) for part in parts]
    gradients = zip(image.grad.split(sizes), text.grad.split(sizes), strict=True)
    with pieces.norms.frozen():
        for number, (given, state, pulls) in enumerate(zip(inputs, states, gradients, strict=True), 1):
            state.restore(device)
            with gradient_sync(pieces.towers, number == len(parts)):
                with pieces.autocast:
                    pair = pieces.towers(*given)
                trained = [(side, pull) for side, pull in zip(pair, pulls, strict=True) if side.requires_grad]
                torch.autograd.backward([side for side, _ in trained], [pull for _, pull in trained])
    return output


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

"""A loss value whose gradients the engine computes in the backward pass."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from leanclip.ops import Gradients

Pull = Callable[..., Gradients]
DENSE = torch.contiguous_format


def attach_gradients(
    value: Tensor,
    image: Tensor,
    text: Tensor,
    pull: Pull,
    saved: Sequence[Tensor],
    slopes: Sequence[tuple[Tensor, Tensor]],
) -> Tensor:
    """`value` with gradients: those of `pull` for the embeddings, and for each parameter its slope.

    `pull(image, text, *saved, needs=...)` runs in the backward pass, so that evaluation does not compute them.
    """
    kept = (*(slope for _, slope in slopes), *saved)  # in a tuple, because torch inspects every positional argument
    result = _AttachGradients.apply(image, text, value, pull, kept, *(parameter for parameter, _ in slopes))
    assert isinstance(result, Tensor)
    return result


class _AttachGradients(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        image: Tensor,
        text: Tensor,
        value: Tensor,
        pull: Pull,
        kept: tuple[Tensor, ...],
        *parameters: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(image, text, *kept)
        ctx.pull, ctx.num_parameters = pull, len(parameters)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad,) = grad_outputs
        image, text, *rest = ctx.saved_tensors
        slopes, saved = rest[: ctx.num_parameters], rest[ctx.num_parameters :]
        with without_autocast(image.device.type):
            gradients = ctx.pull(image, text, *saved, needs=ctx.needs_input_grad[:2])
        # Multiplied before it is rounded to the embeddings' dtype, and without a copy in between.
        scaled = (
            None if gradient is None else torch.mul(gradient, grad, out=torch.empty_like(side, memory_format=DENSE))
            for gradient, side in zip(gradients, (image, text), strict=True)
        )
        return (*scaled, None, None, None, *(slope * grad for slope in slopes))


def without_autocast(device: str) -> contextlib.AbstractContextManager[object]:
    if torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()

"""Joins a loss value to the gradients that the engine computes."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from leanclip.ops import Gradients

Pull = Callable[..., Gradients]


def attach_gradients(
    value: Tensor,
    image: Tensor,
    text: Tensor,
    pull: Pull,
    saved: Sequence[Tensor],
    slopes: Sequence[tuple[Tensor, Tensor]],
) -> Tensor:
    """`value` with gradients: for the embeddings `pull`'s, for each parameter the slope it comes with.

    `pull(image, text, *saved, needs=...)` runs in the backward pass, so that evaluation pays for nothing.
    """
    kept = (*(slope for _, slope in slopes), *saved)  # in a tuple: torch looks at every argument of its own
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
            found = ctx.pull(image, text, *saved, needs=ctx.needs_input_grad[:2])
        image_grad = None if found.rows is None else _scaled(found.rows, grad, like=image)
        text_grad = None if found.cols is None else _scaled(found.cols, grad, like=text)
        return (image_grad, text_grad, None, None, None, *(slope * grad for slope in slopes))


def _scaled(tensor: Tensor, factor: Tensor, *, like: Tensor) -> Tensor:
    """tensor * factor in the dtype of `like`, multiplied before it is rounded and without a copy in between."""
    return torch.mul(tensor, factor, out=torch.empty_like(like, memory_format=torch.contiguous_format))


def without_autocast(device: str) -> contextlib.AbstractContextManager[object]:
    if torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()

"""Joins a loss value to the gradients that the engine computes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from leanclip.ops import Gradients

Pull = Callable[..., Gradients]


class AttachGradients(torch.autograd.Function):
    """Returns `value` unchanged; its gradient for the embeddings is `pull`'s, for the parameters the given ones.

    `pull(image, text, *saved, needs=...)` runs in the backward pass, so that evaluation pays for nothing.
    """

    @staticmethod
    def forward(
        ctx: Any,
        image: Tensor,
        text: Tensor,
        parameters: Tensor,
        value: Tensor,
        slopes: Tensor,
        pull: Pull,
        *saved: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(image, text, slopes, *saved)
        ctx.pull = pull
        ctx.num_saved = len(saved)
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad,) = grad_outputs
        image, text, slopes, *saved = ctx.saved_tensors
        needs = (ctx.needs_input_grad[0], ctx.needs_input_grad[1])
        with torch.autocast(image.device.type, enabled=False):
            found = ctx.pull(image, text, *saved, needs=needs)
        image_grad = None if found.rows is None else _scaled(found.rows, grad, like=image)
        text_grad = None if found.cols is None else _scaled(found.cols, grad, like=text)
        parameter_grad = slopes * grad if ctx.needs_input_grad[2] else None
        return (image_grad, text_grad, parameter_grad, None, None, None, *[None] * ctx.num_saved)


def _scaled(tensor: Tensor, factor: Tensor, *, like: Tensor) -> Tensor:
    """tensor * factor in the dtype of `like`, multiplied before it is rounded and without a copy in between."""
    return torch.mul(tensor, factor, out=torch.empty_like(like, memory_format=torch.contiguous_format))

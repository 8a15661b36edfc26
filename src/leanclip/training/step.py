"""One training step. It reads like the algorithm; everything else is elsewhere."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from leanclip.data import Batch
from leanclip.distributed import full_tensor
from leanclip.losses import LossOutput
from leanclip.training.gradient_caching import cached
from leanclip.training.nonfinite import gradient_norms
from leanclip.training.step_context import StepContext

CLIP_EPSILON = 1e-6  # added to the norm by torch's clipping, which changes nothing where the sum is below the limit


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Everything stays on the device: reading a value waits for it."""

    loss: Tensor
    grad_norm: Tensor
    skipped: bool  # because the loss or a gradient was not finite
    metrics: Mapping[str, Tensor | float | str]
    gradient_norms: Mapping[str, float] = field(default_factory=dict)  # by parameter, of a skipped step


def training_step(context: StepContext, batch: Batch) -> StepResult:
    """Embed both sides, compute the loss and its gradients, take one optimizer step."""
    loss, optimizer, scale = context.loss, context.optimizer, context.scale
    context.norms.remember()
    output = loss_and_gradients(context, batch)

    context.phase("optimizer")
    scale.remove([*context.parameters, *loss.parameters()])
    norm = torch.nn.utils.get_total_norm(_gradients(context.parameters))
    grad_norm, value = full_tensor(norm), output.loss.detach()
    flags = [torch.isfinite(sum(_gradients(loss.parameters()), grad_norm) + value)]
    if context.grad_clip_norm:
        flags.append(grad_norm + CLIP_EPSILON > context.grad_clip_norm)
    # The one place where a step waits for the device. All ranks have the same loss and norm, so all decide alike.
    finite, *large = torch.stack(flags).tolist()
    norms: Mapping[str, float] = {}
    if finite:
        if context.grad_clip_norm and any(large):
            torch.nn.utils.clip_grads_with_norm_(context.parameters, context.grad_clip_norm, norm)
        optimizer.step()
        context.norms.average(context.ranks)
    else:
        norms = gradient_norms(context)
        loss.rollback()
        context.norms.restore()
    scale.update(finite)
    optimizer.zero_grad(set_to_none=True)
    return StepResult(
        loss=value, grad_norm=grad_norm, skipped=not finite, metrics=output.metrics, gradient_norms=norms
    )


def loss_and_gradients(context: StepContext, batch: Batch) -> LossOutput:
    """Of the whole batch at once, of its micro-batches, or replayed from a CUDA graph."""
    if context.micro_batches > 1:
        return cached(context, batch)
    graph = None if context.cuda_graphs is None else context.cuda_graphs(context, batch)
    return direct(context, batch) if graph is None else graph.replay(context)


def direct(context: StepContext, batch: Batch) -> LossOutput:
    """Loss and gradients of a batch at once. The image embeddings are sent while the captions are embedded."""

    def send(image: Tensor) -> None:
        context.loss.start_gather(image, global_batch=context.global_batch)
        context.phase("text tower")

    context.phase("image tower")
    with context.autocast:
        image, text = context.towers(batch.images, batch.captions, send)
        context.phase("loss")
        output = context.loss_of(image, text, batch)
    context.phase("backward")
    context.scale.apply(output.loss).backward()
    return output


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]

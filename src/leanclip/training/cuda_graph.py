"""The step of a small model as a CUDA graph: the host launches one graph instead of kernel after kernel.

Everything from the pixels to the gradients of the parameters, the loss and its tables included, is captured once for
each shape and replayed. What changes from step to step lies in tensors: the batch, its ids, gamma, the loss scale.
"""

from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leanclip.data import Batch
from leanclip.losses import LossOutput
from leanclip.losses.base import check_weights
from leanclip.models import TwoTower
from leanclip.models.text_length import Texts
from leanclip.training.step_context import StepContext

WARM_UP = 3  # steps of each shape without a graph: nothing may be compiled during a capture
SHAPES = 4  # captured at most; each keeps its activations


class Shape(NamedTuple):
    images: torch.Size
    texts: torch.Size
    longest: int  # of packed captions


class Captured(NamedTuple):
    """A function that was called once; `replay` overwrites its result with what it would return now."""

    result: Any
    replay: Callable[[], None]


def capture_kernels(function: Callable[[], Any], pool: Any) -> Captured:
    """The kernels of a function. The call that captures them runs none of them."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    # The prefetch thread copies batches during the capture.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        return Captured(function(), graph.replay)


class CudaGraphs:
    """The graphs of a model with one loss, by shape."""

    def __init__(
        self,
        model: TwoTower,
        autocast: torch.autocast,
        capture: Callable[[Callable[[], Any], Any], Captured] = capture_kernels,
    ) -> None:
        self.model, self.autocast, self.capture = model, autocast, capture
        self.eager_steps, self.graphs = Counter[Shape](), dict[Shape, GraphedStep]()
        self.captured_for: object = None  # a loss, and the addresses of its tables
        self.pool = torch.cuda.graph_pool_handle() if capture is capture_kernels else None

    def __call__(self, context: StepContext, batch: Batch) -> "GraphedStep | None":
        """The graph for this batch, which is copied into it; None where the step must run without a graph."""
        texts = batch.captions
        if isinstance(texts, Texts):
            shape = Shape(batch.images.shape, texts.tokens.shape, texts.packing.longest)
        elif isinstance(texts, Tensor) and texts.is_floating_point():  # features
            shape = Shape(batch.images.shape, texts.shape, 0)
        else:
            return None
        captured_for = context.loss, [table.data_ptr() for table in context.loss.buffers()]
        if captured_for != self.captured_for:
            self.graphs.clear()
            self.captured_for = captured_for
        if shape not in self.graphs:
            self.eager_steps[shape] += 1
            if self.eager_steps[shape] <= WARM_UP or len(self.graphs) == SHAPES:
                return None
            self.graphs[shape] = GraphedStep(self, context, batch, texts)
        self.graphs[shape].fill(batch, texts)
        return self.graphs[shape]


class GraphedStep:
    """A step up to its gradients, on tensors that keep their addresses."""

    def __init__(self, graphs: CudaGraphs, context: StepContext, batch: Batch, texts: Texts | Tensor) -> None:
        model, loss, device = graphs.model, context.loss, batch.images.device
        self.images, self.texts = batch.images.clone(), deepcopy(texts)
        self.loss_inputs = [
            None if tensor is None else tensor.to(device, copy=True) for tensor in _loss_inputs(batch)
        ]
        self.scale = torch.ones((), device=device)
        self.state = loss.state
        parameters = [*model.parameters(), *loss.parameters()]
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]

        def step() -> tuple[LossOutput, tuple[Tensor | None, ...]]:
            with graphs.autocast:
                image, text = model(self.images, self.texts)
                ids, groups, weights, caption_numbers = self.loss_inputs
                output = loss(
                    image, text, ids, groups=groups, weights=weights, caption_numbers=caption_numbers,
                    global_batch=context.global_batch,
                )  # fmt: skip
            scaled = output.loss * self.scale if context.scale.grows else output.loss
            gradients = torch.autograd.grad(scaled, self.parameters, allow_unused=True)
            # Detached: later steps without a graph would otherwise accumulate on the stream of the capture.
            return LossOutput(loss=output.loss.detach(), metrics=output.metrics), gradients

        self.captured = graphs.capture(step, graphs.pool)
        self.output, self.gradients = self.captured.result
        self.undo = None if self.state is None else self.state.undo

    def fill(self, batch: Batch, texts: Texts | Tensor) -> None:
        if self.state is not None:
            self.state.check(batch.sample_ids)  # on the host, without waiting for the device
        self.images.copy_(batch.images)
        if batch.weights is not None:
            check_weights(batch.weights, len(batch))
        for tensor, value in zip(self.loss_inputs, _loss_inputs(batch), strict=True):
            if tensor is not None and value is not None:
                tensor.copy_(value, non_blocking=True)
        for tensor, value in zip(_tensors(self.texts), _tensors(texts), strict=True):
            tensor.copy_(value)

    def replay(self, context: StepContext) -> LossOutput:
        """Loss and gradients of the batch that was copied in. Metrics are those of the last replay when read."""
        if context.scale.grows:
            self.scale.fill_(context.scale.value)
        self.captured.replay()
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient
        if self.state is not None:
            self.state.undo = self.undo
        return LossOutput(loss=self.output.loss.clone(), metrics=self.output.metrics)


def _loss_inputs(batch: Batch) -> tuple[Tensor | None, ...]:
    """What the loss takes beside the embeddings."""
    return batch.sample_ids, batch.groups, batch.weights, batch.caption_numbers


def _tensors(texts: Texts | Tensor) -> list[Tensor]:
    if isinstance(texts, Tensor):
        return [texts]
    return [texts.tokens, texts.ends, *(value for value in texts.packing if isinstance(value, Tensor))]

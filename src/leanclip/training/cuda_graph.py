"""A small model's step as a CUDA graph: its kernels are over before the host has launched the next.

Everything from the pixels to the parameters' gradients, the loss with its tables among it, is recorded once for each
shape and replayed. What changes from step to step lies in tensors: the batch, its ids, gamma, the loss scale.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from leanclip.data import Batch
from leanclip.losses import LossOutput
from leanclip.losses.global_contrastive import GlobalContrastiveLoss
from leanclip.models import TwoTower
from leanclip.models.text_length import Layout, Texts, layout
from leanclip.training.step_context import StepContext

WARM_UP = 3  # steps of each shape that run as always first: nothing may be compiled while a recording is made
SHAPES = 4  # recorded at most; each keeps its activations


class Shape(NamedTuple):
    images: torch.Size
    tokens: torch.Size
    packed: int  # tokens
    longest: int


class Recording(Protocol):
    """A function that was called once; `replay` writes what it would give now to where its result lies."""

    made: Any

    def replay(self) -> None: ...


class Graph:
    """The function's kernels. Calling it for the recording runs none of them."""

    def __init__(self, function: Callable[[], Any], pool: Any) -> None:
        self.graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):  # others copy meanwhile
            self.made = function()

    def replay(self) -> None:
        self.graph.replay()


class CudaGraphs:
    """The recorded steps of a model with one loss, by shape."""

    def __init__(
        self,
        model: TwoTower,
        autocast: torch.autocast,
        record: Callable[[Callable[[], Any], Any], Recording] = Graph,
    ) -> None:
        self.model, self.autocast, self.record = model, autocast, record
        self.met, self.found = Counter[Shape](), dict[Shape, Recorded]()
        self.known: object = None  # the loss that they know, and where its tables lie
        self.pool = torch.cuda.graph_pool_handle() if record is Graph else None

    def __call__(self, context: StepContext, batch: Batch) -> "Recorded | None":
        """Ready to replay with this batch put in; None where the step must run without."""
        if batch.lengths is None:
            return None
        known = context.loss, [table.data_ptr() for table in context.loss.buffers()]
        if known != self.known:
            self.found.clear()
            self.known = known
        places = layout(batch.lengths, width=batch.tokens.shape[1], few_sizes=True)
        shape = Shape(batch.images.shape, batch.tokens.shape, places.size, places.longest)
        if shape not in self.found:
            self.met[shape] += 1
            if self.met[shape] <= WARM_UP or len(self.found) == SHAPES:
                return None
            self.found[shape] = Recorded(self, context, batch, places)
        self.found[shape].fill(batch, places)
        return self.found[shape]


class Recorded:
    """A step up to its gradients, on tensors that stay where they are."""

    def __init__(self, recorder: CudaGraphs, context: StepContext, batch: Batch, places: Layout) -> None:
        model, loss, device = recorder.model, context.loss, batch.images.device
        self.images, self.tokens = batch.images.clone(), batch.tokens.clone()
        self.ids = batch.sample_ids.to(device, copy=True)
        self.places = replace(places, table=places.table.to(device, copy=True))
        self.scale = torch.ones((), device=device)
        self.state = loss.state if isinstance(loss, GlobalContrastiveLoss) else None
        parameters = [*model.parameters(), *loss.parameters()]
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]

        def step() -> tuple[LossOutput, tuple[Tensor | None, ...]]:
            with recorder.autocast:
                image, text = model(self.images, Texts.at(self.tokens, self.places))
                output = loss(image, text, self.ids, global_batch=context.global_batch)
            scaled = output.loss * self.scale if context.scale.grows else output.loss
            gradients = torch.autograd.grad(scaled, self.parameters, allow_unused=True)
            # Without what led to it: later steps that are not recorded would accumulate on the recording's stream.
            return LossOutput(loss=output.loss.detach(), metrics=output.metrics), gradients

        self.recording = recorder.record(step, recorder.pool)
        self.output, self.gradients = self.recording.made
        self.undo = None if self.state is None else self.state.undo

    def fill(self, batch: Batch, places: Layout) -> None:
        if self.state is not None:
            self.state.check(batch.sample_ids)  # on the host, where they are
        self.images.copy_(batch.images)
        self.tokens.copy_(batch.tokens)
        self.ids.copy_(batch.sample_ids, non_blocking=True)
        table = places.table.pin_memory() if self.images.is_cuda else places.table
        self.places.table.copy_(table, non_blocking=True)

    def replay(self, context: StepContext) -> LossOutput:
        """Loss and gradients of the batch that was put in. Metrics are those of the last replay when looked at."""
        if context.scale.grows:
            self.scale.fill_(context.scale.value)
        self.recording.replay()
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient
        if self.state is not None:
            self.state.undo = self.undo
        return LossOutput(loss=self.output.loss.clone(), metrics=self.output.metrics)

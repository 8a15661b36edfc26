"""The towers as CUDA graphs: a small model's kernels are over before the host has launched the next.

The forward pass and the backward pass are recorded once for each shape and replayed; the loss between them, which
has state and looks at the host's numbers, runs as always.
"""

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leanclip.data import Batch
from leanclip.losses import LossOutput
from leanclip.models import TwoTower
from leanclip.models.text_length import Layout, Texts, layout, text_tower
from leanclip.training.pieces import Pieces

WARM_UP = 3  # steps of each shape that run as always first: nothing may be compiled while a recording is made
SHAPES = 4  # recorded at most; each keeps its activations
CAPTION, PATCH = 16, 16  # tokens and pixels, about
SMALL = 4e12  # operations of the towers in a step: about 10 ms on a fast GPU


class Shape(NamedTuple):
    images: torch.Size
    tokens: torch.Size
    packed: int  # tokens
    longest: int


class Recorder:
    """The recorded towers of a model, by shape."""

    def __init__(self, model: TwoTower, autocast: torch.autocast) -> None:
        self.model, self.autocast = model, autocast
        self.met, self.found = Counter[Shape](), dict[Shape, Recorded]()
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, batch: Batch) -> "Recorded | None":
        """Ready to replay with this batch put in; None where the step must run without."""
        if batch.lengths is None:
            return None
        places = layout(batch.lengths, width=batch.tokens.shape[1], few_sizes=True)
        shape = Shape(batch.images.shape, batch.tokens.shape, places.size, places.longest)
        if shape not in self.found:
            self.met[shape] += 1
            if self.met[shape] <= WARM_UP or len(self.found) == SHAPES:
                return None
            self.found[shape] = Recorded(self.model, batch, places, self.autocast, self.pool)
        self.found[shape].fill(batch, places)
        return self.found[shape]


class Recorded:
    """Both passes of the towers on tensors that stay where they are."""

    def __init__(self, model: TwoTower, batch: Batch, places: Layout, autocast: torch.autocast, pool: Any) -> None:
        self.images, self.tokens = batch.images.clone(), batch.tokens.clone()
        self.places = replace(places, table=places.table.to(batch.images.device))
        self.forward, self.backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        torch.cuda.synchronize()
        record = partial(torch.cuda.graph, pool=pool, capture_error_mode="thread_local")  # others copy meanwhile
        with record(self.forward), autocast:
            self.pair = model(self.images, Texts.at(self.tokens, self.places))
        self.pulls = tuple(torch.zeros_like(side) for side in self.pair)
        trained = [(side, pull) for side, pull in zip(self.pair, self.pulls, strict=True) if side.requires_grad]
        with record(self.backward):
            self.gradients = torch.autograd.grad(
                [side for side, _ in trained], self.parameters, [pull for _, pull in trained], allow_unused=True
            )
        self.pair = tuple(side.detach() for side in self.pair)

    def fill(self, batch: Batch, places: Layout) -> None:
        self.images.copy_(batch.images)
        self.tokens.copy_(batch.tokens)
        self.places.table.copy_(places.table.pin_memory(), non_blocking=True)

    def embed(self) -> tuple[Tensor, Tensor]:
        self.forward.replay()
        image, text = self.pair
        return image.detach().requires_grad_(), text.detach().requires_grad_()

    def pull(self, image: Tensor | None, text: Tensor | None) -> None:
        """From the embeddings' gradients to the parameters'."""
        for place, pull in zip(self.pulls, (image, text), strict=True):
            assert pull is not None
            place.copy_(pull)
        self.backward.replay()
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient


def recorded(pieces: Pieces, batch: Batch, towers: Recorded) -> LossOutput:
    """Loss and gradients of a batch, the towers replayed."""
    image, text = towers.embed()
    with pieces.autocast:
        output = pieces.loss(image, text, batch.sample_ids, global_batch=pieces.batch)
    pieces.scale.apply(output.loss).backward()
    towers.pull(image.grad, text.grad)
    return output


def work(model: TwoTower, batch: float) -> float:
    """Operations of the towers in a step, about. Of others than open_clip's own transformers little is known: there,
    each weight is taken to meet as many patches of 16 pixels as an image has, and each of a text tower as many tokens
    as a caption has."""
    visual, texts = model.clip.visual, text_tower(model.clip)
    text_work = CAPTION * sum(p.numel() for p in getattr(texts, "transformer", texts).parameters())
    if model.own_image:
        image_work = len(visual.positional_embedding) * sum(p.numel() for p in visual.transformer.parameters())
    else:
        size = model.preprocess.size
        height, width = (size, size) if isinstance(size, int) else size
        image_work = height * width // PATCH**2 * sum(p.numel() for p in visual.parameters())
    return 6 * batch * (image_work + text_work)


def worth_recording(model: TwoTower, batch: int) -> bool:
    """Whether launching would take longer than computing. Only what open_clip's own transformers do is known."""
    return model.own_image and model.end_of_text is not None and work(model, batch) < SMALL

"""Kernels compiled ahead, side by side.

Triton compiles a kernel where it is launched first: one after the other, while the GPU waits. A machine that has none
in its cache spends ten seconds and more on that. Here each is launched once, on little data, in a thread of its own,
while the rest of the run gets ready. Those of a backward pass are called by name: autograd has one thread for all.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from leanclip.data.prefetch import numbered
from leanclip.errors import first_line
from leanclip.losses import ContrastiveLoss
from leanclip.models import TwoTower
from leanclip.models.text_length import Texts, text_tower
from leanclip.models.transformer_towers import number_kept
from leanclip.ops.attention import (
    FEW,
    LARGEST_TILE,
    Given,
    of_packed,
    of_rows,
    short_attention,
    short_attention_backward,
)

MOST_SAMPLES = 32768  # samples: more launch the same kernels


class KernelWarmup:
    """Calls, each in a thread. What goes wrong in one of them does not stop the run, which then compiles as it goes.

    The threads are no daemons: a program that ends early waits for them, since one that dies inside of torch takes
    the whole program with it.
    """

    def __init__(self, calls: Iterable[Callable[[], object]], device: torch.device) -> None:
        device = numbered(device)
        self.errors: list[Exception] = []
        self.threads = [threading.Thread(target=self._run, args=(call, device)) for call in calls]
        for thread in self.threads:
            thread.start()

    def wait(self) -> str | None:
        """What to tell the user, if something went wrong."""
        for thread in self.threads:
            thread.join()
        if not self.errors:
            return None
        return f"not all kernels were compiled ahead, so the first steps take longer ({first_line(self.errors[0])})"

    def _run(self, call: Callable[[], object], device: torch.device) -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # of this thread
            call()
        except Exception as error:
            self.errors.append(error)


def warmup_calls(
    model: TwoTower,
    loss: Callable[[], ContrastiveLoss],
    *,
    batch: int,
    autocast: Callable[[], torch.autocast],
    device: torch.device,
) -> Iterator[Callable[[], None]]:
    """A call for each of the kernels of a step; the loss's are one. None draws random numbers.

    `loss` makes one like the run's; `autocast` is made anew for each, since one belongs to its thread.
    """
    for direction in (_forward, _backward):
        if model.blockwise_image:
            yield partial(_images, model, direction, autocast, device)
        if model.end_of_text is not None:
            for most in (FEW, LARGEST_TILE):
                yield partial(_texts, model, most, direction, autocast, device)
    yield partial(_loss, loss, batch, model, autocast, device)


Direction = Callable[[Given | None], None]


def _forward(given: Given | None) -> None:
    if given is not None:
        short_attention(*given)


def _backward(given: Given | None) -> None:
    if given is not None:
        qkv, *rest = given
        short_attention_backward(qkv, torch.zeros_like(qkv[:, 0]), *rest)


def _qkv(layer: Any, device: torch.device, *shape: int) -> Tensor:
    """What an attention layer splits into queries, keys and values."""
    weight, heads = layer.in_proj_weight, layer.num_heads
    on = torch.is_autocast_enabled(device.type)
    dtype = torch.get_autocast_dtype(device.type) if on else weight.dtype
    return torch.zeros(*shape, 3, heads, len(weight) // (3 * heads), dtype=dtype, device=device)


def _images(
    model: TwoTower, direction: Direction, autocast: Callable[[], torch.autocast], device: torch.device
) -> None:
    visual = model.clip.visual
    with autocast():
        layer, patches = visual.transformer.resblocks[0].attn, len(visual.positional_embedding) - 1
        direction(of_rows(_qkv(layer, device, 1, 1 + number_kept(visual, patches))))


def _texts(
    model: TwoTower, most: int, direction: Direction, autocast: Callable[[], torch.autocast], device: torch.device
) -> None:
    """A text of so many tokens, or as many as the model takes."""
    width = model.clip.context_length
    tokens = torch.zeros(1, width, dtype=torch.int64, device=device)
    texts = Texts.pack(tokens, torch.tensor([min(most, width)]), few_sizes=True)
    layer = text_tower(model.clip).transformer.resblocks[0].attn
    with autocast():
        direction(of_packed(_qkv(layer, device, len(texts.tokens)), texts.packing))


def _loss(
    make: Callable[[], ContrastiveLoss], batch: int, model: TwoTower, autocast: Callable[[], torch.autocast],
    device: torch.device,
) -> None:  # fmt: skip
    loss, dim = make().to(device), model.config["embed_dim"]
    if loss.implementation not in ("auto", "triton"):
        return  # the others compile nothing, and one holds all pairs
    loss.set_epoch(0.0, 1)
    some = (
        batch if batch <= MOST_SAMPLES else MOST_SAMPLES + batch % 16
    )  # Triton cares whether a number divides by 16
    image, text = (torch.full((some, dim), dim**-0.5, device=device, requires_grad=True) for _ in range(2))
    with autocast():
        output = loss(image, text, torch.arange(some), global_batch=some)
    output.loss.backward()

"""Kernel warm-up: the Triton kernels of a step are compiled in parallel before the first step.

Triton compiles a kernel at its first launch, one after the other, while the GPU is idle: ten seconds and more on a
machine with an empty cache. Here each kernel is launched once, on little data, in its own thread, during set-up.
Those of the backward pass are called directly, since autograd has one thread per device.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from leanclip.data.batch import numbered
from leanclip.errors import first_line
from leanclip.losses import ContrastiveLoss
from leanclip.models import TwoTower
from leanclip.models.text_length import Texts, text_tower
from leanclip.models.transformer_towers import number_kept
from leanclip.ops import resize
from leanclip.ops.attention import (
    LARGEST_TILE,
    SHORT_LENGTH,
    KernelArguments,
    packed_arguments,
    row_arguments,
    short_attention,
    short_attention_backward,
)

MOST_SAMPLES = 32768  # larger batches launch the same kernels


class KernelWarmup:
    """Calls, each in a thread. One that fails does not end the run, whose first steps then take longer.

    The interpreter waits for the threads at its exit: to end them inside of torch would abort the program.
    """

    def __init__(self, calls: Iterable[Callable[[], object]], device: torch.device) -> None:
        calls, device = list(calls), numbered(device)
        start = partial(torch.cuda.set_device, device) if device.type == "cuda" else None  # of each thread
        pool = ThreadPoolExecutor(len(calls), initializer=start)
        self.futures = [pool.submit(call) for call in calls]
        pool.shutdown(wait=False)

    def wait(self) -> str | None:
        """A message for the user, if a call failed."""
        errors = [error for future in self.futures if (error := future.exception()) is not None]
        return f"kernel warm-up failed, so the first steps take longer ({first_line(errors[0])})" if errors else None


def warmup_calls(
    model: TwoTower,
    loss: Callable[[], ContrastiveLoss],
    *,
    batch: int,
    autocast: Callable[[], torch.autocast],
    device: torch.device,
    resized_to: tuple[int, int] | None = None,
) -> Iterator[Callable[[], None]]:
    """A call for each kernel of the towers, one for all of the loss, and one where the device resizes images. None
    draws random numbers.

    `loss` creates one like that of the run; `autocast` creates a context for each thread.
    """
    inputs: list[Callable[[], KernelArguments | None]] = []
    if model.blockwise_image:
        inputs.append(partial(_image_arguments, model.clip.visual, device))
    if model.end_of_text is not None:
        inputs += [partial(_text_arguments, model, longest, device) for longest in (SHORT_LENGTH, LARGEST_TILE)]
    for arguments in inputs:
        yield partial(_attention, arguments, autocast, backward=False)
        yield partial(_attention, arguments, autocast, backward=True)
    yield partial(_loss, loss, batch, model, autocast, device)
    if resized_to is not None:
        yield partial(_resize, resized_to, device)


def _resize(size: tuple[int, int], device: torch.device) -> None:
    rows, columns = (resize.bicubic(side, device) for side in size)
    crop = torch.zeros(3 * math.prod(size), dtype=torch.uint8, device=device)
    out = torch.empty(1, 3, *size, dtype=torch.uint8, device=device)
    resize.resize_crops(crop, torch.tensor([[0, *size]]), rows, columns, out)


def _attention(
    arguments: Callable[[], KernelArguments | None], autocast: Callable[[], torch.autocast], *, backward: bool
) -> None:
    with autocast():
        kernel_arguments = arguments()
    if kernel_arguments is not None and backward:
        qkv, *rest = kernel_arguments
        short_attention_backward(qkv, torch.zeros_like(qkv[:, 0]), *rest)
    elif kernel_arguments is not None:
        short_attention(*kernel_arguments)


def _qkv(layer: Any, device: torch.device, *shape: int) -> Tensor:
    """The input of an attention kernel: queries, keys and values."""
    weight, heads = layer.in_proj_weight, layer.num_heads
    autocast = torch.is_autocast_enabled(device.type)
    dtype = torch.get_autocast_dtype(device.type) if autocast else weight.dtype
    return torch.zeros(*shape, 3, heads, len(weight) // (3 * heads), dtype=dtype, device=device)


def _image_arguments(visual: Any, device: torch.device) -> KernelArguments | None:
    patches = len(visual.positional_embedding) - 1
    return row_arguments(_qkv(visual.transformer.resblocks[0].attn, device, 1, 1 + number_kept(visual, patches)))


def _text_arguments(model: TwoTower, longest: int, device: torch.device) -> KernelArguments | None:
    """Of one caption of `longest` tokens, or of the context length."""
    width = model.clip.context_length
    tokens = torch.zeros(1, width, dtype=torch.int64, device=device)
    texts = Texts.pack(tokens, torch.tensor([min(longest, width)]), few_sizes=True)
    layer = text_tower(model.clip).transformer.resblocks[0].attn
    return packed_arguments(_qkv(layer, device, len(texts.tokens)), texts.packing)


def _loss(
    make: Callable[[], ContrastiveLoss], batch: int, model: TwoTower, autocast: Callable[[], torch.autocast],
    device: torch.device,
) -> None:  # fmt: skip
    loss, dim = make().to(device), model.config["embed_dim"]
    if loss.implementation not in ("auto", "triton"):
        return  # the others have no kernels, and `reference` would allocate all pairs
    loss.set_epoch(0.0, 1)
    # Triton compiles other code for sizes that 16 divides.
    samples = batch if batch <= MOST_SAMPLES else MOST_SAMPLES + batch % 16
    image, text = (torch.full((samples, dim), dim**-0.5, device=device, requires_grad=True) for _ in range(2))
    ids = torch.arange(samples)
    with autocast():
        output = loss(image, text, ids, caption_numbers=ids, global_batch=samples)
    output.loss.backward()

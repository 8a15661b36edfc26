"""The contrastive losses in common use, on one rank of many, each with its own collectives.

    undivided    CLIP's: all embeddings on every rank, and all B x B similarities (open_clip's ClipLoss)
    local        open_clip's --local-loss --gather-with-grad: B/N x B in each direction, gradients reduce-scattered
    disco        DisCo-CLIP's split (arXiv 2304.08480): the same matrices, gradients of all embeddings all-reduced
    inf_cl       Inf-CL (arXiv 2410.17243): tiles on chip, the texts passed around a ring

All are InfoNCE. Without torch.distributed, one rank holds the whole batch. `loss_step` covers leanclip's losses, too.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import leanclip
from leanclip.losses.disco_clip import disco_clip

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # of image and text embeddings and the scale


@contextlib.contextmanager
def first_of(ranks: int, *, always: bool = False) -> Iterator[None]:
    """This process as the first of many ranks that do not exist: gathering returns its own part N times, and a sum is
    its own part. Everything else of a step is real. One rank needs no group, except with `always`."""
    if ranks == 1 and not always:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        with as_nccl():
            yield
    finally:
        dist.destroy_process_group()


def as_nccl() -> contextlib.AbstractContextManager[Any]:
    """torch.distributed.nn uses a reduce-scatter only if the group's backend is NCCL."""
    return mock.patch.object(dist, "get_backend", return_value=dist.Backend.NCCL)


def size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def open_clip(*, local: bool) -> Loss:
    from open_clip.loss import ClipLoss

    warnings.filterwarnings("ignore", "torch.distributed.nn.functional", FutureWarning)  # ClipLoss calls it
    return ClipLoss(local_loss=local, gather_with_grad=local, rank=rank(), world_size=size())


def inf_cl() -> Loss:
    from inf_cl import cal_inf_loss  # pyright: ignore[reportMissingImports]

    return lambda image, text, scale: (
        (cal_inf_loss(image, text, scale=scale).mean() + cal_inf_loss(text, image, scale=scale).mean()) / 2
    )


MAKERS: dict[str, Callable[[], Loss]] = {
    "undivided": lambda: open_clip(local=False),
    "local": lambda: open_clip(local=True),
    "disco": lambda: disco_clip,
    "inf_cl": inf_cl,
}


def loss_step(provider: str, image: Tensor, text: Tensor, ids: Tensor, num_samples: int) -> Callable[[], Tensor]:
    """A function that runs the loss forward and backward, and returns its value. On CUDA the baselines run under
    autocast, as in their trainers."""
    device = image.device.type
    kind, _, name = provider.partition(" ")
    if kind == "leanclip":
        stateful = name.startswith("fastclip")
        module = leanclip.create_loss(name, num_samples=num_samples if stateful else None).to(image.device)

        def loss() -> Tensor:
            module.set_epoch(0, 2)
            module.zero_grad()
            return module(image, text, ids if stateful else None).loss

    else:
        baseline = MAKERS[provider]()
        log_scale = torch.tensor(2.659260, device=image.device, requires_grad=True)  # 1 / 0.07

        def loss() -> Tensor:
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda" and provider != "inf_cl"):
                return baseline(image, text, log_scale.exp())

    def step() -> Tensor:
        image.grad = text.grad = None
        value = loss()
        value.backward()
        return value.detach()

    return step

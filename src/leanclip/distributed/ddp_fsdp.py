"""One model on several ranks: its gradients averaged by DDP, or its weights split too by FSDP2."""

import contextlib
from collections import Counter
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from leanclip.distributed.ranks import Ranks, as_bytes
from leanclip.errors import UserError


def replicated(model: nn.Module, ranks: Ranks, device: torch.device) -> nn.Module:
    """DDP: every rank has all weights; gradients are averaged while the backward pass still runs."""
    if ranks.size == 1 or not any(parameter.requires_grad for parameter in model.parameters()):
        return model
    return DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        broadcast_buffers=False,  # batch-norm statistics are averaged once a step instead
    )


def sharded(model: nn.Module, ranks: Ranks, device: torch.device, *, methods: tuple[str, ...] = ()) -> nn.Module:
    """FSDP2, block by block: every rank keeps a part of weights, gradients and optimizer state.

    Scalars, which are not trained, stay whole. `methods` are called beside `forward`.
    """
    if device.type == "cuda" and "nccl" not in str(dist.get_backend_config(ranks.group)):
        raise UserError("--fsdp needs a GPU for each process; start as many processes as there are GPUs")
    mesh = ranks.mesh(device.type)
    ignored = {parameter for parameter in model.parameters() if parameter.ndim == 0}
    assert not any(parameter.requires_grad for parameter in ignored), "nobody would average its gradient"
    for block in blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params=ignored)
    for method in methods:
        register_fsdp_forward_method(model, method)
    return model


def forget_gathered(model: nn.Module) -> None:
    """Before weights change that are split over ranks: FSDP2 keeps what it gathered of the outermost module."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def blocks(model: nn.Module) -> list[nn.Module]:
    """The layers that a tower repeats: elements of one class in a list or sequence."""
    found: list[nn.Module] = []
    for module in model.modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        kinds = Counter(type(child) for child in module)
        found += [
            child
            for child in module
            if kinds[type(child)] > 1
            and any(True for _ in child.parameters())
            and any(True for _ in child.children())
        ]
    inside = {id(inner) for block in found for inner in block.modules() if inner is not block}
    return [block for block in found if id(block) not in inside]


@contextlib.contextmanager
def reducing(model: nn.Module, reduce: bool) -> Iterator[None]:
    """Whether the backward passes inside send gradients, or only add them up for a later one that does."""
    if isinstance(model, DistributedDataParallel) and not reduce:
        with model.no_sync():
            yield
        return
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(reduce)
    yield


def whole(value: Tensor) -> Tensor:
    """A tensor that is split over the ranks, complete; called on all of them.

    By a plain collective: the functional ones that DTensor itself uses crash on CUDA tensors over gloo (torch 2.11).
    """
    if not isinstance(value, DTensor):
        return value
    if value.placements != (Shard(0),):
        return value.full_tensor()
    local, group = value.to_local(), value.device_mesh.get_group()
    width = -(-len(value) // group.size())
    padded = local.new_zeros(width, *local.shape[1:])
    padded[: len(local)] = local
    everyone = padded.new_empty(group.size() * width, *local.shape[1:])
    dist.all_gather_into_tensor(as_bytes(everyone), as_bytes(padded), group=group)
    return everyone[: len(value)]


def split_like(value: Tensor, model: Tensor) -> Tensor:
    """A complete tensor, split as another one is."""
    if not isinstance(model, DTensor) or isinstance(value, DTensor) or value.shape != model.shape:
        return value
    return distribute_tensor(value.to(model.device), model.device_mesh, model.placements)

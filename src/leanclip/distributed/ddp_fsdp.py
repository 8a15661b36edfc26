"""A model on several ranks: DDP averages its gradients, FSDP2 also splits its weights."""

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


def wrap_ddp(model: nn.Module, ranks: Ranks, device: torch.device) -> nn.Module:
    """DDP: every rank has all weights; gradients are averaged while the backward pass still runs."""
    if ranks.size == 1 or not any(parameter.requires_grad for parameter in model.parameters()):
        return model
    return DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        broadcast_buffers=False,  # batch-norm statistics are averaged once a step instead
    )


def wrap_fsdp(model: nn.Module, ranks: Ranks, device: torch.device, *, methods: tuple[str, ...] = ()) -> nn.Module:
    """FSDP2, block by block: every rank keeps a part of weights, gradients and optimizer state.

    Scalars, which are not trained, are not split. `methods` are the model's entry points besides `forward`.
    """
    if device.type == "cuda" and "nccl" not in str(dist.get_backend_config(ranks.group)):
        raise UserError(
            "--fsdp needs a GPU for each process; start as many processes as there are GPUs", code="launch.shared_gpu"
        )
    mesh = ranks.mesh(device.type)
    ignored = {parameter for parameter in model.parameters() if parameter.ndim == 0}
    assert not any(parameter.requires_grad for parameter in ignored), "its gradient would not be averaged"
    for block in repeated_blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params=ignored)
    for method in methods:
        register_fsdp_forward_method(model, method)
    return model


def reshard(model: nn.Module) -> None:
    """Free gathered weights before the shards change: FSDP2 keeps those of the outermost module after a forward."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The layers that a tower repeats: elements of one class in a list or sequence."""
    repeated: list[nn.Module] = []
    for module in model.modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        counts = Counter(type(child) for child in module)
        repeated += [
            child
            for child in module
            if counts[type(child)] > 1
            and any(True for _ in child.parameters())
            and any(True for _ in child.children())
        ]
    nested = {id(inner) for block in repeated for inner in block.modules() if inner is not block}
    return [block for block in repeated if id(block) not in nested]


@contextlib.contextmanager
def gradient_sync(model: nn.Module, reduce: bool) -> Iterator[None]:
    """Whether backward passes in this context average gradients over ranks, or only accumulate them."""
    if isinstance(model, DistributedDataParallel) and not reduce:
        with model.no_sync():
            yield
        return
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(reduce)
    yield


def local_tensor(value: Tensor) -> Tensor:
    """This rank's part of a tensor that is split over the ranks, or all of one that is not."""
    return value.to_local() if isinstance(value, DTensor) else value


def full_tensor(value: Tensor) -> Tensor:
    """All of a tensor that is split over the ranks. A collective call.

    It uses a plain collective: the functional ones of DTensor crash on CUDA tensors over gloo (torch 2.11).
    """
    if not isinstance(value, DTensor):
        return value
    if value.placements != (Shard(0),):
        return value.full_tensor()
    local, group = value.to_local(), value.device_mesh.get_group()
    width = -(-len(value) // group.size())
    padded = local.new_zeros(width, *local.shape[1:])
    padded[: len(local)] = local
    gathered = padded.new_empty(group.size() * width, *local.shape[1:])
    dist.all_gather_into_tensor(as_bytes(gathered), as_bytes(padded), group=group)
    return gathered[: len(value)]


def shard_like(value: Tensor, template: Tensor) -> Tensor:
    """Split a full tensor over the ranks as `template` is."""
    if not isinstance(template, DTensor) or isinstance(value, DTensor) or value.shape != template.shape:
        return value
    return distribute_tensor(value.to(template.device), template.device_mesh, template.placements)

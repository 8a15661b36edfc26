"""A process group that records every collective, of the loss, DDP or others."""

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo

OPERATIONS = (
    "allreduce", "allreduce_coalesced", "allgather", "_allgather_base", "allgather_into_tensor_coalesced",
    "allgather_coalesced", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "broadcast",
    "reduce", "gather", "scatter", "alltoall", "alltoall_base", "send", "recv", "recv_anysource", "barrier",
)  # fmt: skip


class Spy(dist.ProcessGroup):
    """gloo, with a list of (operation, bytes of its largest tensor argument)."""

    seen: list[tuple[str, int]] = []  # noqa: RUF012  (one per process)

    def __init__(self, inner):
        super().__init__(inner.rank(), inner.size())  # pyright: ignore[reportCallIssue]
        self.inner = inner

    def getBackendName(self):  # noqa: N802  (torch's name)
        return "spy"


def _passing(name):
    def call(self, *arguments, **options):
        Spy.seen.append((name, max((_bytes(argument) for argument in arguments), default=0)))
        return getattr(self.inner, name)(*arguments, **options)

    return call


def _bytes(argument):
    if isinstance(argument, torch.Tensor):
        return argument.nbytes
    return sum(map(_bytes, argument)) if isinstance(argument, list | tuple) else 0


for _name in OPERATIONS:
    setattr(Spy, _name, _passing(_name))


def make(store, rank, size, timeout):
    return Spy(ProcessGroupGloo(store, rank, size, timeout))

"""Who takes part in a step, who has which share of the batch, and the collectives between them."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from leanclip.distributed.heartbeat import PROGRESS
from leanclip.distributed.traffic import LEDGER
from leanclip.errors import UserError

T = TypeVar("T")


class Rows(NamedTuple):
    """A gather on its way: `wait` gives all ranks' rows."""

    wait: Callable[[], Tensor]


@dataclass(frozen=True)
class Ranks:
    """This process among those of a group. One process alone sends nothing."""

    rank: int
    size: int
    group: dist.ProcessGroup | None

    @classmethod
    def current(cls) -> "Ranks":
        """All processes, where torch.distributed is initialised; else this one alone."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls(0, 1, None)
        group = dist.group.WORLD
        return cls(dist.get_rank(group), dist.get_world_size(group), group)

    @property
    def first(self) -> bool:
        """Whether this process speaks and writes for all."""
        return self.rank == 0

    def share(self, batch: int, rank: int | None = None) -> slice:
        """A rank's part of a global batch: contiguous, and one more on the first ranks where it does not divide."""
        rank = self.rank if rank is None else rank
        each, more = divmod(batch, self.size)
        start = rank * each + min(rank, more)
        return slice(start, start + each + (rank < more))

    def largest_share(self, batch: int) -> int:
        return -(-batch // self.size)

    def mesh(self, device: str) -> DeviceMesh:
        """The ranks in one line, for what torch splits over them: this very group, not a new one."""
        assert self.group is not None, "torch.distributed is not initialised"
        return DeviceMesh.from_group(self.group, device, mesh_dim_names=("ranks",))

    def gather(self, local: Tensor, batch: int, *, purpose: str) -> Tensor:
        """All ranks' rows, in the order of the global batch. No sizes travel: they follow from `batch`."""
        return self.start_gather(local, batch, purpose=purpose).wait()

    def start_gather(self, local: Tensor, batch: int, *, purpose: str) -> Rows:
        """The same, begun now and finished by `wait`, so that other work can run in between."""
        if self.size == 1:
            return Rows(lambda: local)
        width = self.largest_share(batch)
        padded = local.contiguous()
        if len(local) < width:
            padded = local.new_zeros(width, *local.shape[1:])
            padded[: len(local)] = local
        everyone = padded.new_empty(self.size * width, *local.shape[1:])
        LEDGER.record(purpose, everyone.nbytes)
        PROGRESS()
        work = dist.all_gather_into_tensor(as_bytes(everyone), as_bytes(padded), group=self.group, async_op=True)

        def wait(sent: Tensor = padded) -> Tensor:  # which must live until it has been sent
            work.wait()  # pyright: ignore[reportOptionalMemberAccess]
            if batch == self.size * width:
                return everyone
            parts = everyone.unflatten(0, (self.size, width))
            shares = (self.share(batch, rank) for rank in range(self.size))
            return torch.cat([part[: share.stop - share.start] for part, share in zip(parts, shares, strict=True)])

        return Rows(wait)

    def sum(self, local: Tensor, *, purpose: str) -> Tensor:
        """The sum over all ranks, in place."""
        if self.size > 1:
            LEDGER.record(purpose, local.nbytes)
            PROGRESS()
            dist.all_reduce(local, group=self.group)
        return local

    def everyones(self, value: T) -> list[T]:
        """All ranks' values, small and of any kind."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        PROGRESS()
        dist.all_gather_object(values, value, group=self.group)
        return values

    def once(self, call: Callable[[], T]) -> T:
        """Rank 0 does it; its result, or its complaint to the user, reaches everybody."""
        if self.size == 1:
            return call()
        outcome: list[Any] = [None, None]
        if self.first:
            try:
                outcome[0] = call()
            except UserError as error:
                outcome[1] = error
        PROGRESS()
        dist.broadcast_object_list(outcome, src=0, group=self.group)
        if outcome[1] is not None:
            outcome[1].shown = not self.first
            raise outcome[1]
        return outcome[0]


def as_bytes(tensor: Tensor) -> Tensor:
    """The same memory as a vector of bytes: what travels that way needs no backend that knows its dtype."""
    return tensor.view(-1).view(torch.uint8)


def host_group(ranks: Ranks) -> dist.ProcessGroup | None:
    """A second group of all processes, over the hosts' network, for a thread whose collectives must not mix with
    those of the training. All of them call it together; one without a group gets none."""
    if ranks.group is None:
        return None
    group = dist.new_group(backend="gloo", timeout=timedelta(hours=2))  # a slow disk is no lost process
    assert isinstance(group, dist.ProcessGroup)
    return group

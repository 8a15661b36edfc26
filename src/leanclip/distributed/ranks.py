"""The ranks of a process group: their shares of the global batch, the collectives between them, and their traffic."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from leanclip.errors import UserError
from leanclip.progress import ACTIVITY

T = TypeVar("T")
Failure = TypeVar("Failure", bound=UserError)


class PendingGather(NamedTuple):
    """A gather in progress: `wait` returns the rows of all ranks."""

    wait: Callable[[], Tensor]


@dataclass(frozen=True)
class Ranks:
    """This process within its group. A single process sends nothing."""

    rank: int
    size: int
    group: dist.ProcessGroup | None

    @classmethod
    def current(cls) -> "Ranks":
        """All processes if torch.distributed is initialised, else this one alone."""
        if not (dist.is_available() and dist.is_initialized()):
            return ALONE
        group = dist.group.WORLD
        return cls(dist.get_rank(group), dist.get_world_size(group), group)

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which prints and writes for all."""
        return self.rank == 0

    def share(self, batch: int, rank: int | None = None) -> slice:
        """A rank's contiguous part of a global batch; the first ranks have one sample more if it does not divide."""
        rank = self.rank if rank is None else rank
        smaller, remainder = divmod(batch, self.size)
        start = rank * smaller + min(rank, remainder)
        return slice(start, start + smaller + (rank < remainder))

    def largest_share(self, batch: int) -> int:
        return -(-batch // self.size)

    def mesh(self, device: str) -> DeviceMesh:
        """A one-dimensional device mesh over this group, for DTensor and FSDP2."""
        assert self.group is not None, "torch.distributed is not initialised"
        return DeviceMesh.from_group(self.group, device, mesh_dim_names=("ranks",))

    def gather(self, local: Tensor, batch: int, *, purpose: str) -> Tensor:
        """The rows of all ranks, in the order of the global batch. No sizes are sent: they follow from `batch`."""
        return self.start_gather(local, batch, purpose=purpose).wait()

    def start_gather(self, local: Tensor, batch: int, *, purpose: str) -> PendingGather:
        """The same without blocking: other work can run until `wait`."""
        if self.size == 1:
            return PendingGather(lambda: local)
        width = self.largest_share(batch)
        padded = local.contiguous()
        if len(local) < width:
            padded = local.new_zeros(width, *local.shape[1:])
            padded[: len(local)] = local
        gathered = padded.new_empty(self.size * width, *local.shape[1:])
        TRAFFIC_COUNTER.record(purpose, gathered.nbytes)
        ACTIVITY.advance()
        work = dist.all_gather_into_tensor(as_bytes(gathered), as_bytes(padded), group=self.group, async_op=True)

        def wait(sent: Tensor = padded) -> Tensor:  # keeps the buffer alive until it is sent
            with TRAFFIC_COUNTER.waiting(purpose):
                work.wait()  # pyright: ignore[reportOptionalMemberAccess]
            if batch == self.size * width:
                return gathered
            parts = gathered.unflatten(0, (self.size, width))
            shares = (self.share(batch, rank) for rank in range(self.size))
            return torch.cat([part[: share.stop - share.start] for part, share in zip(parts, shares, strict=True)])

        return PendingGather(wait)

    def sum(self, local: Tensor, *, purpose: str) -> Tensor:
        if self.size > 1:
            TRAFFIC_COUNTER.record(purpose, local.nbytes)
            ACTIVITY.advance()
            with TRAFFIC_COUNTER.waiting(purpose):
                dist.all_reduce(local, group=self.group)
        return local

    def all_gather_objects(self, value: T) -> list[T]:
        """The values of all ranks, which may be any small picklable objects."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        ACTIVITY.advance()
        dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast_from_first(self, call: Callable[[], T]) -> T:
        """Call it on rank 0; every rank gets the result, or raises the same UserError."""
        if self.size == 1:
            return call()
        outcome: list[Any] = [None, None]
        if self.first:
            try:
                outcome[0] = call()
            except UserError as error:
                outcome[1] = error
        ACTIVITY.advance()
        dist.broadcast_object_list(outcome, src=0, group=self.group)
        if outcome[1] is not None:
            raise self.shown_once(outcome[1])
        return outcome[0]

    def shown_once(self, error: Failure) -> Failure:
        """An error that all ranks raise, and the first one prints."""
        error.shown = not self.first
        return error


ALONE = Ranks(0, 1, None)


def as_bytes(tensor: Tensor) -> Tensor:
    """The same memory as a vector of bytes, which a backend can send whatever the dtype."""
    return tensor.view(-1).view(torch.uint8)


def gloo_group(ranks: Ranks) -> dist.ProcessGroup | None:
    """A second group of all processes, for a thread whose collectives must not mix with those of the training.

    A collective call. None without a process group.
    """
    if ranks.group is None:
        return None
    group = dist.new_group(backend="gloo", timeout=timedelta(hours=2))  # a save may wait for a slow disk
    assert isinstance(group, dist.ProcessGroup)
    return group


GATHERED = ("embeddings", "scalars", "ids", "groups", "weights", "captions")  # a loss's purposes
REDUCED = ("state", "sums", "gradients")  # the last: DisCo-CLIP's


class Volume(NamedTuple):
    """Collectives of one purpose: how many, and the bytes of the vectors that they send to all ranks."""

    calls: int
    bytes: int


@dataclass
class TrafficCounter:
    """Counts the collectives of a process by purpose, from one `clear` to the next."""

    volumes: dict[str, Volume] = field(default_factory=dict)
    waiting: Callable[[str], AbstractContextManager[Any]] = nullcontext  # a context around each wait

    def record(self, purpose: str, size: int) -> None:
        calls, total = self.volumes.get(purpose, Volume(0, 0))
        self.volumes[purpose] = Volume(calls + 1, total + size)

    @contextmanager
    def observed(self, waiting: Callable[[str], AbstractContextManager[Any]]) -> Iterator[None]:
        """Inside, every wait for a collective happens inside `waiting(purpose)`."""
        self.waiting = waiting
        try:
            yield
        finally:
            self.waiting = nullcontext

    def clear(self) -> None:
        self.volumes.clear()

    def loss_total(self) -> Volume:
        volumes = [volume for purpose, volume in self.volumes.items() if purpose in GATHERED + REDUCED]
        return Volume(sum(volume.calls for volume in volumes), sum(volume.bytes for volume in volumes))


TRAFFIC_COUNTER = TrafficCounter()  # of this process


class Traffic(NamedTuple):
    """Bytes that each rank receives in one step for a loss, on a ring."""

    leanclip: float
    openclip: float  # --local-loss --gather-with-grad: gathers the embeddings, reduce-scatters their gradients
    disco_clip: float  # gathers the embeddings, all-reduces their gradients


def compare_traffic(counter: TrafficCounter, *, ranks: int) -> Traffic:
    """The traffic of one counted step, and that of the other implementations with the same embeddings.

    On a ring a gathered vector of S bytes costs each rank S (N-1)/N, a reduce-scattered one the same, an all-reduced
    one twice that.
    """
    share = (ranks - 1) / ranks
    embeddings = counter.volumes.get("embeddings", Volume(0, 0)).bytes
    reduced = sum(counter.volumes.get(purpose, Volume(0, 0)).bytes for purpose in REDUCED)
    return Traffic((counter.loss_total().bytes + reduced) * share, 2 * embeddings * share, 3 * embeddings * share)

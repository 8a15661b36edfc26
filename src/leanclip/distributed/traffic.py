"""Bytes that the collectives of a loss send, counted call by call, and what other implementations would send."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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

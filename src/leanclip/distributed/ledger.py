"""What the loss sends: counted call by call, beside what others would send for the same step."""

from dataclasses import dataclass, field
from typing import NamedTuple


class Entry(NamedTuple):
    """Collectives of one purpose: how many, and the bytes of the vector they spread over all ranks."""

    calls: int
    bytes: int


@dataclass
class Ledger:
    """Counts the collectives of a process by purpose, from one `clear` to the next."""

    entries: dict[str, Entry] = field(default_factory=dict)

    def record(self, purpose: str, size: int) -> None:
        calls, known = self.entries.get(purpose, Entry(0, 0))
        self.entries[purpose] = Entry(calls + 1, known + size)

    def clear(self) -> None:
        self.entries.clear()

    @property
    def calls(self) -> int:
        return sum(entry.calls for entry in self.entries.values())

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.entries.values())


LEDGER = Ledger()  # of this process: collectives are a process's own affair


class Traffic(NamedTuple):
    """Bytes that each rank receives in one step for a loss, on a ring."""

    leanclip: float
    openclip: float  # --local-loss --gather-with-grad: gathers the embeddings, reduce-scatters their gradients
    disco_clip: float  # gathers the embeddings, all-reduces their gradients


def traffic(ledger: Ledger, *, embeddings: int, ranks: int) -> Traffic:
    """A step's traffic from its ledger; `embeddings` is the size in bytes of the global batch's, both sides.

    On a ring a gathered vector of S bytes costs each rank S (N-1)/N, a reduce-scattered one the same, an all-reduced
    one twice that.
    """
    share = (ranks - 1) / ranks
    own = sum(entry.bytes * (2 if purpose in REDUCED else 1) for purpose, entry in ledger.entries.items())
    return Traffic(own * share, 2 * embeddings * share, 3 * embeddings * share)


REDUCED = ("state", "sums")  # purposes that are all-reduced; everything else is gathered

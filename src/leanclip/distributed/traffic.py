"""What the loss sends: counted call by call, beside what others would send for the same step."""

from dataclasses import dataclass, field
from typing import NamedTuple

GATHERED = ("embeddings", "scalars", "ids", "groups")  # a loss's purposes
REDUCED = ("state", "sums")


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

    def of_loss(self) -> Entry:
        """What the loss alone sent."""
        found = [entry for purpose, entry in self.entries.items() if purpose in GATHERED + REDUCED]
        return Entry(sum(entry.calls for entry in found), sum(entry.bytes for entry in found))


LEDGER = Ledger()  # of this process: collectives are a process's own affair


class Traffic(NamedTuple):
    """Bytes that each rank receives in one step for a loss, on a ring."""

    leanclip: float
    openclip: float  # --local-loss --gather-with-grad: gathers the embeddings, reduce-scatters their gradients
    disco_clip: float  # gathers the embeddings, all-reduces their gradients


def traffic(ledger: Ledger, *, ranks: int) -> Traffic:
    """A step's traffic from its ledger, with the embeddings that others would send too.

    On a ring a gathered vector of S bytes costs each rank S (N-1)/N, a reduce-scattered one the same, an all-reduced
    one twice that.
    """
    share = (ranks - 1) / ranks
    embeddings = ledger.entries.get("embeddings", Entry(0, 0)).bytes
    reduced = sum(ledger.entries.get(purpose, Entry(0, 0)).bytes for purpose in REDUCED)
    own = ledger.of_loss().bytes + reduced
    return Traffic(own * share, 2 * embeddings * share, 3 * embeddings * share)

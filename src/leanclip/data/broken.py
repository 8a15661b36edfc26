"""Counting samples that cannot be used, and stopping when there are too many."""

from collections import Counter
from collections.abc import Iterable, Mapping

from leanclip.errors import UserError

FEW = 1000  # as if at least so many had been seen, so that one bad sample at the start ends nothing
EXAMPLES = 3


class BrokenCount:
    """How many samples were met and how many of them were broken, by kind."""

    def __init__(self, most: float, *, seen: int = 0, kinds: Mapping[str, int] | None = None) -> None:
        """With the counts so far, of a run that goes on."""
        self.most, self.seen = most, seen
        self.kinds: Counter[str] = Counter(kinds or {})
        self.examples: list[str] = []

    def add(self, good: int, broken: Mapping[str, int], examples: Iterable[str] = ()) -> None:
        """Count, and raise a UserError where more than the share `most` is broken."""
        self.kinds.update(broken)
        self.seen += good + sum(broken.values())
        self.examples += list(examples)[: EXAMPLES - len(self.examples)]
        total = sum(self.kinds.values())
        if total > self.most * max(self.seen, FEW):
            kinds = ", ".join(f"{count} {kind}" for kind, count in self.kinds.most_common())
            shown = f", for example: {'; '.join(self.examples)}" if self.examples else ""
            raise UserError(
                f"{total} of {self.seen} samples are broken, more than --max-broken {self.most:g} ({kinds}){shown}"
            )

    def metrics(self) -> dict[str, int]:
        """The counts under names for a log."""
        return {f"broken_{kind.replace(' ', '_')}": count for kind, count in self.kinds.items()}

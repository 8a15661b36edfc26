"""What the loader asks of a data set, whatever its form."""

import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

NO_BROKEN: Mapping[str, int] = {}


class BrokenSample(Exception):  # noqa: N818 - it is a verdict on a sample
    """One sample cannot be used: the loader takes another in its place and counts the kind."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(kind, message)  # both, so that the error survives the way out of a worker
        self.kind, self.message = kind, message

    def __str__(self) -> str:
        return self.message


class Part(NamedTuple):
    """Consecutive ids that an epoch visits equally often."""

    start: int
    stop: int
    factor: float


class Source(Protocol):
    """Samples with the ids 0 to len - 1. Inherit from it: what has a body here is the usual case.

    One bad sample raises BrokenSample when it is read; what should end the run raises UserError. A source is pickled
    into the workers, so open files stay behind.
    """

    def __len__(self) -> int: ...

    def image_bytes(self, index: int) -> bytes:
        """The encoded image."""
        ...

    def captions(self, index: int) -> list[str]:
        """All captions: at least one, none of them empty."""
        ...

    def name(self, index: int) -> str:
        """How messages call the sample. Never raises."""
        ...

    def caption(self, index: int, draw: random.Random) -> str:
        """The caption to train on this time."""
        return pick(self.captions(index), None, draw)

    def expect(self, indices: Sequence[int]) -> None:
        """These samples are read next: a chance to ask the storage for all of them at once."""

    @property
    def broken(self) -> Mapping[str, int]:
        """What was left out when the source was opened, by kind. It has no ids."""
        return NO_BROKEN

    @property
    def parts(self) -> Sequence[Part]:
        """How often an epoch visits which ids."""
        return [Part(0, len(self), 1.0)]

    def manifest(self) -> list[dict[str, str | int]] | None:
        """What fixes the ids of a run, one entry per file in the order of the ids; None if nothing needs to."""
        return None


def pick(captions: list[str], weights: Sequence[float] | None, draw: random.Random) -> str:
    """One of the captions, as likely as its weight. Only `random()` is drawn: all Python versions agree on it."""
    at = draw.random() * (len(captions) if weights is None else sum(weights))
    if weights is None:
        return captions[int(at)]
    for caption, weight in zip(captions, weights, strict=True):
        at -= weight
        if at < 0:
            return caption
    return captions[-1]

"""Which samples make step t of epoch e: a pure function, the same whatever the number of ranks and workers.

Nothing here holds n numbers: a position is mapped to an id by computing, not by looking it up.
"""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from leanclip.data.source import Part

Shuffle = Literal["all", "blocks"]

ROUNDS = 6
BLOCK, WINDOW = 1024, 32  # neighbours that stay together, and how many such blocks are mixed with one another


class Permutation:
    """A bijection of [0, n) chosen by a key, in constant memory.

    A position is written as two digits of about sqrt(n) values each, and in turn each digit is shifted by a hash of
    the other (a Feistel network). That permutes slightly more than n numbers; one that falls outside is sent on until
    it falls inside.
    """

    def __init__(self, size: int, *key: int) -> None:
        self.size = size
        self.high = math.isqrt(max(size - 1, 0)) + 1
        self.low = -(-size // self.high)
        self.keys = np.random.SeedSequence(key).generate_state(2 * ROUNDS, np.uint64)

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        found = self._once(np.asarray(positions, np.uint64))
        while (outside := found >= self.size).any():
            found[outside] = self._once(found[outside])
        return found.astype(np.int64)

    def _once(self, positions: np.ndarray) -> np.ndarray:
        high, low = np.divmod(positions, np.uint64(self.low))
        for first, second in self.keys.reshape(-1, 2):
            high = (high + _hash(low + first) % np.uint64(self.high)) % np.uint64(self.high)
            low = (low + _hash(high + second) % np.uint64(self.low)) % np.uint64(self.low)
        return high * np.uint64(self.low) + low


class BlockPermutation:
    """Blocks of neighbours in random order, mixed within a window of some blocks: for storage that dislikes seeks."""

    def __init__(self, size: int, *key: int, block: int = BLOCK, window: int = WINDOW) -> None:
        self.size, self.key = size, key
        self.block = max(1, min(block, size // (4 * window)))
        self.span = self.block * window
        self.blocks = Permutation(size // self.block, *key, 0)
        # Every epoch starts counting elsewhere, so that the last, smaller block is not always the same samples.
        self.shift = int(np.random.SeedSequence([*key, 1]).generate_state(1, np.uint64)[0] % size)

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        mixed = np.array(positions, np.int64)
        window = mixed // self.span
        for number in np.unique(window).tolist():
            start, inside = number * self.span, window == number
            within = Permutation(min(self.span, self.size - start), *self.key, 2, number)
            mixed[inside] = start + within(mixed[inside] - start)
        block, offset = np.divmod(mixed, self.block)
        whole = block < self.blocks.size
        mixed[whole] = self.blocks(block[whole]) * self.block + offset[whole]
        return (mixed + self.shift) % self.size


def _hash(values: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64: every bit of the input moves every bit of the output."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@runtime_checkable
class Visits(Protocol):
    """What an epoch visits, before it is shuffled: `len` slots, each with an id and the number of the copy.

    The slots of copy 0 hold every id at most once.
    """

    def __len__(self) -> int: ...

    def at(self, slots: np.ndarray, *, seed: int, epoch: int) -> tuple[np.ndarray, np.ndarray]: ...


class Once(Visits):
    """Every one of some ids once."""

    def __init__(self, ids: Sequence[int] | np.ndarray | range) -> None:
        self.ids = ids if isinstance(ids, range) else np.asarray(ids, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.ids)

    def at(self, slots: np.ndarray, *, seed: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        found = slots + self.ids.start if isinstance(self.ids, range) else self.ids[slots]
        return found, np.zeros_like(slots)


class Kept(Visits):
    """What is left of `count` ids when the first `held_out` of a fixed permutation are held out."""

    def __init__(self, count: int, held_out: int, seed: int) -> None:
        self.count, self.held_out = count, held_out
        self.permutation = Permutation(count, seed, 0x5EED)

    def __len__(self) -> int:
        return self.count - self.held_out

    def at(self, slots: np.ndarray, *, seed: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        return self.permutation(slots + self.held_out), np.zeros_like(slots)

    def held_out_ids(self) -> np.ndarray:
        return np.sort(self.permutation(np.arange(self.held_out)))


class Weighted(Visits):
    """The ids of each part `factor` times; of a fraction, a share of the part that changes with the epoch."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.lanes: list[tuple[int, int, int]] = []  # first id, ids to choose from, copy
        sizes = []
        for part in parts:
            count, copy = part.stop - part.start, 0
            left = round(part.factor * count)
            while left > 0:
                self.lanes.append((part.start, count, copy))
                sizes.append(min(left, count))
                left, copy = left - count, copy + 1
        self.sizes = np.array(sizes, np.int64)
        self.ends = np.cumsum(self.sizes)

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def at(self, slots: np.ndarray, *, seed: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        lanes = np.searchsorted(self.ends, slots, side="right")
        ids, copies = np.empty_like(slots), np.empty_like(slots)
        for lane in np.unique(lanes).tolist():
            here, (start, count, copy) = lanes == lane, self.lanes[lane]
            inside = slots[here] - (self.ends[lane] - self.sizes[lane])
            if self.sizes[lane] < count:
                inside = Permutation(count, seed, epoch, 0xFAC7, lane)(inside)
            ids[here], copies[here] = start + inside, copy
        return ids, copies


class Order:
    """The global batches of every epoch, and who stands in for a sample that is broken."""

    def __init__(self, visits: Visits, *, batch: int, seed: int, shuffle: Shuffle = "all") -> None:
        self.visits, self.batch, self.seed, self.shuffle = visits, batch, seed, shuffle
        self.repeats = isinstance(visits, Weighted)

    @property
    def steps(self) -> int:
        """Steps an epoch: a last batch that is not full is left out."""
        return len(self.visits) // self.batch

    def batch_ids(self, epoch: int, step: int) -> tuple[np.ndarray, np.ndarray]:
        """The ids of a global batch and their copies. An id that a weighted source repeats within the batch is -1."""
        ids, copies = self._at(epoch, np.arange(step * self.batch, (step + 1) * self.batch))
        if self.repeats:
            first = np.zeros(self.batch, bool)
            first[np.unique(ids, return_index=True)[1]] = True
            ids = np.where(first, ids, -1)
        return ids, copies

    def replacements(self, epoch: int, step: int, slot: int) -> Iterator[int]:
        """The ids that may take a slot of a step, in order: those that hold the same slot in the steps after it.

        Different slots of a batch get different ids this way, whoever asks, so ranks need not talk about it.
        """
        taken = set(self.batch_ids(epoch, step)[0].tolist()) if self.repeats else set()
        others = ((step + ahead) % self.steps * self.batch + slot for ahead in range(1, self.steps))
        leftover = range(self.steps * self.batch + slot, len(self.visits))[:1]
        for position in chain(others, leftover):
            ids, copies = self._at(epoch, np.array([position]))
            if copies[0] == 0 and int(ids[0]) not in taken:
                yield int(ids[0])

    def _at(self, epoch: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        slots = _permutation(len(self.visits), self.seed, epoch, self.shuffle)(positions)
        return self.visits.at(slots, seed=self.seed, epoch=epoch)


@lru_cache(maxsize=4)
def _permutation(size: int, seed: int, epoch: int, shuffle: Shuffle) -> Permutation | BlockPermutation:
    kind = BlockPermutation if shuffle == "blocks" else Permutation
    return kind(size, seed, epoch)


def sample_seed(seed: int, epoch: int, sample_id: int, copy: int = 0) -> int:
    """A seed for everything random about one visit to a sample: caption choice, augmentation."""
    return int(np.random.SeedSequence([seed, epoch, sample_id, copy]).generate_state(1, np.uint64)[0])

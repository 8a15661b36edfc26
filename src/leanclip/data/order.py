"""Which samples make step t of epoch e: a pure function, independent of the number of ranks and workers.

No table of n entries is stored: the id at a position is computed.
"""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import Literal

import numpy as np

from leanclip.data.source import Part

Shuffle = Literal["all", "blocks"]

FEISTEL_ROUNDS = 6
BLOCK_SAMPLES = 1024  # neighbours that stay together
WINDOW_BLOCKS = 32  # blocks whose samples are mixed with one another
NO_IDS = np.zeros(0, np.int64)
SPLIT_KEY, FRACTION_KEY, CAPTION_KEY = 0x5EED, 0xFAC7, 0xCA97  # keep these apart from the permutations of the epochs


class Permutation:
    """A bijection of [0, n) chosen by a key, in constant memory.

    A Feistel network: a position is written as two digits of about sqrt(n) values each, and each digit in turn is
    shifted by a hash of the other. This permutes slightly more than n numbers; a result outside of [0, n) is permuted
    again until it is inside (cycle walking).
    """

    def __init__(self, size: int, *key: int) -> None:
        self.size = size
        self.high = math.isqrt(max(size - 1, 0)) + 1
        self.low = -(-size // self.high)
        self.keys = np.random.SeedSequence(key).generate_state(2 * FEISTEL_ROUNDS, np.uint64)

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        permuted = self._permute(np.asarray(positions, np.uint64))
        while (outside := permuted >= self.size).any():
            permuted[outside] = self._permute(permuted[outside])
        return permuted.astype(np.int64)

    def _permute(self, positions: np.ndarray) -> np.ndarray:
        high, low = np.divmod(positions, np.uint64(self.low))
        for first, second in self.keys.reshape(-1, 2):
            high = (high + _hash(low + first) % np.uint64(self.high)) % np.uint64(self.high)
            low = (low + _hash(high + second) % np.uint64(self.low)) % np.uint64(self.low)
        return high * np.uint64(self.low) + low


class BlockPermutation:
    """Blocks of neighbours in random order, mixed within a window of blocks: for storage with slow seeks."""

    def __init__(self, size: int, *key: int, block: int = BLOCK_SAMPLES, window: int = WINDOW_BLOCKS) -> None:
        self.size, self.key = size, key
        self.block = max(1, min(block, size // (4 * window)))
        self.span = self.block * window
        self.blocks = Permutation(size // self.block, *key, 0)
        # Another offset for every key, so that the last, smaller block does not always hold the same samples.
        self.shift = int(np.random.SeedSequence([*key, 1]).generate_state(1, np.uint64)[0] % size)

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        mixed = np.array(positions, np.int64)
        window = mixed // self.span
        for number in np.unique(window).tolist():
            start, inside = number * self.span, window == number
            within = Permutation(min(self.span, self.size - start), *self.key, 2, number)
            mixed[inside] = start + within(mixed[inside] - start)
        block, offset = np.divmod(mixed, self.block)
        complete = block < self.blocks.size
        mixed[complete] = self.blocks(block[complete]) * self.block + offset[complete]
        return (mixed + self.shift) % self.size


def _hash(values: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64: every input bit affects every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class SplitVisits:
    """Each of `count` ids once, without the first `held_out` ids of a fixed permutation."""

    repeats = False

    def __init__(self, count: int, held_out: int, seed: int) -> None:
        self.count, self.held_out = count, held_out
        self.permutation = Permutation(count, seed, SPLIT_KEY)
        self.held_out_ids = np.sort(self.permutation(np.arange(held_out)))
        self.training_ids: np.ndarray | None = None  # only where they are not computed: 8 bytes each

    def keep_together(self, later: np.ndarray, first: np.ndarray) -> None:
        """Keep each of the `later` ids, sorted, on the side of its `first` one: hold out whole groups, in the order
        of the permutation, until they are enough."""
        order = self.permutation(np.arange(self.held_out))
        groups = np.where(np.isin(order, later), first[np.searchsorted(later, order) % len(later)], order)
        groups = groups[np.sort(np.unique(groups, return_index=True)[1])]
        sizes = 1 + (np.sort(first).searchsorted(groups, "right") - np.sort(first).searchsorted(groups))
        chosen = groups[np.cumsum(sizes) - sizes < self.held_out]
        self.held_out_ids = np.union1d(chosen, later[np.isin(first, chosen)])
        training_ids = self.permutation(np.arange(self.held_out, self.count))
        kept = training_ids[~np.isin(training_ids, self.held_out_ids)]
        self.training_ids = np.concatenate([kept, np.setdiff1d(order, self.held_out_ids)])

    def ids(self) -> np.ndarray:
        ids = self.training_ids
        return self.permutation(np.arange(self.held_out, self.count)) if ids is None else ids

    def without(self, excluded: np.ndarray) -> "SplitVisits":
        ids = self.ids()
        self.training_ids = ids[~np.isin(ids, excluded)]
        return self

    def __len__(self) -> int:
        return self.count - len(self.held_out_ids) if self.training_ids is None else len(self.training_ids)

    def at(self, slots: np.ndarray, *, seed: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        ids = self.permutation(slots + self.held_out) if self.training_ids is None else self.training_ids[slots]
        return ids, np.zeros_like(slots)


class WeightedVisits:
    """The ids of each part `factor` times; for a fractional factor, a random subset that changes with the epoch."""

    def __init__(self, parts: Sequence[Part], excluded: np.ndarray = NO_IDS) -> None:
        """`excluded`: sorted ids that are not visited."""
        self.parts = parts
        # First id, number of ids to choose from, copy number; for each excluded id the number of others before it.
        self.copies: list[tuple[int, int, int, np.ndarray]] = []
        sizes = []
        for part in parts:
            inside = excluded[np.searchsorted(excluded, part.start) : np.searchsorted(excluded, part.stop)]
            before = inside - part.start - np.arange(len(inside))
            count = part.stop - part.start - len(inside)
            visits = round(part.factor * count)
            for copy in range(-(-visits // count) if count else 0):
                self.copies.append((part.start, count, copy, before))
                sizes.append(min(visits - copy * count, count))
        self.repeats = any(copy for _, _, copy, _ in self.copies)
        self.sizes = np.array(sizes, np.int64)
        self.ends = np.cumsum(self.sizes)

    def ids(self) -> np.ndarray:
        firsts = [(start, np.arange(count), before) for start, count, copy, before in self.copies if copy == 0]
        parts = [start + offsets + np.searchsorted(before, offsets, "right") for start, offsets, before in firsts]
        return np.concatenate([NO_IDS, *parts])

    def without(self, excluded: np.ndarray) -> "WeightedVisits":
        return WeightedVisits(self.parts, excluded)

    def __len__(self) -> int:
        return int(self.sizes.sum())

    def at(self, slots: np.ndarray, *, seed: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        numbers = np.searchsorted(self.ends, slots, side="right")
        ids, copies = np.empty_like(slots), np.empty_like(slots)
        for number in np.unique(numbers).tolist():
            selected, (start, count, copy, before) = numbers == number, self.copies[number]
            offsets = slots[selected] - (self.ends[number] - self.sizes[number])
            if self.sizes[number] < count:
                offsets = Permutation(count, seed, epoch, FRACTION_KEY, number)(offsets)
            ids[selected], copies[selected] = start + offsets + np.searchsorted(before, offsets, "right"), copy
        return ids, copies


# The visits of one epoch before shuffling: `len` slots. `at` gives the sample ids and copy numbers of slots. Among
# the slots of copy 0, every id occurs at most once; `repeats` if there are other copies. `without` leaves sorted ids
# out; the others keep theirs. `ids` are those that some epoch visits, each once.
Visits = SplitVisits | WeightedVisits


class Order:
    """The global batches of every epoch, and the replacements of broken samples."""

    def __init__(self, visits: Visits, *, batch: int, seed: int, shuffle: Shuffle = "all") -> None:
        self.visits, self.batch, self.seed, self.shuffle = visits, batch, seed, shuffle

    @property
    def steps(self) -> int:
        """Steps per epoch; an incomplete last batch is dropped."""
        return len(self.visits) // self.batch

    def batch_ids(self, epoch: int, steps: range) -> tuple[np.ndarray, np.ndarray]:
        """The ids of consecutive global batches and their copy numbers, (steps, batch) each. An id that is repeated
        within its batch becomes -1."""
        ids, copies = self._at(epoch, np.arange(steps.start * self.batch, steps.stop * self.batch))
        ids, copies = ids.reshape(-1, self.batch), copies.reshape(-1, self.batch)
        for row in ids if self.visits.repeats else ():
            repeated = np.ones(self.batch, bool)
            repeated[np.unique(row, return_index=True)[1]] = False
            row[repeated] = -1
        return ids, copies

    def replacements(self, epoch: int, step: int, slot: int) -> Iterator[int]:
        """The ids that may replace the sample in a slot of a step, in order: the ids in this slot of later steps.

        Different slots of a batch get different ids, so the ranks need no communication.
        """
        used = set(self.batch_ids(epoch, range(step, step + 1))[0][0].tolist()) if self.visits.repeats else set()
        later = ((step + distance) % self.steps * self.batch + slot for distance in range(1, self.steps))
        dropped = range(self.steps * self.batch + slot, len(self.visits))[:1]
        for position in chain(later, dropped):
            ids, copies = self._at(epoch, np.array([position]))
            if copies[0] == 0 and int(ids[0]) not in used:
                yield int(ids[0])

    def _at(self, epoch: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        slots = _permutation(len(self.visits), self.seed, epoch, self.shuffle)(positions)
        return self.visits.at(slots, seed=self.seed, epoch=epoch)


@lru_cache(maxsize=4)
def _permutation(size: int, seed: int, epoch: int, shuffle: Shuffle) -> Permutation | BlockPermutation:
    return (BlockPermutation if shuffle == "blocks" else Permutation)(size, seed, epoch)


def sample_seed(seed: int, epoch: int, sample_id: int, copy: int = 0) -> int:
    """The seed of one visit to a sample: it determines the augmentation."""
    return int(np.random.SeedSequence([seed, epoch, sample_id, copy]).generate_state(1, np.uint64)[0])


def caption_draws(seed: int, epoch: int, sample_ids: np.ndarray, copies: np.ndarray) -> np.ndarray:
    """A number in [0, 1) for each visit, by which its caption is chosen."""
    first, second = _caption_keys(seed, epoch)
    mixed = _hash(_hash(sample_ids.astype(np.uint64) + first) + copies.astype(np.uint64) + second)
    return (mixed >> np.uint64(11)) * 2.0**-53


@lru_cache(maxsize=4)
def _caption_keys(seed: int, epoch: int) -> np.ndarray:
    return np.random.SeedSequence([seed, epoch, CAPTION_KEY]).generate_state(2, np.uint64)

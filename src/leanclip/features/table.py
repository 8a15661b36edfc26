"""Features of samples by id, in files that NumPy maps: larger than memory, filled by several processes, resumable.

features.npy  (rows, D) float16   the rows of one sample follow each other: its views, or its captions
first.npy     (n + 1,) int64      the first row of each sample
done.npy      (n,) uint8          0 not computed, 1 computed, 2 broken
weights.npy   (rows,) float32     how often a row is drawn, where that differs
broken.jsonl                      id, kind and message of each broken sample
table.json                        what the features were computed from
"""

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from leanclip.data.source import BrokenSample, pick
from leanclip.filesystem import write_atomically

MISSING, COMPUTED, BROKEN = 0, 1, 2


class FeatureTable:
    def __init__(self, directory: Path, *, writable: bool = False) -> None:
        """Open a table. The files stay on disk; a row that is read comes into memory."""
        mode = "r+" if writable else "r"
        self.directory = directory
        self.features: np.memmap = np.load(directory / "features.npy", mmap_mode=mode)
        self.first: np.ndarray = np.load(directory / "first.npy", mmap_mode="r")
        self.done: np.ndarray = np.load(directory / "done.npy", mmap_mode=mode)
        weights = directory / "weights.npy"
        self.weights: np.ndarray | None = np.load(weights, mmap_mode="r") if weights.is_file() else None
        self._broken: dict[int, tuple[str, str]] | None = None
        self.seconds: float | None = None  # that this process took to fill it

    @classmethod
    def create(
        cls, directory: Path, first: np.ndarray, dim: int, facts: dict[str, Any], weights: np.ndarray | None = None
    ) -> "FeatureTable":
        directory.mkdir(parents=True, exist_ok=True)
        shapes = {"features": ((int(first[-1]), dim), np.float16), "done": ((len(first) - 1,), np.uint8)}
        for name, (shape, dtype) in shapes.items():
            np.lib.format.open_memmap(directory / f"{name}.npy", mode="w+", dtype=dtype, shape=shape)
        np.save(directory / "first.npy", np.asarray(first, np.int64))
        if weights is not None:
            np.save(directory / "weights.npy", np.asarray(weights, np.float32))
        write_atomically(directory / "table.json", json.dumps(facts, indent=1))  # last: a table without it is not one
        return cls(directory, writable=True)

    def __reduce__(self) -> tuple[Any, ...]:
        changed = self.weights is not None and not isinstance(self.weights, np.memmap)
        # A worker maps the files itself.
        return FeatureTable, (self.directory,), {"weights": self.weights} if changed else {}

    def leave_out(self, captions: Mapping[int, Iterable[int]]) -> None:
        """Never draw these rows, by sample and number."""
        rows = [int(self.first[index]) + number for index, numbers in captions.items() for number in numbers]
        if rows:
            self.weights = np.ones(len(self.features), np.float32) if self.weights is None else np.array(self.weights)
            self.weights[rows] = 0

    @property
    def dim(self) -> int:
        return self.features.shape[1]

    @property
    def nbytes(self) -> int:
        return self.features.nbytes

    def missing(self) -> np.ndarray:
        """The ids whose features are not computed yet."""
        return np.flatnonzero(np.asarray(self.done) == MISSING)

    def write(self, ids: Sequence[int], rows: np.ndarray) -> None:
        """Store the rows of these ids, one sample after the other."""
        start = 0
        for index in ids:
            count = int(self.first[index + 1] - self.first[index])
            self.features[self.first[index] : self.first[index + 1]] = rows[start : start + count]
            start += count
        self.features.flush()  # before the marks: a row that is marked is complete, also after a power failure
        self.done[np.asarray(ids, np.int64)] = COMPUTED

    def mark_broken(self, index: int, kind: str, message: str) -> None:
        with (self.directory / "broken.jsonl").open("a") as file:  # one write below a page: lines do not mix
            file.write(json.dumps([index, kind, message]) + "\n")
        self.done[index] = BROKEN

    def view(self, index: int, number: int) -> np.ndarray:
        """A row of a sample, the numbers beyond its last row starting again at the first."""
        rows = self.rows(index)
        return rows[number % len(rows)]

    def draw(self, index: int, rng: random.Random) -> tuple[np.ndarray, int]:
        """A row of a sample, drawn as one of its captions is, and its number."""
        rows, start = self.rows(index), int(self.first[index])
        weights = None if self.weights is None else self.weights[start : start + len(rows)].tolist()
        number = pick(len(rows), weights, rng)
        return rows[number], number

    def rows(self, index: int) -> np.ndarray:
        """All rows of a sample."""
        if self.done[index] == BROKEN:
            if self._broken is None:
                lines = (self.directory / "broken.jsonl").read_text().splitlines()
                self._broken = {entry[0]: (entry[1], entry[2]) for entry in map(json.loads, lines)}
            raise BrokenSample(*self._broken[index])
        return self.features[self.first[index] : self.first[index + 1]]

"""Features of samples by id, in files that NumPy maps: larger than memory, filled by several processes, resumable.

features.npy  (rows, D) float16   the rows of one sample follow each other: its views, or its captions
first.npy     (n + 1,) int64      the first row of each sample
done.npy      (n,) uint8          0 not computed, 1 computed, 2 broken
weights.npy   (rows,) float32     how often a row is drawn, where that differs
broken.jsonl                      id, kind and message of each broken sample
table.json                        what the features were computed from
"""

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from leanclip.data.source import BrokenSample
from leanclip.errors import first_line, one_line
from leanclip.filesystem import lines_of, parse_json, write_atomically
from leanclip.progress import ACTIVITY

MISSING, COMPUTED, BROKEN = 0, 1, 2
DEVICE_SHARE = 4  # tables take at most a quarter of a GPU's free memory
COPIED_ROWS = 1 << 16  # at once
ROWS_AT_ONCE, NUMBERS_AT_ONCE = 1 << 11, 1 << 16  # features of samples, or their row numbers
QUICK_BYTES = 4 << 30  # of a mapped table that stays in memory once it was read


class FeatureTable:
    """Features of samples by id. `rows` of a sample that could not be read raises BrokenSample.

    Views, or draws of captions, of many visits become row numbers; `take` gives what a batch holds of them: their
    features, or the numbers themselves where the table lies on the compute device, for `gather` to read them there.
    """

    def __init__(self, directory: Path, *, writable: bool = False) -> None:
        """Open a table. The files stay on disk; a row that is read comes into memory."""
        mode = "r+" if writable else "r"
        self.directory = directory
        self.features: np.memmap = mapped(directory / "features.npy", mode)
        # As plain arrays, whose elements are read in a third of the time.
        self.first = np.asarray(mapped(directory / "first.npy", "r"))
        self.done = np.asarray(mapped(directory / "done.npy", mode))
        weights = directory / "weights.npy"
        self.weights: np.ndarray | None = mapped(weights, "r") if weights.exists() else None
        self._broken: dict[int, tuple[str, str]] | None = None
        self.seconds: float | None = None  # that this process took to fill it
        self.on_device = False  # batches hold row numbers, and `copy` in the training process is read
        self.copy: Tensor | None = None

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

    def check(self) -> None:
        """A ValueError where the files do not belong together."""
        rows, weights = len(self.features), self.weights
        shapes = self.features.ndim, self.done.shape, self.first.shape
        types = self.features.dtype, self.done.dtype, self.first.dtype
        if shapes != (2, self.done.shape[:1], (len(self.done) + 1,)) or types != (np.float16, np.uint8, np.int64):
            raise ValueError("arrays of other shapes or types")
        if (self.first[0], self.first[-1]) != (0, rows) or (np.diff(self.first) < 0).any():
            raise ValueError(f"impossible rows: {rows:,} vectors of {len(self.done):,} samples")
        if (self.done > BROKEN).any():
            raise ValueError("impossible marks")
        if weights is not None and (weights.shape != (rows,) or not (np.isfinite(weights) & (weights >= 0)).all()):
            raise ValueError("impossible weights")

    def __reduce__(self) -> tuple[Any, ...]:
        state: dict[str, Any] = {"on_device": self.on_device}
        if self.weights is not None and not isinstance(self.weights, np.memmap):
            state["weights"] = self.weights
        return FeatureTable, (self.directory,), state  # a worker maps the files itself

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

    @property
    def quick(self) -> bool:
        """Whether reading rows needs no worker processes."""
        return self.on_device or self.nbytes <= QUICK_BYTES

    @property
    def at_once(self) -> int:
        """Of how many samples rows are best read together."""
        return NUMBERS_AT_ONCE if self.on_device else ROWS_AT_ONCE

    def missing(self) -> np.ndarray:
        """The ids whose features are not computed yet."""
        return np.flatnonzero(self.done == MISSING)

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

    def broken(self, ids: np.ndarray) -> np.ndarray:
        return self.done[ids] == BROKEN

    def views(self, ids: np.ndarray, visits: np.ndarray) -> np.ndarray:
        """The row of each sample's view: a visit beyond the last one starts again at the first."""
        first = self.first[ids]
        return first + visits % (self.first[ids + 1] - first)

    def drawn(self, ids: np.ndarray, draws: np.ndarray) -> np.ndarray:
        """A row of each sample, chosen as `pick` chooses one of its captions."""
        first, count = self.first[ids], self.first[ids + 1] - self.first[ids]
        if self.weights is None:
            return first + (draws * count).astype(np.int64)
        ends = count.cumsum().reshape(count.shape)  # of the samples' rows, when these follow each other
        rows = np.repeat(first - (ends - count), count.ravel()) + np.arange(ends.max(initial=0))
        edges = np.concatenate([[0.0], np.cumsum(self.weights[rows], dtype=np.float64)])
        begin, end = edges[ends - count], edges[ends]
        places = np.searchsorted(edges, begin + draws * (end - begin), "right") - 1
        return rows[np.minimum(places, ends - 1)]

    def take(self, numbers: np.ndarray) -> Tensor:
        """What a batch holds of these rows."""
        return torch.from_numpy(numbers if self.on_device else self.features[numbers])

    def gather(self, taken: Tensor) -> Tensor:
        """The features of a batch, on its device."""
        return taken if self.copy is None else self.copy.index_select(0, taken)

    def copy_to(self, device: torch.device) -> None:
        self.copy, self.on_device = torch.empty(self.features.shape, dtype=torch.float16, device=device), True
        for start in range(0, len(self.copy), COPIED_ROWS):
            self.copy[start : start + COPIED_ROWS] = torch.from_numpy(
                self.features[start : start + COPIED_ROWS].copy()
            )
            ACTIVITY.still_working()

    def rows(self, index: int) -> np.ndarray:
        """All rows of a sample."""
        if self.done[index] == BROKEN:
            if self._broken is None:
                self._broken = dict(self._read_broken())
            raise BrokenSample(*self._broken.get(index, ("unknown", f"sample {index} was broken")))
        return self.features[self.first[index] : self.first[index + 1]]

    def _read_broken(self) -> Iterator[tuple[int, tuple[str, str]]]:
        path = self.directory / "broken.jsonl"
        for line in lines_of(path) if path.is_file() else ():
            with contextlib.suppress(ValueError, TypeError):  # a damaged line: the marks count, not the messages
                index, kind, message = parse_json(line)
                yield int(index), (str(kind), one_line(str(message)))


def mapped(path: Path, mode: Literal["r", "r+"]) -> Any:
    """The array in a file. A ValueError if it is damaged: NumPy's parser raises errors of any type."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path.name} is no regular file")  # opening a pipe would wait
    try:
        return np.lib.format.open_memmap(path, mode=mode)
    except OSError:
        raise
    except Exception as error:
        raise ValueError(f"{path.name} is damaged ({first_line(error)})") from error


class Features(NamedTuple):
    """Of locked towers, read in the place of pixels or of captions."""

    images: FeatureTable | None = None
    texts: FeatureTable | None = None


NO_FEATURES = Features()


def copy_to_gpu(tables: Iterable[FeatureTable | None], device: torch.device) -> None:
    """The tables that fit into a share of the GPU's free memory; the others stay mapped."""
    room = torch.cuda.mem_get_info(device)[0] // DEVICE_SHARE
    for table in tables:
        if table is not None and table.nbytes <= room:
            table.copy_to(device)
            room -= table.nbytes

"""The metrics of a run: a JSONL file, and the trackers that show the same numbers."""

import errno
import itertools
import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leanclip.errors import first_line
from leanclip.filesystem import lines_of, parse_json, write_atomically
from leanclip.losses.pair_weights import RANGE, Refit
from leanclip.runs.histograms import Histogram
from leanclip.runs.trackers import Tracker

BEFORE = "before"  # the weights of an evaluation before the first step of a run that starts from trained ones


class Result(NamedTuple):
    step: int
    metrics: Mapping[str, float]
    before: Mapping[str, float] | None = None  # the metrics before the first step, of a run that starts from weights


class MetricsLog:
    """Appends to metrics.jsonl and sends the values to the trackers. `results` holds the last evaluation of each set.

    Lines that do not fit on a full disk are kept in memory and written later, each of them once and complete.
    """

    def __init__(self, path: Path, trackers: Sequence[Tracker] = (), *, resume_at: int | None = None) -> None:
        self.path, self.trackers = path, list(trackers)
        self.warn: Callable[[str], None] = lambda message: print(f"warning: {message}")
        self.results: dict[str, Result] = {}
        self._pending: deque[bytes] = deque()
        self._open(resume_at)

    def rewind(self, step: int) -> None:
        """Drop the lines after a step, which will be computed again."""
        self._file.close()
        pending = [line for line in self._pending if json.loads(line)["step"] <= step]
        self._open(step)
        self._pending.extend(pending)
        self._send(lambda tracker: tracker.rewind(step))

    def _open(self, resume_at: int | None) -> None:
        self._pending.clear()
        if resume_at is not None and self.path.exists():
            self._restore(resume_at)
        self._file = self.path.open("ab", buffering=0)
        self._size = self.path.stat().st_size

    def _restore(self, resume_at: int) -> None:
        """Keep the lines up to a step. A run can continue without the others, so a damaged file is moved aside."""
        records, damaged = read_records(self.path)
        kept = [(line, record) for line, record in records if record["step"] <= resume_at]
        if damaged:
            names = (f"{self.path.name}.damaged-{number}" for number in itertools.count(1))
            aside = next(path for name in names if not (path := self.path.with_name(name)).exists())
            self.path.rename(aside)
            self.warn(f"{self.path.name} has {damaged} unreadable lines: it was moved aside, kept as {aside.name}")
        write_atomically(self.path, b"".join(line + b"\n" for line, _ in kept))
        self.results = results_of(record for _, record in kept)

    def train(self, **values: Any) -> None:
        self._write({"kind": "train"} | values)
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        scalars = {name: value for name, value in numbers.items() if name not in ("step", "samples")}
        self._send(lambda tracker: tracker.scalars("train", scalars, values["step"]))

    def evaluation(
        self,
        *,
        step: int,
        epoch: float,
        name: str,
        metrics: Mapping[str, float],
        weights: str | None = None,
        broken: int = 0,
    ) -> None:
        """`weights` is "ema" if the averaged weights were evaluated, "before" for those that a run starts from.
        `broken` samples were left out."""
        record = {"kind": "eval", "step": step, "epoch": epoch, "set": name}
        record |= {} if weights is None else {"weights": weights}
        record |= {"broken": broken} if broken else {}
        record["metrics"] = dict(metrics)
        self._write(record)
        self.results = results_of([record], self.results)
        self._send(lambda tracker: tracker.scalars(name, metrics, step))

    def histograms(self, *, step: int, epoch: float, histograms: Sequence[Histogram]) -> None:
        for histogram in histograms:
            self._write({"kind": "histogram", "step": step, "epoch": epoch} | asdict(histogram))
            self._send(lambda tracker, histogram=histogram: tracker.histogram(histogram, step))

    def pair_weights(self, *, step: int, epoch: float, refit: Refit) -> None:
        row = refit._asdict() | {"fit": refit.fit._asdict(), "range": RANGE}
        self._write({"kind": "pair_weights", "step": step, "epoch": epoch} | row)

    def close(self, *, failed: bool = False) -> None:
        self.flush()
        self._file.close()
        self._send(lambda tracker: tracker.close(failed=failed))

    def _send(self, call: Callable[[Tracker], None]) -> None:
        """A tracker that fails is removed; the run continues without it."""
        for tracker in list(self.trackers):
            try:
                call(tracker)
            except Exception as error:  # of any library, for any reason
                self.trackers.remove(tracker)
                self.warn(f"{type(tracker).__name__} failed and is not used any more ({first_line(error)})")

    def _write(self, record: dict[str, Any]) -> None:
        self._pending.append((json.dumps(finite(record)) + "\n").encode())
        self.flush()

    def flush(self) -> None:
        try:
            while self._pending:
                written = self._file.write(self._pending[0])
                if written != len(self._pending[0]):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._size += len(self._pending.popleft())
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(self._size)
            if len(self._pending) == 1:
                self.warn(f"cannot write metrics.jsonl ({error.strerror}); its lines are kept in memory")


def read_results(path: Path) -> dict[str, Result]:
    """The last evaluation on each set in a metrics.jsonl, as far as it can be read."""
    return results_of(record for _, record in read_records(path)[0]) if path.exists() else {}


def results_of(records: Iterable[Mapping[str, Any]], earlier: Mapping[str, Result] = {}) -> dict[str, Result]:
    """The last evaluation of each set, with the one before training if that started from weights."""
    results = dict(earlier)
    for record in (record for record in records if record.get("kind") == "eval"):
        name, metrics = record["set"], record["metrics"]
        before = metrics if record.get("weights") == BEFORE else None
        if before is None and name in results:
            before = results[name].before
        results[name] = Result(record["step"], metrics, before)
    return results


def read_records(path: Path) -> tuple[list[tuple[bytes, dict[str, Any]]], int]:
    """The lines of a metrics.jsonl with their records, and the number of lines that hold none."""
    if not path.is_file():
        return [], 1
    records: list[tuple[bytes, dict[str, Any]]] = []
    damaged = 0
    for line in lines_of(path):
        try:
            records.append((line.removesuffix(b"\n"), _checked(parse_json(line))))
        except ValueError:
            damaged += line.endswith(b"\n")  # a killed run did not finish the last one
    return records, damaged


def _checked(record: Any) -> dict[str, Any]:
    """A record with the parts that a resumed run and its model card need; anything else is a ValueError."""
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        raise ValueError("no record")
    if record.get("kind") == "eval":
        metrics = record.get("metrics")
        if not isinstance(record.get("set"), str) or not isinstance(metrics, dict):
            raise ValueError("no evaluation")
        if not all(value is None or isinstance(value, int | float) for value in metrics.values()):
            raise ValueError("no metrics")
    return record


def finite(value: Any, *, as_text: bool = False) -> Any:
    """Replace NaN and infinity, which JSON lacks, by None, or by "nan", "inf" and "-inf"."""
    if isinstance(value, dict):
        return {key: finite(item, as_text=as_text) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item, as_text=as_text) for item in value]
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return str(value) if as_text else None


def to_host(metrics: Mapping[str, Tensor | float | str]) -> dict[str, float | str]:
    """Copy device values to the host; synchronises with the device."""
    return {name: value.item() if isinstance(value, Tensor) else value for name, value in metrics.items()}


def memory(device: torch.device) -> dict[str, float]:
    """GiB: the GPU's peak since the last call; on a CPU the resident memory of this process."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return {"gpu_memory_gib": peak / 2**30}
    pages = Path("/proc/self/statm")
    if not pages.is_file():
        return {}
    import resource

    return {"resident_gib": int(pages.read_text().split()[1]) * resource.getpagesize() / 2**30}

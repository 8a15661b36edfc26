"""Where numbers go: a JSONL file, and the trackers that show the same numbers."""

import errno
import json
import math
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leanclip.filesystem import write_atomically
from leanclip.runs.histograms import Histogram
from leanclip.runs.trackers import Tracker

INCOMPLETE = 2**62  # instead of a step: a line that a killed run did not finish


class Result(NamedTuple):
    """The last evaluation on a set."""

    step: int
    metrics: Mapping[str, float]


class MetricsLog:
    """Appends to metrics.jsonl and tells the trackers. `results` holds each set's last evaluation.

    What a full disk does not take is kept and written when there is room again: a line is there once and whole.
    """

    def __init__(self, path: Path, trackers: Sequence[Tracker] = (), *, resume_at: int | None = None) -> None:
        self.path, self.trackers = path, list(trackers)
        self.warn: Callable[[str], None] = print
        self.results: dict[str, Result] = {}
        self._waiting: deque[bytes] = deque()
        self._open(resume_at)

    def rewind(self, step: int) -> None:
        """Forget what came after a step, which will be computed again."""
        self._file.close()
        waiting = [line for line in self._waiting if _step(line.decode()) <= step]
        self._open(step)
        self._waiting.extend(waiting)
        self._tell(lambda tracker: tracker.rewind(step))

    def _open(self, resume_at: int | None) -> None:
        self._waiting.clear()
        if resume_at is not None and self.path.is_file():
            lines = self.path.read_text(errors="replace").splitlines()
            write_atomically(self.path, "".join(line + "\n" for line in lines if _step(line) <= resume_at))
            self.results = read_results(self.path)
        self._file = self.path.open("ab", buffering=0)
        self._size = self.path.stat().st_size

    def train(self, **values: Any) -> None:
        self._write({"kind": "train"} | values)
        shown = {
            name: value
            for name, value in values.items()
            if isinstance(value, int | float) and name not in ("step", "samples")
        }
        self._tell(lambda tracker: tracker.scalars("train", shown, values["step"]))

    def evaluation(
        self, *, step: int, epoch: float, name: str, metrics: Mapping[str, float], weights: str | None = None
    ) -> None:
        """`weights` says which were evaluated where they are not those that train: "ema"."""
        of = {} if weights is None else {"weights": weights}
        self._write({"kind": "eval", "step": step, "epoch": epoch, "set": name} | of | {"metrics": dict(metrics)})
        self.results[name] = Result(step, dict(metrics))
        self._tell(lambda tracker: tracker.scalars(name, metrics, step))

    def histograms(self, *, step: int, epoch: float, found: Sequence[Histogram]) -> None:
        for histogram in found:
            self._write({"kind": "histogram", "step": step, "epoch": epoch} | asdict(histogram))
            self._tell(lambda tracker, histogram=histogram: tracker.histogram(histogram, step))

    def close(self, *, failed: bool = False) -> None:
        self.flush()
        self._file.close()
        self._tell(lambda tracker: tracker.close(failed=failed))

    def _tell(self, call: Callable[[Tracker], None]) -> None:
        """A tracker that fails is left out from then on; the run does not depend on it."""
        for tracker in list(self.trackers):
            try:
                call(tracker)
            except Exception as error:  # of any library, for any reason
                self.trackers.remove(tracker)
                self.warn(f"{type(tracker).__name__} failed and is left out from now on ({error})")

    def _write(self, record: dict[str, Any]) -> None:
        self._waiting.append((json.dumps(finite(record)) + "\n").encode())
        self.flush()

    def flush(self) -> None:
        """Write the lines that wait, if the disk takes them."""
        try:
            while self._waiting:
                written = self._file.write(self._waiting[0])
                if written != len(self._waiting[0]):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._size += len(self._waiting.popleft())
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(self._size)
            if len(self._waiting) == 1:
                self.warn(f"metrics.jsonl cannot be written ({error.strerror}); its lines wait")


def read_results(path: Path) -> dict[str, Result]:
    """The last evaluation on each set in a metrics.jsonl; incomplete lines do not count."""
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    records = [json.loads(line) for line in lines if _step(line) != INCOMPLETE]
    return {
        record["set"]: Result(record["step"], record["metrics"]) for record in records if record.get("kind") == "eval"
    }


def finite(value: Any) -> Any:
    """JSON has no NaN: such a number becomes null."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_host(metrics: Mapping[str, Tensor | float | str]) -> dict[str, float | str]:
    """Read device values; this waits for the device."""
    return {name: value.item() if isinstance(value, Tensor) else value for name, value in metrics.items()}


def memory(device: torch.device) -> dict[str, float]:
    """GiB: the GPU's peak since the last call, or without a GPU what this process has resident now."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return {"gpu_memory_gib": peak / 2**30}
    pages = Path("/proc/self/statm")
    if not pages.is_file():
        return {}
    import resource

    return {"resident_gib": int(pages.read_text().split()[1]) * resource.getpagesize() / 2**30}


def _step(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError):
        return INCOMPLETE

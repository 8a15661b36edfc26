"""Where numbers go: a JSONL file, and the trackers that show the same numbers."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leanclip.training.histograms import Histogram
from leanclip.training.trackers import Tracker


class Result(NamedTuple):
    """The last evaluation on a set."""

    step: int
    metrics: Mapping[str, float]


class MetricsLog:
    """Appends to metrics.jsonl and tells the trackers. `results` holds each set's last evaluation."""

    def __init__(self, path: Path, trackers: Sequence[Tracker] = (), *, resume_at: int | None = None) -> None:
        self.path, self.trackers = path, trackers
        self.results: dict[str, Result] = {}
        if resume_at is not None and path.is_file():
            self._cut(resume_at)
        self._file = path.open("a")

    def rewind(self, step: int) -> None:
        """Forget what came after a step, which will be computed again."""
        self._file.close()
        self._cut(step)
        self._file = self.path.open("a")
        for tracker in self.trackers:
            tracker.rewind(step)

    def _cut(self, step: int) -> None:
        kept = [line for line in self.path.read_text().splitlines() if _step(line) <= step]
        self.path.write_text("".join(line + "\n" for line in kept))
        self.results.clear()
        for record in map(json.loads, kept):
            if record.get("kind") == "eval":
                self.results[record["set"]] = Result(record["step"], record["metrics"])

    def train(self, **values: Any) -> None:
        self._write({"kind": "train"} | values)
        shown = {
            name: value
            for name, value in values.items()
            if isinstance(value, int | float) and name not in ("step", "samples")
        }
        for tracker in self.trackers:
            tracker.scalars("train", shown, values["step"])

    def evaluation(
        self, *, step: int, epoch: float, name: str, metrics: Mapping[str, float], weights: str | None = None
    ) -> None:
        """`weights` says which were evaluated where they are not those that train: "ema"."""
        of = {} if weights is None else {"weights": weights}
        self._write({"kind": "eval", "step": step, "epoch": epoch, "set": name} | of | {"metrics": dict(metrics)})
        self.results[name] = Result(step, dict(metrics))
        for tracker in self.trackers:
            tracker.scalars(name, metrics, step)

    def histograms(self, *, step: int, epoch: float, found: Sequence[Histogram]) -> None:
        for histogram in found:
            self._write({"kind": "histogram", "step": step, "epoch": epoch} | asdict(histogram))
            for tracker in self.trackers:
                tracker.histogram(histogram, step)

    def close(self, *, failed: bool = False) -> None:
        self._file.close()
        for tracker in self.trackers:
            tracker.close(failed=failed)

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(finite(record)) + "\n")
        self._file.flush()


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
        return 2**62  # the half line of a killed run goes

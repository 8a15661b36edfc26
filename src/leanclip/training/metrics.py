"""Where numbers go: a JSONL file and TensorBoard."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor


class MetricsLog:
    """Appends to metrics.jsonl; TensorBoard shows the same numbers."""

    def __init__(self, path: Path, *, resume_at: int | None = None) -> None:
        if resume_at is not None and path.is_file():
            kept = [line for line in path.read_text().splitlines() if _step(line) <= resume_at]
            path.write_text("".join(line + "\n" for line in kept))
        self._file = path.open("a")
        from torch.utils.tensorboard.writer import SummaryWriter  # slow to import, and needed by training only

        self._board = SummaryWriter(str(path.parent / "tensorboard"), purge_step=resume_at)

    def train(self, **values: Any) -> None:
        self._write({"kind": "train"} | values)
        for name, value in values.items():
            if isinstance(value, int | float) and name not in ("step", "samples"):
                self._board.add_scalar(f"train/{name}", value, values["step"])

    def evaluation(self, *, step: int, epoch: float, name: str, metrics: Mapping[str, float]) -> None:
        self._write({"kind": "eval", "step": step, "epoch": epoch, "set": name, "metrics": dict(metrics)})
        for key, value in metrics.items():
            self._board.add_scalar(f"{name}/{key}", value, step)

    def close(self) -> None:
        self._file.close()
        self._board.close()

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(finite(record)) + "\n")
        self._file.flush()


def finite(value: Any) -> Any:
    """JSON has no NaN: such a number becomes null."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_host(metrics: Mapping[str, Tensor | float | str]) -> dict[str, float | str]:
    """Read device values; this waits for the device."""
    return {name: value.item() if isinstance(value, Tensor) else value for name, value in metrics.items()}


def _step(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError):
        return 2**62  # the half line of a killed run goes

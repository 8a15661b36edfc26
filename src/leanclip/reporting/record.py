"""Reads what a run has written so far; whatever is not there yet is empty, not an error."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, cast

from leanclip.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The metrics of one evaluation; NaN where the run recorded no finite number."""

    step: int
    epoch: float
    set: str
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Match:
    caption: str
    score: float
    correct: bool


@dataclass(frozen=True, kw_only=True)
class PanelImage:
    """One held-out image, base64 in `image`, and the captions the model finds closest, best first."""

    image: str
    media: str
    caption: str
    matches: tuple[Match, ...]


@dataclass(frozen=True, kw_only=True)
class Panel:
    step: int
    set: str
    images: tuple[PanelImage, ...]


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A run directory in memory: one training row per step, sorted, later lines having replaced earlier ones."""

    path: Path
    info: Mapping[str, Any]
    config: str
    train: tuple[Mapping[str, Any], ...]
    evaluations: tuple[Evaluation, ...]
    panel: Panel | None
    problems: tuple[str, ...]
    changed: datetime

    @property
    def status(self) -> str:
        return str(self.info.get("status") or "unknown")

    @property
    def steps(self) -> list[float]:
        return [float(row["step"]) for row in self.train]

    def column(self, key: str) -> list[float]:
        return [number(row.get(key)) for row in self.train]


def number(value: object) -> float:
    """The value as a float; NaN for anything that is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        result = float(value)
    except OverflowError:
        return math.nan
    return result if math.isfinite(result) else math.nan


def read_run(path: Path) -> RunRecord:
    """Read a run directory, finished or still going.

    Raises:
        UserError: there is no such directory, or it holds no metrics.
    """
    if not path.is_dir():
        raise UserError(
            f"no run directory at {path}; give the directory that training wrote (it holds metrics.jsonl)"
        )
    metrics = path / "metrics.jsonl"
    if not metrics.is_file():
        raise UserError(f"{path} holds no metrics.jsonl; give a directory that training wrote")
    problems: list[str] = []
    train, evaluations = read_metrics(metrics, problems)
    if not train and not evaluations:
        raise UserError(f"{metrics} holds no record yet; try again after the first logged step")
    config = path / "config.toml"
    return RunRecord(
        path=path,
        info=read_object(path / "run.json", problems) or {},
        config=config.read_text(encoding="utf-8", errors="replace") if config.is_file() else "",
        train=train,
        evaluations=evaluations,
        panel=read_panel(path / "panel.json", problems),
        problems=tuple(problems),
        changed=datetime.fromtimestamp(metrics.stat().st_mtime, timezone.utc),
    )


def read_metrics(path: Path, problems: list[str]) -> tuple[tuple[Mapping[str, Any], ...], tuple[Evaluation, ...]]:
    train: dict[int, Mapping[str, Any]] = {}
    evaluations: dict[tuple[str, int], Evaluation] = {}
    lines = path.read_bytes().split(b"\n")
    skipped = 0
    for position, line in enumerate(lines):
        if not line.strip():
            continue
        row = parse_object(line)
        step = row.get("step") if row is not None else None
        if row is None or not isinstance(step, int):
            # The text after the last newline may be a line that is being written right now.
            skipped += position < len(lines) - 1
        elif row.get("kind") == "train":
            train[step] = row
        elif row.get("kind") == "eval":
            evaluation = parse_evaluation(step, row)
            evaluations[evaluation.set, step] = evaluation
    if skipped:
        problems.append(f"unreadable lines of {path.name} left out: {skipped}")
    return (
        tuple(train[step] for step in sorted(train)),
        tuple(sorted(evaluations.values(), key=lambda e: e.step)),
    )


def parse_evaluation(step: int, row: Mapping[str, Any]) -> Evaluation:
    metrics = row.get("metrics")
    pairs = cast("dict[str, object]", metrics).items() if isinstance(metrics, dict) else ()
    return Evaluation(
        step=step,
        epoch=number(row.get("epoch")),
        set=str(row.get("set", "val")),
        metrics={key: number(value) for key, value in pairs},
    )


def parse_object(text: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def read_object(path: Path, problems: list[str]) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    value = parse_object(path.read_bytes())
    if value is None:
        problems.append(f"{path.name} could not be read and was left out")
    return value


def read_panel(path: Path, problems: list[str]) -> Panel | None:
    value = read_object(path, problems)
    if value is None:
        return None
    try:
        images = tuple(
            PanelImage(
                image=str(entry["image"]),
                media=str(entry.get("media", "image/jpeg")),
                caption=str(entry["caption"]),
                matches=tuple(
                    Match(caption=str(m["caption"]), score=number(m["score"]), correct=m["correct"] is True)
                    for m in entry["matches"]
                ),
            )
            for entry in value["images"]
        )
        return Panel(step=int(value["step"]), set=str(value.get("set", "val")), images=images)
    except (KeyError, TypeError, ValueError, AttributeError):
        problems.append(f"{path.name} does not have the expected fields and was left out")
        return None

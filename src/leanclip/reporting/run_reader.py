"""Reads what a run has written so far; whatever is not there yet is empty, not an error."""

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple, cast

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
class Negative:
    """A wrong caption and the picture it belongs to, base64 in `image`."""

    image: str
    media: str
    caption: str
    score: float


@dataclass(frozen=True, kw_only=True)
class HardImage:
    """An image that the model confuses with others: `score` is its best right caption's."""

    image: str
    media: str
    caption: str
    score: float
    negatives: tuple[Negative, ...]


@dataclass(frozen=True, kw_only=True)
class Panel:
    step: int
    set: str
    images: tuple[PanelImage, ...]
    hardest: tuple[HardImage, ...]

    @property
    def found(self) -> int:
        """How many images have a right caption among the shown ones."""
        return sum(any(m.correct for m in image.matches) for image in self.images)

    @property
    def top_score(self) -> float:
        """The scale of the score bars: the highest score, one when no score is above zero."""
        return max((m.score for image in self.images for m in image.matches if m.score > 0), default=1.0)


@dataclass(frozen=True, kw_only=True)
class HistogramAt:
    """How a number of all samples was spread at a step: `counts[i]` of them between `edges[i]` and `edges[i + 1]`."""

    step: int
    edges: tuple[float, ...]
    counts: tuple[int, ...]
    absent: int  # samples without a number


@dataclass(frozen=True, kw_only=True)
class ZeroShot:
    """How a set was classified: `confusion` counts, a row per true class and a column per predicted one."""

    set: str
    classnames: tuple[str, ...]
    confusion: tuple[tuple[int, ...], ...]
    figures: Mapping[str, float]
    note: str


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A run directory in memory: one training row per step, sorted, later lines having replaced earlier ones."""

    path: Path
    info: Mapping[str, Any]
    config: str
    train: tuple[Mapping[str, Any], ...]
    evaluations: tuple[Evaluation, ...]
    histograms: Mapping[str, tuple[HistogramAt, ...]]
    panel: Panel | None
    zero_shot: tuple[ZeroShot, ...]
    problems: tuple[str, ...]
    changed: datetime

    @property
    def name(self) -> str:
        return str(self.info.get("name") or self.path.resolve().name)

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
    train, evaluations, histograms = read_metrics(metrics, problems)
    if not train and not evaluations:
        raise UserError(f"{metrics} holds no record yet; try again after the first logged step")
    config = path / "config.toml"
    return RunRecord(
        path=path,
        info=read_object(path / "run.json", problems) or {},
        config=config.read_text(encoding="utf-8", errors="replace") if config.is_file() else "",
        train=train,
        evaluations=evaluations,
        histograms=histograms,
        panel=read_panel(path / "panel.json", problems),
        zero_shot=read_zero_shot(path / "zero_shot.json", problems),
        problems=tuple(problems),
        changed=datetime.fromtimestamp(metrics.stat().st_mtime, timezone.utc),
    )


class Metrics(NamedTuple):
    train: tuple[Mapping[str, Any], ...]
    evaluations: tuple[Evaluation, ...]
    histograms: Mapping[str, tuple[HistogramAt, ...]]


def read_metrics(path: Path, problems: list[str]) -> Metrics:
    train: dict[int, Mapping[str, Any]] = {}
    evaluations: dict[tuple[str, int], Evaluation] = {}
    histograms: dict[str, dict[int, HistogramAt]] = {}
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
        elif row.get("kind") == "histogram":
            histogram = parse_histogram(step, row)
            if histogram is None:
                skipped += 1
            else:
                histograms.setdefault(str(row.get("name")), {})[step] = histogram
    if skipped:
        problems.append(f"unreadable lines of {path.name} left out: {skipped}")
    return Metrics(
        tuple(train[step] for step in sorted(train)),
        tuple(sorted(evaluations.values(), key=lambda e: e.step)),
        {name: tuple(found[step] for step in sorted(found)) for name, found in histograms.items()},
    )


def parse_histogram(step: int, row: Mapping[str, Any]) -> HistogramAt | None:
    try:
        edges = tuple(float(edge) for edge in row["edges"])
        counts = tuple(int(count) for count in row["counts"])
        absent = int(row.get("absent") or 0)
    except (KeyError, TypeError, ValueError):
        return None
    rising = all(low < high for low, high in itertools.pairwise(edges))
    if not counts or len(edges) != len(counts) + 1 or not rising or min(*counts, absent) < 0:
        return None
    return HistogramAt(step=step, edges=edges, counts=counts, absent=absent)


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
        hardest = tuple(
            HardImage(
                **picture(entry),
                negatives=tuple(Negative(**picture(negative)) for negative in entry["negatives"]),
            )
            for entry in value.get("hardest", ())
        )
        return Panel(step=int(value["step"]), set=str(value.get("set", "val")), images=images, hardest=hardest)
    except (KeyError, TypeError, ValueError, AttributeError):
        problems.append(f"{path.name} does not have the expected fields and was left out")
        return None


def picture(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "image": str(entry["image"]),
        "media": str(entry.get("media", "image/jpeg")),
        "caption": str(entry["caption"]),
        "score": number(entry["score"]),
    }


def read_zero_shot(path: Path, problems: list[str]) -> tuple[ZeroShot, ...]:
    value = read_object(path, problems)
    if value is None:
        return ()
    try:
        return tuple(parse_zero_shot(name, entry) for name, entry in value["sets"].items())
    except (KeyError, TypeError, ValueError, AttributeError):
        problems.append(f"{path.name} does not have the expected fields and was left out")
        return ()


def parse_zero_shot(name: str, entry: Mapping[str, Any]) -> ZeroShot:
    classnames = tuple(str(classname) for classname in entry["classnames"])
    confusion = tuple(tuple(int(count) for count in row) for row in entry["confusion"])
    if {len(classnames)} != {len(confusion), *(len(row) for row in confusion)}:
        raise ValueError("one row and one column per class")
    figures = {key: number(figure) for key, figure in entry.items() if math.isfinite(number(figure))}
    return ZeroShot(
        set=name, classnames=classnames, confusion=confusion, figures=figures, note=str(entry.get("note") or "")
    )

"""Reads the files that a run has written so far. A missing file gives an empty part; an unreadable one, a problem."""

import itertools
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar, cast

from leanclip.errors import UserError
from leanclip.filesystem import lines_of, parse_json, read_bounded, read_json

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")
LARGEST = 1e100  # of the numbers that are drawn: their products and differences are finite
FIT = ("low", "low_spread", "high", "high_spread", "share")  # of a line on pair weights
MAX_STEP = 2**53  # steps are exact as floats


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The metrics of one evaluation; NaN if the run recorded no finite number."""

    step: int
    epoch: float
    set: str
    metrics: Mapping[str, float]
    before: bool = False  # of the trained weights that the run started from

    def value(self, key: str) -> float:
        return self.metrics.get(key, math.nan)


@dataclass(frozen=True, kw_only=True)
class PanelEntry:
    """A held-out image, a JPEG in base64, with its best captions or hardest negatives; or one of those."""

    image: str  # empty if only the caption counts
    caption: str
    score: float
    correct: bool
    matches: "tuple[PanelEntry, ...]"


@dataclass(frozen=True, kw_only=True)
class Panel:
    step: int
    set: str
    images: tuple[PanelEntry, ...]
    hardest: tuple[PanelEntry, ...]
    earlier: tuple[tuple[int, tuple[PanelEntry, ...]], ...]  # by step: the best caption of each image

    @property
    def correct(self) -> int:
        """How many images have a correct caption among those shown."""
        return sum(any(match.correct for match in image.matches) for image in self.images)

    @property
    def top_score(self) -> float:
        """The scale of the score bars."""
        return max((m.score for image in self.images for m in image.matches if m.score > 0), default=1.0)


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """A per-sample quantity at a step: `counts[i]` samples lie between `edges[i]` and `edges[i + 1]`."""

    step: int
    edges: tuple[float, ...]
    counts: tuple[int, ...]
    absent: int  # samples without a value


@dataclass(frozen=True, kw_only=True)
class PairFit:
    """The pairs' scores when weights were fitted: a histogram, and the two normals, right pairs first."""

    step: int
    on: bool  # whether the weights were used
    share: float  # of pairs that look wrong
    range: float  # the histogram's equal bins lie between -range and range
    counts: tuple[int, ...]
    parts: tuple[tuple[float, float, float], ...]  # mean, spread, and share of the pairs


@dataclass(frozen=True, kw_only=True)
class ZeroShot:
    """A classified set: `confusion` has a row per true class and a column per predicted one."""

    set: str
    classnames: tuple[str, ...]
    confusion: tuple[tuple[int, ...], ...]
    metrics: Mapping[str, float]
    note: str

    @property
    def recalls(self) -> list[tuple[str, float]]:
        """The recall of every class that has images, the lowest first."""
        recalls = [(n, row[i] / sum(row)) for i, (n, row) in enumerate(self.rows) if sum(row)]
        return sorted(recalls, key=lambda entry: entry[1])

    @property
    def rows(self) -> list[tuple[str, tuple[int, ...]]]:
        return list(zip(self.classnames, self.confusion, strict=True))

    @property
    def confusions(self) -> list[tuple[str, str, int, float]]:
        """True class, predicted class, images and their share of the class, the most frequent first."""
        wrong = (
            (name, self.classnames[j], count, count / sum(row))
            for i, (name, row) in enumerate(self.rows)
            for j, count in enumerate(row)
            if count > 0 and i != j
        )
        return sorted(wrong, key=lambda entry: -entry[2])


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The files of a run: one training row per step, sorted; later lines of a step replace earlier ones."""

    path: Path
    info: Mapping[str, Any]
    config: str
    settings: Mapping[str, Any]  # the same, parsed
    train: tuple[Mapping[str, Any], ...]
    evaluations: tuple[Evaluation, ...]
    histograms: Mapping[str, tuple[Histogram, ...]]
    pair_fits: tuple[PairFit, ...]
    suspects: tuple[PanelEntry, ...]  # pairs that look wrong; the caption chosen instead is the only match
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

    def finite(self, key: str) -> list[float]:
        return [value for value in self.column(key) if math.isfinite(value)]

    def table(self, key: str) -> dict[str, Any]:
        """A part of run.json that is a table; empty if it is missing."""
        part = self.info.get(key)
        return {str(name): value for name, value in part.items()} if isinstance(part, dict) else {}

    @property
    def sets(self) -> list[str]:
        return list(dict.fromkeys(evaluation.set for evaluation in self.evaluations))

    def evaluations_on(self, name: str) -> list[Evaluation]:
        return [evaluation for evaluation in self.evaluations if evaluation.set == name]


def number(value: object) -> float:
    """The value as a float; NaN for anything that is not a number, not finite, or too large to compute with."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < LARGEST:
        return math.nan
    return float(value) if abs(value) > 1 / LARGEST else 0.0


def whole(value: object) -> int:
    """A step or a count; anything else is a ValueError."""
    if not isinstance(value, int) or not 0 <= value < MAX_STEP:
        raise ValueError("not a whole number")
    return value


def read_run(path: Path) -> RunData:
    """Read a run directory, of a finished run or of one that is still training.

    Raises:
        UserError: there is no such directory, or it holds no metrics.
    """
    metrics, config = path / "metrics.jsonl", path / "config.toml"
    if not metrics.is_file():
        raise UserError(
            f"no metrics.jsonl in {path}; give a run directory, such as logs/NAME", code="report.not_a_run"
        )
    problems: list[str] = []
    try:
        text = read_bounded(config).decode("utf-8", "replace") if config.is_file() else ""
    except ValueError:
        text = ""
        problems.append("config.toml could not be read")
    try:
        train, evaluations, histograms, pair_fits = read_metrics(lines_of(metrics), problems)
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror})", code="report.not_readable") from error
    if not train and not evaluations:
        raise UserError(f"{metrics} has no metrics yet; retry after the first logged step", code="report.no_metrics")
    return RunData(
        path=path,
        info=read_part(path / "run.json", dict, problems) or {},
        config=text,
        settings=parse_settings(text, problems),
        train=train,
        evaluations=evaluations,
        histograms=histograms,
        pair_fits=pair_fits,
        suspects=read_part(path / "suspects.json", parse_suspects, problems) or (),
        panel=read_part(path / "panel.json", parse_panel, problems),
        zero_shot=read_part(path / "zero_shot.json", parse_zero_shot, problems) or (),
        problems=tuple(problems),
        changed=datetime.fromtimestamp(metrics.stat().st_mtime, timezone.utc),
    )


def parse_settings(text: str, problems: list[str]) -> Mapping[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError):
        problems.append("config.toml could not be read")
        return {}


def read_metrics(
    lines: Iterable[bytes], problems: list[str]
) -> tuple[
    tuple[Mapping[str, Any], ...], tuple[Evaluation, ...], Mapping[str, tuple[Histogram, ...]], tuple[PairFit, ...]
]:
    """Training rows, evaluations, histograms by name, and fits of pair weights."""
    train: dict[int, Mapping[str, Any]] = {}
    evaluations: dict[tuple[str, int], Evaluation] = {}
    histograms: dict[str, dict[int, Histogram]] = {}
    pair_fits: dict[int, PairFit] = {}
    skipped = 0
    for line in lines:
        try:
            row = parse_json(line) if line.strip() else {"step": 0}
            step, kind = whole(row["step"]), row.get("kind")
            if kind == "train":
                train[step] = row
            elif kind == "eval":
                evaluation = parse_evaluation(step, row)
                evaluations[evaluation.set, step] = evaluation
            elif kind == "histogram":
                histograms.setdefault(str(row.get("name")), {})[step] = parse_histogram(step, row)
            elif kind == "pair_weights":
                pair_fits[step] = parse_pair_fit(step, row)
        except (KeyError, TypeError, ValueError, AttributeError):
            skipped += line.endswith(b"\n")  # the last one may be incomplete because it is being written
    if skipped:
        problems.append(f"unreadable lines of metrics.jsonl left out: {skipped}")
    return (
        tuple(train[step] for step in sorted(train)),
        tuple(sorted(evaluations.values(), key=lambda e: e.step)),
        {name: tuple(rows[step] for step in sorted(rows)) for name, rows in histograms.items()},
        tuple(pair_fits[step] for step in sorted(pair_fits)),
    )


def parse_histogram(step: int, row: Mapping[str, Any]) -> Histogram:
    edges = tuple(number(edge) for edge in row["edges"])
    counts = tuple(whole(count) for count in row["counts"])
    absent = whole(row.get("absent") or 0)
    rising = all(low < high for low, high in itertools.pairwise(edges))  # false with NaN
    if not counts or len(edges) != len(counts) + 1 or not rising:
        raise ValueError("no histogram")
    return Histogram(step=step, edges=edges, counts=counts, absent=absent)


def parse_pair_fit(step: int, row: Mapping[str, Any]) -> PairFit:
    fit, counts = row["fit"], tuple(whole(count) for count in row["counts"])
    low, low_spread, high, high_spread, upper, share, width = (
        number(value) for value in (*(fit[name] for name in FIT), row["wrong_pairs"], row["range"])
    )
    if not (counts and sum(counts) and width > 0 and min(low_spread, high_spread) > 0 and 0 <= share <= 1):
        raise ValueError("no fit")
    if not (0 <= upper <= 1 and abs(low) <= width and abs(high) <= width):
        raise ValueError("no fit")
    parts = (low, low_spread, 1 - upper), (high, high_spread, upper)
    return PairFit(step=step, on=row.get("on") is True, share=share, range=width, counts=counts, parts=parts)


def parse_suspects(value: Mapping[str, Any]) -> tuple[PanelEntry, ...]:
    entries = [(parse_entry(entry), entry.get("instead")) for entry in value["pairs"]]
    return tuple(
        replace(entry, matches=(parse_entry({"caption": instead}),) if isinstance(instead, str) else ())
        for entry, instead in entries
    )


def parse_evaluation(step: int, row: Mapping[str, Any]) -> Evaluation:
    metrics = row.get("metrics")
    pairs = cast("dict[str, object]", metrics).items() if isinstance(metrics, dict) else ()
    return Evaluation(
        step=step,
        epoch=number(row.get("epoch")),
        set=str(row.get("set", "val")),
        metrics={key: number(value) for key, value in pairs},
        before=row.get("weights") == "before",
    )


def read_part(path: Path, parse: Callable[[dict[str, Any]], T], problems: list[str]) -> T | None:
    """The file as `parse` reads it; None if it is missing. If it is damaged, a problem instead."""
    if not path.exists():
        return None
    try:
        value = read_json(path)
        if not isinstance(value, dict):
            raise TypeError("no table")
        return parse(cast("dict[str, Any]", value))
    except (UserError, KeyError, TypeError, ValueError, AttributeError):
        problems.append(f"{path.name} could not be read and was left out")
        return None


def parse_panel(value: Mapping[str, Any]) -> Panel:
    images = tuple(parse_entry(entry, "matches") for entry in value["images"])
    earlier = tuple((whole(p["step"]), tuple(map(parse_entry, p["best"]))) for p in value.get("earlier", ()))
    if any(len(best) != len(images) for _, best in earlier):
        raise ValueError("one caption per image")
    return Panel(
        step=whole(value["step"]),
        set=str(value.get("set", "val")),
        images=images,
        hardest=tuple(parse_entry(entry, "negatives") for entry in value.get("hardest", ())),
        earlier=earlier,
    )


def parse_entry(entry: Mapping[str, Any], matches: str | None = None) -> PanelEntry:
    return PanelEntry(
        image=str(entry.get("image", "") if matches is None else entry["image"]),
        caption=str(entry["caption"]),
        score=number(entry.get("score")),
        correct=entry.get("correct") is True,
        matches=() if matches is None else tuple(parse_entry(match) for match in entry[matches]),
    )


def parse_zero_shot(value: Mapping[str, Any]) -> tuple[ZeroShot, ...]:
    sets: list[ZeroShot] = []
    for name, entry in value["sets"].items():
        classnames = tuple(str(classname) for classname in entry["classnames"])
        confusion = tuple(tuple(whole(count) for count in row) for row in entry["confusion"])
        if {len(classnames)} != {len(confusion), *(len(row) for row in confusion)}:
            raise ValueError("one row and one column per class")
        metrics = {key: number(figure) for key, figure in entry.items() if math.isfinite(number(figure))}
        note = str(entry.get("note") or "")
        sets.append(ZeroShot(set=name, classnames=classnames, confusion=confusion, metrics=metrics, note=note))
    return tuple(sets)

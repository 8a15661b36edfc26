"""Several runs side by side: what came out, what was set differently, and curves on the same axes."""

import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from leanclip.reporting import report_sections
from leanclip.reporting.chart import Chart, Reference, Series
from leanclip.reporting.histogram_chart import quantile
from leanclip.reporting.report_sections import Cell
from leanclip.reporting.run_reader import Evaluation, RunRecord, number

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

UNINTERESTING = {"name", "logs", "wandb_notes"}  # settings that differ without making a difference


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A table with a row per run."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A setting, and what each run has."""

    name: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class XAxis:
    """What the runs are laid out along: steps, or pairs seen where their batches differ."""

    label: str
    factors: tuple[float, ...]  # pairs per step, or one


def names_of(runs: Sequence[RunRecord]) -> list[str]:
    """The runs' names; where two are alike, with their directory, and with a number where that does not help."""
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = [
            f"{name} ({run.path})" if names.count(name) > 1 else name for name, run in zip(names, runs, strict=True)
        ]
    return [f"{name} #{i + 1}" if names.count(name) > 1 else name for i, name in enumerate(names)]


def x_axis(runs: Sequence[RunRecord]) -> XAxis:
    batches = [number(run.info.get("global_batch")) for run in runs]
    if len(set(batches)) == 1 or not all(batch > 0 for batch in batches):
        return XAxis("step", (1.0,) * len(runs))
    return XAxis("pairs", tuple(batches))


def final_figures(runs: Sequence[RunRecord]) -> Grid:
    """What came out of each run. The best is marked where it is clear what is better."""
    columns: list[report_sections.Column] = []
    values: list[list[float]] = []

    def add(title: str, of: Callable[[RunRecord], float], *, share: bool = False, better: int = 0) -> None:
        found = [of(run) for run in runs]
        if any(math.isfinite(value) for value in found):
            columns.append(report_sections.Column(key=title, title=title, share=share, better=better))
            values.append(found)

    for name in sets(runs):
        for key, title in metrics(runs, name).items():
            add(f"{title}, {name}", lambda run, name=name, key=key: last_value(run, name, key), share=True, better=1)
    add("Loss", lambda run: report_sections.last_finite(run.column("loss")))
    add(report_sections.TAU, lambda run: report_sections.last_finite(run.column("tau")))
    add("Samples per second", lambda run: median(run.column("samples_per_second")), better=1)
    for key in report_sections.MEMORY:
        add(report_sections.CURVES[key].title, lambda run, key=key: largest(run.column(key)), better=-1)
    add("Traffic of the loss (MB per step)", lambda run: 1e-6 * number(communication(run).get("leanclip")), better=-1)
    best = [report_sections.best_of(column, found) for column, found in zip(columns, values, strict=True)]
    rows = tuple(
        (
            Cell(text=run.status),
            Cell(text=f"{run.steps[-1]:,.0f}" if run.train else "0"),
            Cell(text=report_sections.duration(report_sections.last_finite(run.column("seconds")))),
            *(report_sections.cell(column, values[c][r], best[c]) for c, column in enumerate(columns)),
        )
        for r, run in enumerate(runs)
    )
    return Grid(columns=("Status", "Steps", "Time", *(column.title for column in columns)), rows=rows)


def differences(runs: Sequence[RunRecord]) -> tuple[list[Difference], int]:
    """The settings and circumstances in which the runs differ, and how many settings are alike."""
    settings = [read_settings(run) for run in runs]
    keys = list(dict.fromkeys(key for found in settings for key in found))
    differing = [key for key in keys if len({repr(found.get(key)) for found in settings}) > 1]
    shown = [key for key in differing if key not in UNINTERESTING]
    rows = [Difference(name=key, values=tuple(setting(found.get(key)) for found in settings)) for key in shown]
    around = [surroundings(run) for run in runs]
    for key in dict.fromkeys(key for found in around for key in found):
        texts = tuple(found.get(key, report_sections.DASH) for found in around)
        if len(set(texts)) > 1:
            rows.append(Difference(name=key, values=texts))
    return rows, len(keys) - len(differing)


def read_settings(run: RunRecord) -> dict[str, Any]:
    try:
        return tomllib.loads(run.config)
    except tomllib.TOMLDecodeError:
        return {}


def setting(value: object) -> str:
    return "not set" if value is None else str(value)


def surroundings(run: RunRecord) -> dict[str, str]:
    environment = run.info.get("environment")
    found = {
        "leanclip": str(run.info.get("version") or ""),
        "processes": report_sections.count(run.info.get("processes")),
    }
    return found | ({str(k): str(v) for k, v in environment.items()} if isinstance(environment, dict) else {})


def training_charts(runs: Sequence[RunRecord], names: Sequence[str]) -> list[Chart]:
    axis = x_axis(runs)
    charts: list[Chart] = []
    for key, curve in report_sections.curves(runs).items():
        series = [
            Series(
                name=names[i],
                x=[axis.factors[i] * step for step in run.steps],
                y=[curve.scale * value for value in run.column(key)],
                colour=i,
            )
            for i, run in enumerate(runs)
            if any(math.isfinite(value) for value in run.column(key))
        ]
        if series:
            charts.append(
                Chart(
                    title=curve.title, series=series, unit=curve.unit, from_zero=curve.from_zero, x_label=axis.label
                )
            )
    return charts


def evaluation_charts(runs: Sequence[RunRecord], names: Sequence[str]) -> list[Chart]:
    """One chart for each set and metric, as soon as one of the runs has two evaluations."""
    axis = x_axis(runs)
    charts: list[Chart] = []
    for name in sets(runs):
        chosen = [[e for e in run.evaluations if e.set == name] for run in runs]
        if max(len(found) for found in chosen) < 2:
            continue
        for key, title in metrics(runs, name).items():
            series = [
                Series(
                    name=names[i],
                    x=[axis.factors[i] * e.step for e in found],
                    y=[100 * e.metrics.get(key, math.nan) for e in found],
                    colour=i,
                )
                for i, found in enumerate(chosen)
                if found
            ]
            charts.append(
                Chart(
                    title=f"{title} on {name} (%)",
                    series=series,
                    unit=" %",
                    from_zero=True,
                    markers=True,
                    x_label=axis.label,
                    references=chance_lines(chosen, key),
                )
            )
    return charts


def chance_lines(chosen: Sequence[Sequence[Evaluation]], key: str) -> list[Reference]:
    """The line of guessing, where it is one and the same for all runs."""
    if match := report_sections.RECALL.fullmatch(key):
        found = {report_sections.chance_of(e.metrics, match[1], int(match[2])) for runs in chosen for e in runs}
    else:
        found = {e.metrics.get("chance@1", math.nan) for runs in chosen for e in runs} if key == "top1" else set()
    return [Reference(name="chance", value=100 * value) for value in found] if len(found) == 1 else []


def histogram_charts(runs: Sequence[RunRecord], names: Sequence[str]) -> list[Chart]:
    """The median of what every sample has of its own, over time."""
    axis = x_axis(runs)
    found = dict.fromkeys(name for run in runs for name in run.histograms)
    charts: list[Chart] = []
    for key in found:
        series = [
            Series(
                name=names[i],
                x=[axis.factors[i] * row.step for row in run.histograms[key]],
                y=[quantile(row, 0.5) for row in run.histograms[key]],
                colour=i,
            )
            for i, run in enumerate(runs)
            if key in run.histograms
        ]
        title = f"{report_sections.HISTOGRAMS.get(key, key)}, median"
        charts.append(Chart(title=title, series=series, markers=True, x_label=axis.label))
    return charts


def sets(runs: Sequence[RunRecord]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in report_sections.sets(run.evaluations)))


def metrics(runs: Sequence[RunRecord], name: str) -> dict[str, str]:
    """What is compared on a set: the recalls at 1 and at the largest rank, and classification."""
    chosen = [e for run in runs for e in run.evaluations if e.set == name]
    found: dict[str, str] = {}
    for direction, title in report_sections.DIRECTIONS.items():
        ranks = report_sections.ranks(chosen, direction)
        for rank in sorted({ranks[0], ranks[-1]}, reverse=True) if ranks else ():
            found[f"{direction}_recall@{rank}"] = f"{title} R@{rank}"
    known = {key for e in chosen for key in e.metrics}
    return found | {key: f"Zero-shot {title}" for key, title in report_sections.ZERO_SHOT.items() if key in known}


def last_value(run: RunRecord, name: str, key: str) -> float:
    return report_sections.last_finite([e.metrics.get(key, math.nan) for e in run.evaluations if e.set == name])


def communication(run: RunRecord) -> dict[str, Any]:
    found = run.info.get("communication")
    return found if isinstance(found, dict) else {}


def median(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return statistics.median(finite) if finite else math.nan


def largest(values: Sequence[float]) -> float:
    return max((value for value in values if math.isfinite(value)), default=math.nan)

"""Several runs side by side: final figures, settings that differ, and curves on the same axes."""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from leanclip.errors import UserError
from leanclip.reporting.charts import Chart, Series, quantile
from leanclip.reporting.report_sections import (
    CURVES,
    DASH,
    DIRECTIONS,
    HISTOGRAMS,
    MEMORY,
    TAU,
    ZERO_SHOT,
    Cell,
    Column,
    chance_of,
    count,
    curves,
    duration,
    last_finite,
    ranks,
    share_chart,
)
from leanclip.reporting.run_reader import RunData, number

UNINTERESTING = {"name", "logs", "wandb_notes"}  # settings without an effect on the result


class FinalFigures(NamedTuple):
    """A table with a row per run."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


class XAxis(NamedTuple):
    """The x axis of all charts: steps, or pairs if the batch sizes differ."""

    label: str
    factors: tuple[float, ...]  # pairs per step, or one


def names_of(runs: Sequence[RunData]) -> list[str]:
    """The names of the runs; equal ones with their directory, and with a number if that is equal too."""
    names = [run.name for run in runs]
    paths = [f"{name} ({run.path})" if names.count(name) > 1 else name for name, run in zip(names, runs, strict=True)]
    return [f"{name} #{i + 1}" if paths.count(name) > 1 else name for i, name in enumerate(paths)]


def x_axis(runs: Sequence[RunData]) -> XAxis:
    batches = [number(run.info.get("global_batch")) for run in runs]
    if len(set(batches)) == 1 or not all(batch > 0 for batch in batches):
        return XAxis("step", (1.0,) * len(runs))
    return XAxis("pairs", tuple(batches))


def final_figures(runs: Sequence[RunData]) -> FinalFigures:
    """The result of each run. The best is marked if more or less is better."""
    columns: dict[Column, list[float]] = {}

    def add(title: str, value: Callable[[RunData], float], *, share: bool = False, better: int = 0) -> None:
        values = [value(run) for run in runs]
        if any(math.isfinite(value) for value in values):
            columns[Column(key=title, title=title, share=share, better=better)] = values

    for name in sets(runs):
        for key, title in metrics(runs, name).items():
            add(f"{title}, {name}", lambda run, name=name, key=key: last_value(run, name, key), share=True, better=1)
    add("Loss", lambda run: last_finite(run.column("loss")))
    add(TAU, lambda run: last_finite(run.column("tau")))
    add("Samples per second", lambda run: statistics.median(run.finite("samples_per_second") or [math.nan]), better=1)
    for key in MEMORY:
        add(CURVES[key].title, lambda run, key=key: max(run.finite(key), default=math.nan), better=-1)
    add("Traffic of the loss (MB per step)", lambda run: traffic(run).get("leanclip", math.nan) / 1e6, better=-1)
    rows = tuple(
        (
            Cell(run.status),
            Cell(f"{run.steps[-1]:,.0f}" if run.train else "0"),
            Cell(duration(last_finite(run.column("seconds")))),
            *(column.cell(values[i], column.best(values)) for column, values in columns.items()),
        )
        for i, run in enumerate(runs)
    )
    return FinalFigures(("Status", "Steps", "Time", *(column.title for column in columns)), rows)


def differences(runs: Sequence[RunData]) -> tuple[dict[str, tuple[str, ...]], int]:
    """The settings and versions that differ, with the values of each run, and the number of equal settings."""
    settings = [read_settings(run) for run in runs]
    keys = list(dict.fromkeys(key for values in settings for key in values))
    differing = [key for key in keys if len({repr(values.get(key)) for values in settings}) > 1]
    rows = {
        key: tuple("not set" if values.get(key) is None else str(values[key]) for values in settings)
        for key in differing
        if key not in UNINTERESTING
    }
    versions = [environment_of(run) for run in runs]
    for key in dict.fromkeys(key for values in versions for key in values):
        texts = tuple(values.get(key, DASH) for values in versions)
        if len(set(texts)) > 1:
            rows[key] = texts
    return rows, len(keys) - len(differing)


def read_settings(run: RunData) -> dict[str, Any]:
    from leanclip.config import load_toml  # imports torch, which `leanclip report --help` does not need

    try:
        return load_toml(run.path / "config.toml")
    except UserError:
        return {}


def environment_of(run: RunData) -> dict[str, str]:
    """Versions, device, processes and micro-batches of a run."""
    values = {"leanclip": str(run.info.get("version") or "")} | run.table("environment")
    for name in ("processes", "micro_batches"):
        values[name.replace("_", "-")] = count(run.info.get(name))
    return {name: str(value) for name, value in values.items() if value not in ("", DASH)}


def training_charts(runs: Sequence[RunData], names: Sequence[str]) -> list[Chart]:
    charts = [
        Chart(
            title=curve.title,
            series=series_of(
                runs, names, lambda run, key=key, scale=curve.scale: (run.steps, [scale * v for v in run.column(key)])
            ),
            unit=curve.unit,
            from_zero=curve.from_zero,
            x_label=x_axis(runs).label,
        )
        for key, curve in curves(runs).items()
    ]
    return [chart for chart in charts if chart.series]


def series_of(
    runs: Sequence[RunData],
    names: Sequence[str],
    points: Callable[[RunData], tuple[Sequence[float], Sequence[float]]],
) -> list[Series]:
    """A line for each run that has values. A run has the same colour in all charts."""
    factors = x_axis(runs).factors
    lines = [points(run) for run in runs]
    return [
        Series(name=names[i], x=[factors[i] * x for x in xs], y=ys, colour=i)
        for i, (xs, ys) in enumerate(lines)
        if any(math.isfinite(y) for y in ys)
    ]


def evaluation_charts(runs: Sequence[RunData], names: Sequence[str]) -> list[Chart]:
    """One chart for each set and metric with at least two evaluations of a run."""
    charts: list[Chart] = []
    for name in sets(runs):
        if max(len(run.evaluations_on(name)) for run in runs) < 2:
            continue
        for key, title in metrics(runs, name).items():

            def points(run: RunData, name: str = name, key: str = key) -> tuple[list[float], list[float]]:
                evaluations = run.evaluations_on(name)
                return [e.step for e in evaluations], [100 * e.value(key) for e in evaluations]

            chances = {chance_of(e, key) for run in runs for e in run.evaluations_on(name)}
            references = {"chance": 100 * chances.pop()} if len(chances) == 1 else {}
            series = series_of(runs, names, points)
            charts.append(share_chart(f"{title} on {name} (%)", series, references, x_axis(runs).label))
    return charts


def histogram_charts(runs: Sequence[RunData], names: Sequence[str]) -> list[Chart]:
    """Medians of per-sample quantities over time."""

    def points(run: RunData, key: str) -> tuple[list[float], list[float]]:
        rows = run.histograms.get(key, ())
        return [row.step for row in rows], [quantile(row, 0.5) for row in rows]

    return [
        Chart(
            title=f"{HISTOGRAMS.get(key, key)}, median",
            series=series_of(runs, names, lambda run, key=key: points(run, key)),
            markers=True,
            x_label=x_axis(runs).label,
        )
        for key in dict.fromkeys(name for run in runs for name in run.histograms)
    ]


def sets(runs: Sequence[RunData]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in run.sets))


def metrics(runs: Sequence[RunData], name: str) -> dict[str, str]:
    """The compared metrics of a set: recalls at 1 and at the largest rank, and classification."""
    evaluations = [e for run in runs for e in run.evaluations_on(name)]
    titles: dict[str, str] = {}
    for direction, title in DIRECTIONS.items():
        for rank in sorted({*ranks(evaluations, direction)[:1], *ranks(evaluations, direction)[-1:]}, reverse=True):
            titles[f"{direction}_recall@{rank}"] = f"{title} R@{rank}"
    known = {key for e in evaluations for key in e.metrics}
    return titles | {key: f"Zero-shot {title}" for key, title in ZERO_SHOT.items() if key in known}


def last_value(run: RunData, name: str, key: str) -> float:
    return last_finite([e.value(key) for e in run.evaluations_on(name)])


def traffic(run: RunData) -> dict[str, float]:
    """Bytes that each process receives in a step for the loss, by implementation."""
    return {name: number(value) for name, value in run.table("communication").items() if number(value) > 0}

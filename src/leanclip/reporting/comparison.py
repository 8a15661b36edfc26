"""Several runs side by side: final figures, and settings that differ."""

import math
import statistics
from collections.abc import Sequence

from leanclip.reporting.curves import CURVES, TAU, compared_metrics, sets
from leanclip.reporting.report_sections import DASH, MEMORY, Cell, Column, count, duration, last_finite
from leanclip.reporting.run_reader import RunData

UNINTERESTING = {"name", "logs", "wandb_notes"}  # settings without an effect on the result


def names_of(runs: Sequence[RunData]) -> list[str]:
    """The names of the runs; equal ones with their directory, and with a number if that is equal too."""
    names = [run.name for run in runs]
    paths = [f"{name} ({run.path})" if names.count(name) > 1 else name for name, run in zip(names, runs, strict=True)]
    return [f"{name} #{i + 1}" if paths.count(name) > 1 else name for i, name in enumerate(paths)]


def final_figures(runs: Sequence[RunData]) -> dict[str, tuple[Cell, ...]]:
    """The result of each run, by name. The best is marked if more or less is better."""
    figures = {
        "Status": tuple(Cell(run.status) for run in runs),
        "Steps": tuple(Cell(f"{run.steps[-1]:,.0f}" if run.train else "0") for run in runs),
        "Time": tuple(Cell(duration(last_finite(run.column("seconds")))) for run in runs),
    }

    def add(title: str, values: Sequence[float], *, share: bool = False, better: int = 0) -> None:
        column = Column(key=title, title=title, share=share, better=better)
        if any(math.isfinite(value) for value in values):
            figures[title] = tuple(column.cells(values))

    for name in sets(runs):
        for key, title in compared_metrics(runs, name).items():
            values = [last_finite([e.value(key) for e in run.evaluations_on(name)]) for run in runs]
            add(f"{title}, {name}", values, share=True, better=1)
    add("Loss", [last_finite(run.column("loss")) for run in runs])
    add(TAU, [last_finite(run.column("tau")) for run in runs])
    add(
        "Samples per second",
        [statistics.median(run.finite("samples_per_second") or [math.nan]) for run in runs],
        better=1,
    )
    for key in MEMORY:
        add(CURVES[key].title, [max(run.finite(key), default=math.nan) for run in runs], better=-1)
    return figures


def differences(runs: Sequence[RunData]) -> tuple[dict[str, tuple[Cell, ...]], int]:
    """The settings and versions that differ, with the values of each run, and the number of equal settings."""
    settings = [run.settings for run in runs]
    keys = list(dict.fromkeys(key for values in settings for key in values))
    differing = [key for key in keys if len({repr(values.get(key)) for values in settings}) > 1]
    rows = {
        key: tuple(Cell("not set" if values.get(key) is None else str(values[key])) for values in settings)
        for key in differing
        if key not in UNINTERESTING
    }
    versions = [environment_of(run) for run in runs]
    for key in dict.fromkeys(key for values in versions for key in values):
        cells = tuple(Cell(values.get(key, DASH)) for values in versions)
        if len(set(cells)) > 1:
            rows[key] = cells
    return rows, len(keys) - len(differing)


def environment_of(run: RunData) -> dict[str, str]:
    """Versions, device, processes and micro-batches of a run."""
    values = {"leanclip": str(run.info.get("version") or "")} | run.table("environment")
    for name in ("processes", "micro_batches"):
        values[name.replace("_", "-")] = count(run.info.get(name))
    return {name: str(value) for name, value in values.items() if value not in ("", DASH)}

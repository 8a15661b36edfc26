"""The report of one run: key figures, curves and evaluation tables."""

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from leanclip.reporting.charts import Chart, Series
from leanclip.reporting.run_reader import Evaluation, RunData, number

DIRECTIONS = {"text_to_image": "Text to image", "image_to_text": "Image to text"}
HEADLINE = "text_to_image_recall@10"
RECALL = re.compile(r"(text_to_image|image_to_text)_recall@(\d+)")
ZERO_SHOT = {"top1": "top-1", "top5": "top-5", "mean_per_class_recall": "mean per class"}
NOT_METRICS = re.compile(r"images|captions|chance@\d+")
NOT_CURVES = {"kind", "step", "epoch", "samples", "seconds"}  # axes, and what the throughput shows
DASH = "\N{EN DASH}"
TAU = "Temperature \N{GREEK SMALL LETTER TAU}"
MEMORY = {"gpu_memory_gib": "peak of the GPU", "resident_gib": "resident, maximum"}
HISTOGRAMS = {
    "log_u_image": "Estimator log u of the images",
    "log_u_text": "Estimator log u of the captions",
    "tau_image": f"{TAU} of the images",
    "tau_text": f"{TAU} of the captions",
}


class Curve(NamedTuple):
    """How a logged number is drawn."""

    title: str
    unit: str = ""
    from_zero: bool = False
    scale: float = 1.0
    always: bool = False  # also if a run has not logged it


CURVES = {
    "loss": Curve("Loss", always=True),
    "tau": Curve(TAU, always=True),
    "lr": Curve("Learning rate", from_zero=True, always=True),
    "samples_per_second": Curve("Throughput (samples per second)", from_zero=True, always=True),
    "grad_norm": Curve("Gradient norm", from_zero=True, always=True),
    "data_wait": Curve("Waiting for data (% of time)", " %", from_zero=True, scale=100, always=True),
    "gpu_memory_gib": Curve("Peak GPU memory (GiB)", " GiB", from_zero=True),
    "resident_gib": Curve("Resident memory (GiB)", " GiB", from_zero=True),
    "loss_bytes": Curve("Traffic of the loss (MB per step, all processes)", " MB", scale=1e-6),
    "loss_collectives": Curve("Collectives of the loss per step", from_zero=True),
}


class KeyFigure(NamedTuple):
    name: str
    value: str
    detail: str


class Cell(NamedTuple):
    text: str
    best: bool = False


class Row(NamedTuple):
    label: str
    epoch: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True, kw_only=True)
class Column:
    """A metric in a table; `better` is 1 if more is better, -1 if less is, 0 if neither."""

    key: str
    title: str
    share: bool = True  # shown in percent
    better: int = 1
    chance: float = math.nan

    def best(self, values: Sequence[float]) -> float:
        candidates = [value for value in values if value > 0]
        if not candidates or not self.better:
            return math.nan
        return max(candidates) if self.better > 0 else min(candidates)

    def cell(self, value: float, best: float) -> Cell:
        return Cell((percent if self.share else plain)(value), value == best)


@dataclass(frozen=True, kw_only=True)
class Table:
    """The evaluations on one set; `chance` has one text per column, or is empty if no chance is known."""

    set: str
    size: str
    groups: Mapping[str, Sequence[Column]]
    rows: tuple[Row, ...]
    chance: tuple[str, ...]


def percent(share: float) -> str:
    return f"{100 * share:.1f} %" if math.isfinite(share) else DASH


def plain(value: float) -> str:
    return f"{value:,.4g}" if math.isfinite(value) else DASH


def count(value: object) -> str:
    """A count in full below a million, above it to three digits: 12,800 and 151 M."""
    amount = number(value)
    if not math.isfinite(amount):
        return DASH
    for limit, suffix in ((1e9, "G"), (1e6, "M")):
        if amount >= limit:
            return f"{amount / limit:.3g} {suffix}"
    return f"{amount:,.0f}"


def duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return DASH
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{seconds:.0f} s" if seconds < 60 else f"{hours}:{minutes:02d} h" if hours else f"{minutes} min"


def moment(text: object) -> str:
    """An ISO time, to the minute; any other text unchanged."""
    try:
        time = datetime.fromisoformat(re.sub("Z$", "+00:00", str(text)))  # Python 3.10 does not read the Z
    except ValueError:
        return str(text)
    return f"{time:%Y-%m-%d %H:%M} {time.tzname() or ''}".rstrip()


def last_finite(values: Sequence[float]) -> float:
    return next((v for v in reversed(values) if math.isfinite(v)), math.nan)


def at_step(evaluation: Evaluation) -> str:
    return "before training" if evaluation.step == 0 else f"step {evaluation.step:,}"


def key_figures(run: RunData) -> list[KeyFigure]:
    figures = [recall_figure(run), *zero_shot_figures(run)]
    loss, tau, speeds, waits = (run.finite(key) for key in ("loss", "tau", "samples_per_second", "data_wait"))
    first = f"from {plain(loss[0])}" if loss else "no step logged yet"
    finite = not run.train or math.isfinite(run.column("loss")[-1])
    figures.append(KeyFigure("Loss", plain(last_finite(loss)), first if finite else "last logged loss is not finite"))
    speed = statistics.median(speeds) if speeds else math.nan
    waiting = f", {percent(statistics.median(waits))} waiting for data" if waits else ""
    text = DASH if not speeds else f"{speed:,.0f}" if speed >= 100 else f"{speed:,.1f}"
    figures.append(KeyFigure("Samples per second", text, f"median{waiting}" if speeds else "no step logged yet"))
    if memory := next(((values, kind) for key, kind in MEMORY.items() if (values := run.finite(key))), None):
        figures.append(KeyFigure("Memory", f"{max(memory[0]):.3g} GiB", memory[1]))
    course = "constant" if len(set(tau)) == 1 else f"from {plain(tau[0])}" if tau else "no step logged yet"
    figures.append(KeyFigure(TAU, plain(last_finite(tau)), course))
    planned = number(run.info.get("steps"))
    steps = f"step {run.train[-1]['step'] if run.train else 0:,}"
    steps += f" of {planned:,.0f}" if math.isfinite(planned) else ""
    return [*figures, KeyFigure("Time", duration(last_finite(run.column("seconds"))), steps)]


def zero_shot_figures(run: RunData) -> list[KeyFigure]:
    """The last top-1 on each classified set."""
    last = {e.set: e for e in run.evaluations if math.isfinite(e.value("top1"))}
    return [
        KeyFigure(
            f"Zero-shot top-1, {name}",
            percent(evaluation.value("top1")),
            (f"chance {percent(chance)}, " if (chance := evaluation.value("chance@1")) > 0 else "")
            + at_step(evaluation),
        )
        for name, evaluation in last.items()
    ]


def recall_figure(run: RunData) -> KeyFigure:
    """The last recall on "val", or on the set that was evaluated first."""
    name = "Text-to-image recall@10"
    evaluations = run.evaluations_on("val" if "val" in run.sets else next(iter(run.sets), ""))
    measured = [e for e in evaluations if math.isfinite(e.value(HEADLINE))]
    if not measured:
        return KeyFigure(name, DASH, "not evaluated yet" if run.status == "running" else "not evaluated")
    final, best = measured[-1], max(measured, key=lambda e: e.value(HEADLINE))
    value, chance = final.value(HEADLINE), final.value("chance@10")
    details: list[str] = []
    if chance > 0:
        ratio = value / chance
        details.append(f"chance {percent(chance)} ({ratio:.{1 if ratio < 10 else 0}f}\N{MULTIPLICATION SIGN})")
    details.append(at_step(final))
    if best.value(HEADLINE) > value:
        details.append(f"best {percent(best.value(HEADLINE))} at step {best.step:,}")
    return KeyFigure(name, percent(value), ", ".join(details))


def progress(run: RunData) -> float | None:
    """The share of the planned steps that a running run has logged; None for a run that has ended."""
    planned = number(run.info.get("steps"))
    if run.status != "running" or not planned > 0:
        return None
    return min(1.0, (run.steps[-1] if run.train else 0.0) / planned)


def curves(runs: Sequence[RunData]) -> dict[str, Curve]:
    """What to draw: the curves that every run has, then every other number that a run logged."""
    logged = {key for run in runs for row in run.train for key, value in row.items() if math.isfinite(number(value))}
    known = {key: curve for key, curve in CURVES.items() if curve.always or key in logged}
    return known | {key: Curve(key) for key in sorted(logged - CURVES.keys() - NOT_CURVES)}


def training_charts(run: RunData) -> list[Chart]:
    return [
        Chart(
            title=curve.title,
            series=(Series(name=curve.title, x=run.steps, y=[curve.scale * v for v in run.column(key)]),),
            unit=curve.unit,
            from_zero=curve.from_zero,
        )
        for key, curve in (curves([run]) if run.train else {}).items()
    ]


def ranks(evaluations: Sequence[Evaluation], direction: str) -> list[int]:
    matches = {match for e in evaluations for key in e.metrics if (match := RECALL.fullmatch(key))}
    return sorted({int(match[2]) for match in matches if match[1] == direction})


def chance_of(evaluation: Evaluation, key: str) -> float:
    """The value of guessing. A recall is known among images, and among captions only if there are as many."""
    if key in ("top1", "top5"):
        return evaluation.value(f"chance@{key[3:]}")
    match = RECALL.fullmatch(key)
    unequal = evaluation.metrics.get("images") != evaluation.metrics.get("captions")
    if match is None or (match[1] == "image_to_text" and unequal):
        return math.nan
    return evaluation.value(f"chance@{match[2]}")


def evaluation_charts(run: RunData) -> list[Chart]:
    charts: list[Chart] = []
    for name in run.sets:
        evaluations = run.evaluations_on(name)
        if len(evaluations) < 2:
            continue  # no curve; the table shows it
        known = {key for e in evaluations for key in e.metrics}
        lines = {
            f"{direction}_recall@10": {
                f"{direction}_recall@{k}": f"recall@{k}" for k in ranks(evaluations, direction)
            }
            for direction in DIRECTIONS
        }
        lines["top1"] = {key: title for key, title in ZERO_SHOT.items() if key in known}
        for main, metrics in lines.items():
            direction = DIRECTIONS.get(main.partition("_recall")[0])
            title = f"{direction} recall on {name} (%)" if direction else f"Zero-shot classification of {name} (%)"
            references = {"chance@10" if direction else "chance": 100 * chance_of(evaluations[-1], main)}
            series = [
                Series(name=text, x=[e.step for e in evaluations], y=[100 * e.value(key) for e in evaluations])
                for key, text in metrics.items()
            ]
            charts += [share_chart(title, series, references)] if series else []
    return charts


def share_chart(
    title: str, series: Sequence[Series], references: Mapping[str, float], x_label: str = "step"
) -> Chart:
    """Shares over the evaluations, in percent."""
    return Chart(
        title=title,
        series=series,
        unit=" %",
        from_zero=True,
        markers=True,
        x_label=x_label,
        references=references,
    )


def column_groups(evaluations: Sequence[Evaluation]) -> dict[str, list[Column]]:
    """The columns of a table: recalls by direction, classification, and any other metric unchanged."""
    last = evaluations[-1]
    known = {key for e in evaluations for key in e.metrics if not NOT_METRICS.fullmatch(key)}
    groups: dict[str, list[Column]] = {}
    for direction, title in DIRECTIONS.items():
        keys = {f"{direction}_recall@{rank}": f"R@{rank}" for rank in ranks(evaluations, direction)}
        groups[title] = [Column(key=key, title=text, chance=chance_of(last, key)) for key, text in keys.items()]
        if (median := f"{direction}_median_rank") in known:
            groups[title].append(Column(key=median, title="median rank", share=False, better=-1))
    groups["Zero-shot"] = [
        Column(key=key, title=title, chance=chance_of(last, key)) for key, title in ZERO_SHOT.items() if key in known
    ]
    others = sorted(known - {column.key for columns in groups.values() for column in columns})
    groups["Other"] = [Column(key=key, title=key, share=False, better=0) for key in others]
    return {title: columns for title, columns in groups.items() if columns}


def tables(run: RunData) -> list[Table]:
    return [table(name, run.evaluations_on(name)) for name in run.sets]


def table(name: str, evaluations: Sequence[Evaluation]) -> Table:
    """One row per evaluation: shares in percent, any other metric unchanged."""
    groups = column_groups(evaluations)
    columns = [column for group in groups.values() for column in group]
    several = len(evaluations) > 1  # one row has no best
    best = [column.best([e.value(column.key) for e in evaluations]) if several else math.nan for column in columns]
    rows = tuple(
        Row(
            label="before training" if e.step == 0 else f"{e.step:,}",
            epoch=plain(e.epoch),
            cells=tuple(c.cell(e.value(c.key), value) for c, value in zip(columns, best, strict=True)),
        )
        for e in evaluations
    )
    last = evaluations[-1]
    sizes = [f"{count(last.value(key))} {key}" for key in ("images", "captions") if math.isfinite(last.value(key))]
    chance = tuple(percent(column.chance) if math.isfinite(column.chance) else "" for column in columns)
    return Table(set=name, size=", ".join(sizes), groups=groups, rows=rows, chance=chance if any(chance) else ())

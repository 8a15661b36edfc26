"""What the report shows of a run: key figures, curves and evaluation tables."""

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from leanclip.reporting.chart import Chart, Reference, Series
from leanclip.reporting.record import Evaluation, RunRecord, number

DIRECTIONS = {"text_to_image": "Text to image", "image_to_text": "Image to text"}
HEADLINE = "text_to_image_recall@10"
RECALL = re.compile(r"(text_to_image|image_to_text)_recall@(\d+)")
NOT_METRICS = re.compile(r"images|captions|chance@\d+")
# Never a curve of its own: the axes and what the throughput already says.
NOT_CURVES = {"kind", "step", "epoch", "samples", "seconds"}
DASH = "\N{EN DASH}"


@dataclass(frozen=True, kw_only=True)
class KeyFigure:
    name: str
    value: str
    detail: str


@dataclass(frozen=True, kw_only=True)
class Cell:
    text: str
    best: bool = False


@dataclass(frozen=True, kw_only=True)
class Row:
    label: str
    epoch: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True, kw_only=True)
class Group:
    title: str
    columns: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Table:
    """The evaluations of one set; `chance` has one text per column, or none where no chance is known."""

    set: str
    size: str
    groups: tuple[Group, ...]
    rows: tuple[Row, ...]
    chance: tuple[str, ...]


def percent(share: float) -> str:
    return f"{100 * share:.1f} %" if math.isfinite(share) else DASH


def plain(value: float, digits: int = 4) -> str:
    return f"{value:,.{digits}g}" if math.isfinite(value) else DASH


def times(ratio: float) -> str:
    return f"{ratio:.{1 if ratio < 10 else 0}f}\N{MULTIPLICATION SIGN}"


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
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d} h"


def moment(text: object) -> str:
    """An ISO time, to the minute; text that is no time stays as it is."""
    try:
        # Python 3.10 does not know the suffix Z.
        time = datetime.fromisoformat(re.sub("Z$", "+00:00", str(text)))
    except ValueError:
        return str(text)
    return f"{time:%Y-%m-%d %H:%M} {time.tzname() or ''}".rstrip()


def last_finite(values: Sequence[float]) -> float:
    return next((v for v in reversed(values) if math.isfinite(v)), math.nan)


def key_figures(run: RunRecord) -> list[KeyFigure]:
    return [recall_figure(run), loss_figure(run), throughput_figure(run), tau_figure(run), time_figure(run)]


def recall_figure(run: RunRecord) -> KeyFigure:
    name = "Text-to-image recall@10"
    evaluations = main_set(run.evaluations)
    measured = [e for e in evaluations if math.isfinite(e.metrics.get(HEADLINE, math.nan))]
    if not measured:
        return KeyFigure(
            name=name, value=DASH, detail="not evaluated yet" if run.status == "running" else "not evaluated"
        )
    final = measured[-1]
    best = max(measured, key=lambda e: e.metrics[HEADLINE])
    value, chance = final.metrics[HEADLINE], final.metrics.get("chance@10", math.nan)
    details: list[str] = []
    if chance > 0:
        details.append(f"chance {percent(chance)} ({times(value / chance)})")
    details.append("before training" if final.step == 0 else f"step {final.step:,}")
    if best.metrics[HEADLINE] > value:
        details.append(f"best {percent(best.metrics[HEADLINE])} at step {best.step:,}")
    return KeyFigure(name=name, value=percent(value), detail=", ".join(details))


def loss_figure(run: RunRecord) -> KeyFigure:
    loss = run.column("loss")
    finite = [v for v in loss if math.isfinite(v)]
    detail = f"from {plain(finite[0])}" if finite else "no step logged yet"
    if loss and not math.isfinite(loss[-1]):
        detail = "last logged loss is not finite"
    return KeyFigure(name="Loss", value=plain(last_finite(loss)), detail=detail)


def throughput_figure(run: RunRecord) -> KeyFigure:
    speeds = [v for v in run.column("samples_per_second") if math.isfinite(v)]
    waits = [v for v in run.column("data_wait") if math.isfinite(v)]
    value = f"{statistics.median(speeds):,.{0 if statistics.median(speeds) >= 100 else 1}f}" if speeds else DASH
    detail = "median" + (f", {percent(statistics.median(waits))} waiting for data" if waits else "")
    return KeyFigure(name="Samples per second", value=value, detail=detail if speeds else "no step logged yet")


def tau_figure(run: RunRecord) -> KeyFigure:
    finite = [v for v in run.column("tau") if math.isfinite(v)]
    detail = "no step logged yet"
    if finite:
        detail = "constant" if min(finite) == max(finite) else f"from {plain(finite[0])}"
    return KeyFigure(name="Temperature \N{GREEK SMALL LETTER TAU}", value=plain(last_finite(finite)), detail=detail)


def time_figure(run: RunRecord) -> KeyFigure:
    done = run.train[-1]["step"] if run.train else 0
    planned = number(run.info.get("steps"))
    detail = f"step {done:,}" + (f" of {planned:,.0f}" if math.isfinite(planned) else "")
    return KeyFigure(name="Time", value=duration(last_finite(run.column("seconds"))), detail=detail)


def progress(run: RunRecord) -> float | None:
    """The share of the planned steps that a running run has logged; none for a run that has ended."""
    planned = number(run.info.get("steps"))
    if run.status != "running" or not planned > 0:
        return None
    return min(1.0, (run.steps[-1] if run.train else 0.0) / planned)


def training_charts(run: RunRecord) -> list[Chart]:
    """Curves over steps: the ones every run has, then every other number the run logged."""
    if not run.train:
        return []
    named = {
        "loss": Chart(title="Loss", series=()),
        "tau": Chart(title="Temperature \N{GREEK SMALL LETTER TAU}", series=()),
        "lr": Chart(title="Learning rate", series=(), from_zero=True),
        "samples_per_second": Chart(title="Throughput (samples per second)", series=(), from_zero=True),
        "grad_norm": Chart(title="Gradient norm", series=(), from_zero=True),
        "data_wait": Chart(title="Waiting for data (% of time)", series=(), unit=" %", from_zero=True),
    }
    others = {key for row in run.train for key, value in row.items() if math.isfinite(number(value))}
    for key in sorted(others - named.keys() - NOT_CURVES):
        named[key] = Chart(title=key, series=())
    return [with_line(chart, run, key) for key, chart in named.items()]


def with_line(chart: Chart, run: RunRecord, key: str) -> Chart:
    scale = 100 if chart.unit == " %" else 1
    line = Series(name=chart.title, x=run.steps, y=[scale * v for v in run.column(key)])
    return Chart(title=chart.title, series=(line,), unit=chart.unit, from_zero=chart.from_zero)


def main_set(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """The evaluations on "val", or on the set that was evaluated first when there is none of that name."""
    names = [e.set for e in evaluations]
    chosen = "val" if "val" in names else next(iter(names), "")
    return [e for e in evaluations if e.set == chosen]


def sets(evaluations: Sequence[Evaluation]) -> list[str]:
    return list(dict.fromkeys(e.set for e in evaluations))


def ranks(evaluations: Sequence[Evaluation], direction: str) -> list[int]:
    found = {match for e in evaluations for key in e.metrics if (match := RECALL.fullmatch(key))}
    return sorted({int(match[2]) for match in found if match[1] == direction})


def chance_of(metrics: Mapping[str, float], direction: str, rank: int) -> float:
    """The recall of guessing among the images; it holds for captions only when there are as many of them."""
    if direction == "image_to_text" and metrics.get("images") != metrics.get("captions"):
        return math.nan
    return metrics.get(f"chance@{rank}", math.nan)


def recall_charts(run: RunRecord) -> list[Chart]:
    charts: list[Chart] = []
    for name in sets(run.evaluations):
        chosen = [e for e in run.evaluations if e.set == name]
        for direction, title in DIRECTIONS.items():
            series = [
                Series(
                    name=f"recall@{rank}",
                    x=[e.step for e in chosen],
                    y=[100 * e.metrics.get(f"{direction}_recall@{rank}", math.nan) for e in chosen],
                )
                for rank in ranks(chosen, direction)
            ]
            # One evaluation makes no curve; the table shows it.
            if series and len(chosen) > 1:
                chance = Reference(name="chance@10", value=100 * chance_of(chosen[-1].metrics, direction, 10))
                charts.append(
                    Chart(
                        title=f"{title} recall on {name} (%)",
                        series=series,
                        unit=" %",
                        from_zero=True,
                        markers=True,
                        references=(chance,),
                    )
                )
    return charts


def tables(run: RunRecord) -> list[Table]:
    return [table(name, [e for e in run.evaluations if e.set == name]) for name in sets(run.evaluations)]


def table(name: str, evaluations: Sequence[Evaluation]) -> Table:
    """One row per evaluation: recalls in percent by direction, any other metric as it was recorded."""
    groups: list[Group] = []
    keys: list[str] = []
    chance: list[str] = []
    last = evaluations[-1].metrics
    for direction, title in DIRECTIONS.items():
        found = ranks(evaluations, direction)
        if found:
            groups.append(Group(title=title, columns=tuple(f"R@{rank}" for rank in found)))
            keys += [f"{direction}_recall@{rank}" for rank in found]
            chances = (chance_of(last, direction, rank) for rank in found)
            chance += [percent(value) if math.isfinite(value) else "" for value in chances]
    others = {key for e in evaluations for key in e.metrics} - set(keys)
    others = sorted(key for key in others if not NOT_METRICS.fullmatch(key))
    if others:
        groups.append(Group(title="Other", columns=tuple(others)))
        keys += others
        chance += [""] * len(others)
    recall_columns = len(keys) - len(others)
    best = [
        max((v for e in evaluations if math.isfinite(v := e.metrics.get(key, math.nan))), default=0) for key in keys
    ]
    rows = [
        Row(
            label="before training" if e.step == 0 else f"{e.step:,}",
            epoch=f"{e.epoch:.4g}" if math.isfinite(e.epoch) else DASH,
            cells=tuple(
                Cell(
                    text=(percent if i < recall_columns else plain)(value),
                    # Whether more is better is only known for recalls; one row has nothing to be best of.
                    best=i < recall_columns and len(evaluations) > 1 and value > 0 and value == best[i],
                )
                for i, value in enumerate(e.metrics.get(key, math.nan) for key in keys)
            ),
        )
        for e in evaluations
    ]
    images, captions = last.get("images", math.nan), last.get("captions", math.nan)
    size = f"{count(images)} images, {count(captions)} captions" if math.isfinite(images + captions) else ""
    shown_chance = tuple(chance) if any(chance) else ()
    return Table(set=name, size=size, groups=tuple(groups), rows=tuple(rows), chance=shown_chance)

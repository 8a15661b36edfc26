"""What the report shows of a run: key figures, curves and evaluation tables."""

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from leanclip.reporting.chart import Chart, Reference, Series
from leanclip.reporting.run_reader import Evaluation, RunRecord, number

DIRECTIONS = {"text_to_image": "Text to image", "image_to_text": "Image to text"}
HEADLINE = "text_to_image_recall@10"
RECALL = re.compile(r"(text_to_image|image_to_text)_recall@(\d+)")
ZERO_SHOT = {"top1": "top-1", "top5": "top-5", "mean_per_class_recall": "mean per class"}
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
class Column:
    """A metric in a table; `better` is 1 where more is better, -1 where less is, 0 where nobody knows."""

    key: str
    title: str
    share: bool = True  # shown in percent
    better: int = 1
    chance: float = math.nan


@dataclass(frozen=True, kw_only=True)
class Group:
    title: str
    columns: tuple[Column, ...]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """How a logged number is drawn."""

    title: str
    unit: str = ""
    from_zero: bool = False
    scale: float = 1.0
    always: bool = False  # also where a run has not logged it


TAU = "Temperature \N{GREEK SMALL LETTER TAU}"
CURVES = {
    "loss": Curve(title="Loss", always=True),
    "tau": Curve(title=TAU, always=True),
    "lr": Curve(title="Learning rate", from_zero=True, always=True),
    "samples_per_second": Curve(title="Throughput (samples per second)", from_zero=True, always=True),
    "grad_norm": Curve(title="Gradient norm", from_zero=True, always=True),
    "data_wait": Curve(title="Waiting for data (% of time)", unit=" %", from_zero=True, scale=100, always=True),
    "gpu_memory_gib": Curve(title="Peak GPU memory (GiB)", unit=" GiB", from_zero=True),
    "resident_gib": Curve(title="Resident memory (GiB)", unit=" GiB", from_zero=True),
    "loss_bytes": Curve(title="Spread over the processes for the loss (MB per step)", unit=" MB", scale=1e-6),
    "loss_collectives": Curve(title="Collectives for the loss per step", from_zero=True),
}
MEMORY = ("gpu_memory_gib", "resident_gib")
HISTOGRAMS = {
    "log_u_image": "Estimator log u of the images",
    "log_u_text": "Estimator log u of the texts",
    "tau_image": f"{TAU} of the images",
    "tau_text": f"{TAU} of the texts",
}


@dataclass(frozen=True, kw_only=True)
class Table:
    """The evaluations of one set; `chance` has one text per column, or none where no chance is known."""

    set: str
    size: str
    groups: tuple[Group, ...]
    rows: tuple[Row, ...]
    chance: tuple[str, ...]

    @property
    def several(self) -> bool:
        return len(self.rows) > 1


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
    found = [recall_figure(run), *zero_shot_figures(run), loss_figure(run), throughput_figure(run)]
    return [*found, *memory_figures(run), tau_figure(run), time_figure(run)]


def zero_shot_figures(run: RunRecord) -> list[KeyFigure]:
    """One figure for each set that was classified: its last top-1."""
    last = {e.set: e for e in run.evaluations if math.isfinite(e.metrics.get("top1", math.nan))}
    found: list[KeyFigure] = []
    for name, evaluation in last.items():
        chance = evaluation.metrics.get("chance@1", math.nan)
        details = [f"chance {percent(chance)}"] if chance > 0 else []
        details.append("before training" if evaluation.step == 0 else f"step {evaluation.step:,}")
        found.append(
            KeyFigure(
                name=f"Zero-shot top-1, {name}", value=percent(evaluation.metrics["top1"]), detail=", ".join(details)
            )
        )
    return found


def memory_figures(run: RunRecord) -> list[KeyFigure]:
    for key in MEMORY:
        values = [v for v in run.column(key) if math.isfinite(v)]
        if values:
            kind = "peak of the GPU" if key == "gpu_memory_gib" else "resident, at most"
            return [KeyFigure(name="Memory", value=f"{max(values):.3g} GiB", detail=kind)]
    return []


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


def curves(runs: Sequence[RunRecord]) -> dict[str, Curve]:
    """What to draw: the curves that every run has, then every other number that one of them logged."""
    logged = {key for run in runs for row in run.train for key, value in row.items() if math.isfinite(number(value))}
    known = {key: curve for key, curve in CURVES.items() if curve.always or key in logged}
    return known | {key: Curve(title=key) for key in sorted(logged - CURVES.keys() - NOT_CURVES)}


def training_charts(run: RunRecord) -> list[Chart]:
    """Curves over steps: the ones every run has, then every other number the run logged."""
    if not run.train:
        return []
    return [
        Chart(
            title=curve.title,
            series=(Series(name=curve.title, x=run.steps, y=[curve.scale * v for v in run.column(key)]),),
            unit=curve.unit,
            from_zero=curve.from_zero,
        )
        for key, curve in curves([run]).items()
    ]


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


def evaluation_charts(run: RunRecord) -> list[Chart]:
    charts: list[Chart] = []
    for name in sets(run.evaluations):
        chosen = [e for e in run.evaluations if e.set == name]
        # One evaluation makes no curve; the table shows it.
        if len(chosen) < 2:
            continue
        for direction, title in DIRECTIONS.items():
            named = {f"{direction}_recall@{rank}": f"recall@{rank}" for rank in ranks(chosen, direction)}
            chance = Reference(name="chance@10", value=100 * chance_of(chosen[-1].metrics, direction, 10))
            charts += share_chart(f"{title} recall on {name} (%)", chosen, named, chance)
        chance = Reference(name="chance", value=100 * chosen[-1].metrics.get("chance@1", math.nan))
        found = {key: title for key, title in ZERO_SHOT.items() if any(key in e.metrics for e in chosen)}
        charts += share_chart(f"Zero-shot classification of {name} (%)", chosen, found, chance)
    return charts


def share_chart(
    title: str, evaluations: Sequence[Evaluation], named: Mapping[str, str], chance: Reference
) -> list[Chart]:
    """Shares in percent over the evaluations, if there are any."""
    series = [
        Series(
            name=name,
            x=[e.step for e in evaluations],
            y=[100 * e.metrics.get(key, math.nan) for e in evaluations],
        )
        for key, name in named.items()
    ]
    if not series:
        return []
    return [Chart(title=title, series=series, unit=" %", from_zero=True, markers=True, references=(chance,))]


def tables(run: RunRecord) -> list[Table]:
    return [table(name, [e for e in run.evaluations if e.set == name]) for name in sets(run.evaluations)]


def groups(evaluations: Sequence[Evaluation]) -> list[Group]:
    """The columns of a set's table: recalls by direction, classification, and any other metric as it is."""
    last = evaluations[-1].metrics
    known = {key for e in evaluations for key in e.metrics}
    found: list[Group] = []
    for direction, title in DIRECTIONS.items():
        columns = [
            Column(key=f"{direction}_recall@{rank}", title=f"R@{rank}", chance=chance_of(last, direction, rank))
            for rank in ranks(evaluations, direction)
        ]
        if f"{direction}_median_rank" in known:
            columns.append(Column(key=f"{direction}_median_rank", title="median rank", share=False, better=-1))
        found.append(Group(title=title, columns=tuple(columns)))
    chance = {"top1": last.get("chance@1", math.nan), "top5": last.get("chance@5", math.nan)}
    columns = [
        Column(key=key, title=title, chance=chance.get(key, math.nan))
        for key, title in ZERO_SHOT.items()
        if key in known
    ]
    found.append(Group(title="Zero-shot", columns=tuple(columns)))
    others = sorted(
        key for key in known - {c.key for g in found for c in g.columns} if not NOT_METRICS.fullmatch(key)
    )
    found.append(
        Group(title="Other", columns=tuple(Column(key=key, title=key, share=False, better=0) for key in others))
    )
    return [group for group in found if group.columns]


def table(name: str, evaluations: Sequence[Evaluation]) -> Table:
    """One row per evaluation: shares in percent, any other metric as it was recorded."""
    found = groups(evaluations)
    columns = [column for group in found for column in group.columns]
    best = [best_of(column, [e.metrics.get(column.key, math.nan) for e in evaluations]) for column in columns]
    rows = [
        Row(
            label="before training" if e.step == 0 else f"{e.step:,}",
            epoch=f"{e.epoch:.4g}" if math.isfinite(e.epoch) else DASH,
            cells=tuple(
                # One row has nothing to be best of.
                cell(column, e.metrics.get(column.key, math.nan), best[i] if len(evaluations) > 1 else math.nan)
                for i, column in enumerate(columns)
            ),
        )
        for e in evaluations
    ]
    last = evaluations[-1].metrics
    sizes = [f"{count(last[key])} {key}" for key in ("images", "captions") if math.isfinite(last.get(key, math.nan))]
    chance = tuple(percent(column.chance) if math.isfinite(column.chance) else "" for column in columns)
    return Table(
        set=name,
        size=", ".join(sizes),
        groups=tuple(found),
        rows=tuple(rows),
        chance=chance if any(chance) else (),
    )


def best_of(column: Column, values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value) and value > 0]
    if not finite or not column.better:
        return math.nan
    return max(finite) if column.better > 0 else min(finite)


def cell(column: Column, value: float, best: float) -> Cell:
    return Cell(text=(percent if column.share else plain)(value), best=value == best)

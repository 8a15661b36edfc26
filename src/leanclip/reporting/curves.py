"""Curves of one run, or of several on the same axes, where a run has the same colour in all charts."""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from leanclip.reporting.charts import Chart, Series
from leanclip.reporting.run_reader import Evaluation, Histogram, RunData, number

DIRECTIONS = {"text_to_image": "Text to image", "image_to_text": "Image to text"}
RECALL = re.compile(r"(text_to_image|image_to_text)_recall@(\d+)")
ZERO_SHOT = {"top1": "top-1", "top5": "top-5", "mean_per_class_recall": "mean per class"}
NOT_CURVES = {"kind", "step", "epoch", "samples", "seconds"}  # axes, and what the throughput shows
TAU = "Temperature \N{GREEK SMALL LETTER TAU}"
HISTOGRAMS = {
    "log_u_image": "Estimator log u of the images",
    "log_u_text": "Estimator log u of the captions",
    "tau_image": f"{TAU} of the images",
    "tau_text": f"{TAU} of the captions",
}
QUANTILES = {"95 %": 0.95, "median": 0.5, "5 %": 0.05}

Points = tuple[Sequence[float], Sequence[float]]


class Curve(NamedTuple):
    """How a logged number is drawn."""

    title: str
    unit: str = ""
    from_zero: bool = False
    scale: float = 1.0


CURVES = {
    "loss": Curve("Loss"),
    "tau": Curve(TAU),
    "lr": Curve("Learning rate", from_zero=True),
    "samples_per_second": Curve("Throughput (samples per second)", from_zero=True),
    "grad_norm": Curve("Gradient norm", from_zero=True),
    "data_wait": Curve("Waiting for data (% of time)", " %", from_zero=True, scale=100),
    "gpu_memory_gib": Curve("Peak GPU memory (GiB)", " GiB", from_zero=True),
    "resident_gib": Curve("Resident memory (GiB)", " GiB", from_zero=True),
    "loss_bytes": Curve("Traffic of the loss (MB per step, all processes)", " MB", scale=1e-6),
    "loss_collectives": Curve("Collectives of the loss per step", from_zero=True),
}


class XAxis(NamedTuple):
    """The x axis of all charts: steps, or pairs if the batch sizes differ."""

    label: str
    factors: tuple[float, ...]  # pairs per step, or one


def x_axis(runs: Sequence[RunData]) -> XAxis:
    batches = [number(run.info.get("global_batch")) for run in runs]
    if len(set(batches)) == 1 or not all(batch > 0 for batch in batches):
        return XAxis("step", (1.0,) * len(runs))
    return XAxis("pairs", tuple(batches))


def series_of(runs: Sequence[RunData], names: Sequence[str], points: Callable[[RunData], Points]) -> list[Series]:
    """A line for each run that has values; a single run needs no colour of its own."""
    factors = x_axis(runs).factors
    lines = [points(run) for run in runs]
    return with_values(
        Series(name=names[i], x=[factors[i] * x for x in xs], y=ys, colour=i if len(runs) > 1 else None)
        for i, (xs, ys) in enumerate(lines)
    )


def with_values(lines: Iterable[Series]) -> list[Series]:
    return [line for line in lines if any(math.isfinite(y) for y in line.y)]


def training_charts(runs: Sequence[RunData], names: Sequence[str]) -> list[Chart]:
    """The known curves first, then every other number that a run logged."""
    logged = {key for run in runs for row in run.train for key, value in row.items() if math.isfinite(number(value))}
    keys = [key for key in CURVES if key in logged] + sorted(logged - CURVES.keys() - NOT_CURVES)
    charts: list[Chart] = []
    for key in keys:
        curve = CURVES.get(key, Curve(key))

        def points(run: RunData, key: str = key, scale: float = curve.scale) -> Points:
            return run.steps, [scale * value for value in run.column(key)]

        charts.append(
            Chart(
                title=curve.title,
                series=series_of(runs, names, points),
                unit=curve.unit,
                from_zero=curve.from_zero,
                x_label=x_axis(runs).label,
            )
        )
    return charts


def quantile(histogram: Histogram, share: float) -> float:
    """The value below which a share of the counted samples lies, to the width of a bin; NaN without any sample."""
    target, below = share * sum(histogram.counts), 0
    if not target:
        return math.nan
    for count, (low, high) in zip(histogram.counts, itertools.pairwise(histogram.edges), strict=True):
        if count and below + count >= target:
            return low + (high - low) * (target - below) / count
        below += count
    return histogram.edges[-1]


def histogram_charts(runs: Sequence[RunData], names: Sequence[str]) -> list[Chart]:
    """Per-sample quantities over time: three quantiles of one run, the medians of several."""
    charts: list[Chart] = []
    for key in dict.fromkeys(name for run in runs for name in run.histograms):

        def points(run: RunData, share: float = 0.5, key: str = key) -> Points:
            rows = run.histograms.get(key, ())
            return [row.step for row in rows], [quantile(row, share) for row in rows]

        title = HISTOGRAMS.get(key, key)
        if len(runs) > 1:
            title, series, note = f"{title}, median", series_of(runs, names, points), ""
        else:
            lines = [(name, points(runs[0], share)) for name, share in QUANTILES.items()]
            series = with_values(Series(name=name, x=x, y=y) for name, (x, y) in lines)
            last = runs[0].histograms[key][-1]
            absent = last.absent / max(1, sum(last.counts) + last.absent)
            note = f"{absent:.1%} of the samples not visited yet." if absent else ""
        chart = Chart(title=title, series=series, markers=True, x_label=x_axis(runs).label, note=note)
        charts += [chart] if series else []
    return charts


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
    """For each set that was evaluated twice, the recalls of each direction and the accuracies."""
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
            series = with_values(
                Series(name=text, x=[e.step for e in evaluations], y=[100 * e.value(key) for e in evaluations])
                for key, text in metrics.items()
            )
            chart = Chart(title=title, series=series, unit=" %", from_zero=True, markers=True, references=references)
            charts += [chart] if series else []
    return charts


def compared_evaluations(runs: Sequence[RunData], names: Sequence[str]) -> list[Chart]:
    """One chart for each set and metric with at least two evaluations of a run."""
    charts: list[Chart] = []
    for name in sets(runs):
        if max(len(run.evaluations_on(name)) for run in runs) < 2:
            continue
        for key, title in compared_metrics(runs, name).items():

            def points(run: RunData, name: str = name, key: str = key) -> Points:
                evaluations = run.evaluations_on(name)
                return [e.step for e in evaluations], [100 * e.value(key) for e in evaluations]

            chances = {chance_of(e, key) for run in runs for e in run.evaluations_on(name)}
            references = {"chance": 100 * chances.pop()} if len(chances) == 1 else {}
            series = series_of(runs, names, points)
            chart = Chart(
                title=f"{title} on {name} (%)",
                series=series,
                unit=" %",
                from_zero=True,
                markers=True,
                x_label=x_axis(runs).label,
                references=references,
            )
            charts += [chart] if series else []
    return charts


def sets(runs: Sequence[RunData]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in run.sets))


def compared_metrics(runs: Sequence[RunData], name: str) -> dict[str, str]:
    """The compared metrics of a set: recalls at 1 and at the largest rank, and classification."""
    evaluations = [e for run in runs for e in run.evaluations_on(name)]
    titles: dict[str, str] = {}
    for direction, title in DIRECTIONS.items():
        for rank in sorted({*ranks(evaluations, direction)[:1], *ranks(evaluations, direction)[-1:]}, reverse=True):
            titles[f"{direction}_recall@{rank}"] = f"{title} R@{rank}"
    known = {key for e in evaluations for key in e.metrics}
    return titles | {key: f"Zero-shot {title}" for key, title in ZERO_SHOT.items() if key in known}

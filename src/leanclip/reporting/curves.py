"""Curves of one run, or of several on the same axes, where a run has the same colour in all charts."""

import itertools
import math
import re
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from leanclip.chance import chance_of_recall
from leanclip.reporting.charts import Chart, Series
from leanclip.reporting.run_reader import Evaluation, Histogram, RunData, number

DIRECTIONS = {"text_to_image": "Text to image", "image_to_text": "Image to text"}
RECALL = re.compile(r"(text_to_image|image_to_text)_recall@(\d{1,3})")
ZERO_SHOT = {"top1": "top-1", "top5": "top-5", "mean_per_class_recall": "mean per class"}
# Axes, and what the throughput and the section on pair weights show.
NOT_CURVES = {"kind", "step", "epoch", "samples", "seconds", "wrong_pairs"}
TAU = "Temperature \N{GREEK SMALL LETTER TAU}"
QUANTILES = {"95 %": 0.95, "median": 0.5, "5 %": 0.05}
STUDENT = {1: 12.7, 2: 4.3, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31}  # 97.5 %, by degrees of freedom

Points = tuple[Sequence[float], Sequence[float]]


class Curve(NamedTuple):
    """How a logged number is drawn, and what it means in one sentence."""

    title: str
    note: str = ""
    unit: str = ""
    from_zero: bool = False
    scale: float = 1.0


COUNTED = "so far; zero is what you want."
CURVES = {
    "loss": Curve("Loss", "What training minimises. Its scale depends on the kind of loss and on the batch."),
    "tau": Curve(TAU, "Similarities are divided by it. Lower: the hardest negatives count more."),
    "lr": Curve("Learning rate", "The size of the optimizer's steps, by the schedule.", from_zero=True),
    "samples_per_second": Curve(
        "Throughput (samples per second)", "Pairs trained on, all processes together.", from_zero=True
    ),
    "grad_norm": Curve("Gradient norm", "Length of the gradient before clipping. Peaks: unstable.", from_zero=True),
    "data_wait": Curve(
        "Waiting for data (% of time)",
        "Above a few percent the loader limits the speed: more --workers help.",
        " %",
        from_zero=True,
        scale=100,
    ),
    "gpu_memory_gib": Curve(
        "Peak GPU memory (GiB)", "Of the first process, between two log lines.", " GiB", from_zero=True
    ),
    "resident_gib": Curve("Resident memory (GiB)", "Main memory of the first process.", " GiB", from_zero=True),
    "effective_negatives": Curve(
        "Effective negatives",
        "How many wrong pairs share the weight of an anchor: near the batch size at first, then the few hard ones.",
        from_zero=True,
    ),
    "gamma": Curve(
        "Inner learning rate \N{GREEK SMALL LETTER GAMMA}",
        "The weight of the current batch in the running estimates; 1 forgets all before it.",
        from_zero=True,
    ),
    "estimate_gap": Curve(
        "Lag of the running estimates",
        "Mean distance between the stored log u and that of the current batch. Above 2: raise --gamma-min.",
        from_zero=True,
    ),
    "log_u_mean": Curve(
        "Running estimates, mean",
        "Mean of log u: how strongly negatives compete with the positive. It falls while the model learns.",
    ),
    "log_u_spread": Curve(
        "Running estimates, spread",
        "Standard deviation of log u over the samples of a batch: how much harder some are than others.",
        from_zero=True,
    ),
    "never_visited": Curve(
        "Samples without a running estimate (%)",
        "Not visited yet, held out or excluded.",
        " %",
        from_zero=True,
        scale=100,
    ),
    "bias": Curve("Bias", "The learned offset of the sigmoid loss."),
    "loss_scale": Curve(
        "Scale of the fp16 gradients", "It falls when gradients overflow, and grows again.", from_zero=True
    ),
    "skipped_steps": Curve("Skipped steps", f"Steps with values that were not finite, {COUNTED}", from_zero=True),
    "loss_bytes": Curve(
        "Traffic of the loss (MB per step)", "What all processes exchange to compute it.", " MB", scale=1e-6
    ),
    "loss_collectives": Curve(
        "Collectives of the loss per step", "How often the processes exchange something for it.", from_zero=True
    ),
}
STATE_NOTE = "Running estimate of each sample: how strongly its negatives compete with its positive."
TAU_NOTE = "Each sample has its own; hard ones get another than easy ones."
HISTOGRAMS = {
    "log_u_image": Curve("Estimate log u of the images", STATE_NOTE),
    "log_u_text": Curve("Estimate log u of the captions", STATE_NOTE),
    "tau_image": Curve(f"{TAU} of the images", TAU_NOTE),
    "tau_text": Curve(f"{TAU} of the captions", TAU_NOTE),
}


def curve_of(key: str) -> Curve:
    """A number that this module does not know is drawn under its own name."""
    if key.startswith("broken_"):
        return Curve(f"Broken samples: {key[7:].replace('_', ' ')}", f"Left out, {COUNTED}", from_zero=True)
    return CURVES.get(key) or HISTOGRAMS.get(key) or Curve(key)


class XAxis(NamedTuple):
    """The x axis of all charts: steps, or pairs if the batch sizes differ."""

    label: str
    factors: tuple[float, ...]  # pairs per step, or one


def x_axis(runs: Sequence[RunData]) -> XAxis:
    batches = [number(run.info.get("global_batch")) for run in runs]
    if len(set(batches)) == 1 or not all(batch > 0 for batch in batches):
        return XAxis("step", (1.0,) * len(runs))
    return XAxis("pairs", tuple(batches))


def series_of(runs: Sequence[RunData], names: Sequence[str], points: Iterable[Points]) -> list[Series]:
    """A line for each run that has values, from the points of each; a single run needs no colour of its own."""
    factors = x_axis(runs).factors
    return with_values(
        Series(name=names[i], x=[factors[i] * x for x in xs], y=ys, colour=i if len(runs) > 1 else None)
        for i, (xs, ys) in enumerate(points)
    )


def with_values(lines: Iterable[Series]) -> list[Series]:
    return [line for line in lines if any(math.isfinite(y) for y in line.y)]


def training_charts(runs: Sequence[RunData], names: Sequence[str]) -> list[Chart]:
    """The known curves first, then every other number that a run logged."""
    logged = {key for run in runs for row in run.train for key, value in row.items() if math.isfinite(number(value))}
    keys = [key for key in CURVES if key in logged] + sorted(logged - CURVES.keys() - NOT_CURVES)
    charts: list[Chart] = []
    for key in keys:
        curve = curve_of(key)
        points = [(run.steps, [curve.scale * value for value in run.column(key)]) for run in runs]
        charts.append(
            Chart(
                title=curve.title,
                series=series_of(runs, names, points),
                unit=curve.unit,
                from_zero=curve.from_zero,
                x_label=x_axis(runs).label,
                note=curve.note,
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


def quantiles(run: RunData, key: str, share: float) -> Points:
    rows = run.histograms.get(key, ())
    return [row.step for row in rows], [quantile(row, share) for row in rows]


def histogram_charts(runs: Sequence[RunData], names: Sequence[str]) -> list[Chart]:
    """Per-sample quantities over time: three quantiles of one run, the medians of several."""
    charts: list[Chart] = []
    for key in dict.fromkeys(name for run in runs for name in run.histograms):
        title, note, *_ = curve_of(key)
        if len(runs) > 1:
            medians = [quantiles(run, key, 0.5) for run in runs]
            title, series = f"{title}, median", series_of(runs, names, medians)
        else:
            lines = [(name, quantiles(runs[0], key, share)) for name, share in QUANTILES.items()]
            series = with_values(Series(name=name, x=x, y=y) for name, (x, y) in lines)
            last = runs[0].histograms[key][-1]
            absent = last.absent / max(1, sum(last.counts) + last.absent)
            note += " Lines: nine in ten samples lie between the outer ones."
            note += (
                f" {absent:.1%} of the samples have none: not visited yet, held out or excluded." if absent else ""
            )
        chart = Chart(title=title, series=series, markers=True, x_label=x_axis(runs).label, note=note)
        charts += [chart] if series else []
    return charts


def ranks(evaluations: Sequence[Evaluation], direction: str) -> list[int]:
    matches = {match for e in evaluations for key in e.metrics if (match := RECALL.fullmatch(key))}
    return sorted({int(match[2]) for match in matches if match[1] == direction})


def chance_of(evaluation: Evaluation, key: str) -> float:
    """The value of guessing."""
    if key in ZERO_SHOT:
        return evaluation.value("chance@5" if key == "top5" else "chance@1")
    if (match := RECALL.fullmatch(key)) is None:
        return math.nan
    images, captions = evaluation.value("images"), evaluation.value("captions")
    return chance_of_recall(match[1], int(match[2]), images=images, captions=captions)


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
            title = f"{direction} recall on {name} (%)" if direction else f"Zero-shot accuracy on {name} (%)"
            chance = "chance of recall@10:" if direction else "chance of top-1:"
            references = {chance: 100 * chance_of(evaluations[-1], main)}
            series = with_values(
                Series(name=text, x=[e.step for e in evaluations], y=[100 * e.value(key) for e in evaluations])
                for key, text in metrics.items()
            )
            chart = Chart(title=title, series=series, unit=" %", from_zero=True, markers=True, references=references)
            charts += [chart] if series else []
    return charts


def trend_charts(run: RunData) -> list[Chart]:
    """Is it still learning? Held-out recall with a straight line through the last third, and what that says.

    None with fewer than three evaluations there.
    """
    key = "text_to_image_recall@10"
    points = [(e.step, 100 * e.value(key)) for e in run.evaluations if e.set == "val" and math.isfinite(e.value(key))]
    last = [(step, value) for step, value in points if 3 * step >= 2 * points[-1][0]]
    if len(last) < 3:
        return []
    steps, values = zip(*last, strict=True)
    slope, start = statistics.linear_regression(steps, values)
    fitted = [start + slope * step for step in steps]
    residual = math.dist(values, fitted) / math.sqrt(len(last) - 2)
    spread = math.sqrt(sum((step - statistics.fmean(steps)) ** 2 for step in steps))
    span = steps[-1] - steps[0]
    change, margin = slope * span, STUDENT.get(len(last) - 2, 2.0) * residual / spread * span
    verdict = "Still learning" if change > margin else "Getting worse" if change < -margin else "No clear change"
    note = f"{verdict}: {change:+.1f} \N{PLUS-MINUS SIGN} {margin:.1f} points over the last third of the steps so far"
    note += f" (a straight line through {len(last)} evaluations, 95 % interval)."
    lines = {"recall@10": zip(*points, strict=True), "last third": (steps, fitted)}
    series = [Series(name=name, x=x, y=y) for name, (x, y) in lines.items()]
    title = "Is it still learning? Text to image recall on val (%)"
    return [Chart(title=title, series=series, unit=" %", from_zero=True, markers=True, note=note)]


def compared_evaluations(runs: Sequence[RunData], names: Sequence[str]) -> list[Chart]:
    """One chart for each set and metric with at least two evaluations of a run."""
    charts: list[Chart] = []
    for name in sets(runs):
        evaluations = [run.evaluations_on(name) for run in runs]
        if max(map(len, evaluations)) < 2:
            continue
        for key, title in compared_metrics(runs, name).items():
            points = [([e.step for e in done], [100 * e.value(key) for e in done]) for done in evaluations]
            chances = {chance_of(e, key) for done in evaluations for e in done}
            references = {"chance": 100 * chances.pop()} if len(chances) == 1 else {}  # NaN is left out
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
            titles[f"{direction}_recall@{rank}"] = f"{title} recall@{rank}"
    known = {key for e in evaluations for key in e.metrics}
    return titles | {key: f"Zero-shot {title}" for key, title in ZERO_SHOT.items() if key in known}

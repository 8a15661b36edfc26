"""How a number of all samples is spread, over time: one column of shaded bins per evaluation, with its quantiles."""

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from html import escape

from leanclip.reporting.chart import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Axis,
    label,
    labels,
    step_axis,
    tick_step,
)
from leanclip.reporting.run_reader import HistogramAt

LEVELS = 6
COLUMNS = 60
QUANTILES = (0.05, 0.5, 0.95)


def quantile(histogram: HistogramAt, share: float) -> float:
    """The value below which a share of the counted samples lies, to the width of a bin; NaN without any sample."""
    wanted, seen = share * sum(histogram.counts), 0
    if not wanted:
        return math.nan
    for count, low, high in zip(histogram.counts, histogram.edges, histogram.edges[1:], strict=False):
        if count and seen + count >= wanted:
            return low + (high - low) * (wanted - seen) / count
        seen += count
    return histogram.edges[-1]


def draw_histograms(title: str, rows: Sequence[HistogramAt]) -> str:
    """The figure: darker where more samples are. All rows must have the same edges; those of the last one count."""
    rows = [row for row in rows if row.edges == rows[-1].edges and sum(row.counts)]
    caption = f"<figcaption>{escape(title)}</figcaption>"
    if not rows:
        return f'<figure class="chart">{caption}<p class="absent">No sample has a value yet.</p></figure>'
    if len(rows) > COLUMNS:
        rows = [rows[round(i * (len(rows) - 1) / (COLUMNS - 1))] for i in range(COLUMNS)]
    edges = rows[-1].edges
    used = [i for row in rows for i, count in enumerate(row.counts) if count]
    low, high = max(0, min(used) - 1), min(len(edges) - 1, max(used) + 2)
    y_axis = Axis(low, high, (), BOTTOM, TOP)
    borders, x_axis = columns(rows)
    body = [
        *cells(rows, borders, y_axis),
        *ticks(edges, y_axis),
        *steps(x_axis),
        *(quantile_line(rows, borders, edges, y_axis, share) for share in QUANTILES),
    ]
    last = rows[-1]
    total = sum(last.counts) + last.absent
    absent = f", {last.absent / total:.1%} of the samples not met yet" if last.absent else ""
    return (
        f'<figure class="chart">{caption}'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(description(title, rows))}">'
        f"{''.join(body)}</svg>"
        f'<p class="quiet">Darker: more samples. Line: median; dashed: 5 and 95 %{escape(absent)}.</p></figure>'
    )


def columns(rows: Sequence[HistogramAt]) -> tuple[list[float], Axis]:
    """Where the columns begin and end, half way between evaluations, and the axis below them."""
    at = [row.step for row in rows]
    axis = step_axis(at)
    if len(at) == 1:
        axis = Axis(at[0] - 1, at[0] + 1, (at[0],), LEFT, RIGHT)
    middles = [axis.place((one + other) / 2) for one, other in itertools.pairwise(at)]
    return [float(LEFT), *middles, float(RIGHT)], axis


def cells(rows: Sequence[HistogramAt], borders: Sequence[float], y_axis: Axis) -> Iterator[str]:
    """One path per shade; neighbouring bins of one shade are one box."""
    largest = max(max(row.counts) / sum(row.counts) for row in rows)
    paths: dict[int, list[str]] = {}
    for row, left, right in zip(rows, borders, borders[1:], strict=False):
        total = sum(row.counts)
        shades = [math.ceil(LEVELS * math.sqrt(count / total / largest) - 1e-9) for count in row.counts]
        start = 0
        for end in range(1, len(shades) + 1):
            if end < len(shades) and shades[end] == shades[start]:
                continue
            if shades[start]:
                bottom, top = y_axis.place(start), y_axis.place(end)
                paths.setdefault(shades[start], []).append(
                    f"M{left:.1f},{bottom:.1f}H{right:.1f}V{top:.1f}H{left:.1f}z"
                )
            start = end
    for shade, boxes in sorted(paths.items()):
        yield f'<path class="heat heat-{shade}" d="{"".join(boxes)}"/>'


def ticks(edges: Sequence[float], y_axis: Axis) -> Iterator[str]:
    for value, text in tick_values(edges, y_axis):
        place = y_axis.place(position(edges, value))
        yield f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{place:.1f}" y2="{place:.1f}"/>'
        yield f'<text x="{LEFT - 7}" y="{place + 4:.1f}" text-anchor="end">{text}</text>'


def tick_values(edges: Sequence[float], y_axis: Axis) -> list[tuple[float, str]]:
    """Round values inside the shown bins; 1, 2, 5 and their tenfolds where the bins grow with the value."""
    low, high = edges[round(y_axis.low)], edges[round(y_axis.high)]
    grows = edges[0] > 0 and edges[-1] - edges[-2] > 1.5 * (edges[1] - edges[0])
    if grows:
        exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        found = [m * 10.0**e for e in exponents for m in (1, 2, 5)]
        inside = [value for value in found if low * 0.999 <= value <= high * 1.001]
        return [(v, f"{v:.3g}") for v in (inside if len(inside) > 1 else (low, high))]
    step = tick_step(high - low, 4)
    return [(i * step, label(i * step, step)) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def steps(axis: Axis) -> Iterator[str]:
    yield f'<line class="axis" x1="{LEFT}" x2="{RIGHT}" y1="{BOTTOM}" y2="{BOTTOM}"/>'
    for place, text in labels(axis):
        anchor = "end" if place > RIGHT - 12 else "middle"
        yield f'<text x="{place:.1f}" y="{BOTTOM + 17}" text-anchor="{anchor}">{text}</text>'
    yield f'<text class="name" x="{LEFT - 7}" y="{BOTTOM + 17}" text-anchor="end">step</text>'


def position(edges: Sequence[float], value: float) -> float:
    """Where a value stands among the bins, counted in bins."""
    at = min(max(bisect.bisect_right(edges, value) - 1, 0), len(edges) - 2)
    return at + (value - edges[at]) / (edges[at + 1] - edges[at])


def quantile_line(
    rows: Sequence[HistogramAt], borders: Sequence[float], edges: Sequence[float], y_axis: Axis, share: float
) -> str:
    style = "quantile median" if share == 0.5 else "quantile"
    levels = [y_axis.place(position(edges, quantile(row, share))) for row in rows]
    middles = [(left + right) / 2 for left, right in itertools.pairwise(borders)]
    points = list(zip(middles, levels, strict=True))
    points = [(borders[0], levels[0]), *points, (borders[-1], levels[-1])]
    return f'<path class="{style}" d="M{"L".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'


def description(title: str, rows: Sequence[HistogramAt]) -> str:
    first, last = rows[0], rows[-1]
    low, middle, high = (quantile(last, share) for share in QUANTILES)
    return (
        f"{title}. Median {quantile(first, 0.5):.3g} at step {first.step}, {middle:.3g} at step {last.step}; "
        f"nine in ten samples between {low:.3g} and {high:.3g} at the end"
    )

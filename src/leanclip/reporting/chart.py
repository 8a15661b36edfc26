"""Line charts as inline SVG, from plain numbers to a string; colours come from the page's style sheet.

Several named series share one pair of axes. A missing or non-finite value is a gap in its line, never a guess.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 380, 196
LEFT, RIGHT, TOP, BOTTOM = 54, 370, 10, 172
BUCKETS = 240
COLOURS = 10


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line: `y[i]` was measured at `x[i]`; NaN or infinity in `y` is a gap.

    `colour` is the number of its colour, where it shall be the same in several charts.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: int | None = None

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise ValueError(f"series {self.name!r} has {len(self.x)} x values and {len(self.y)} y values")
        if any(not before < after for before, after in zip(self.x, self.x[1:], strict=False)):
            raise ValueError(f"series {self.name!r} has x values that do not increase")


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A named horizontal line, such as the result of guessing."""

    name: str
    value: float


@dataclass(frozen=True, kw_only=True)
class Chart:
    """What to draw: `unit` follows every shown value, `from_zero` makes the y axis start at zero."""

    title: str
    series: Sequence[Series]
    unit: str = ""
    x_label: str = "step"
    from_zero: bool = False
    markers: bool = False
    references: Sequence[Reference] = ()


@dataclass(frozen=True)
class Axis:
    """A linear map from values to SVG units, with the values that get a label."""

    low: float
    high: float
    ticks: tuple[float, ...]
    start: float
    end: float

    def place(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def tick_step(span: float, count: int) -> float:
    """The smallest of 1, 2, 2.5, 5 times a power of ten that cuts `span` into at most `count` pieces."""
    power = 10.0 ** math.floor(math.log10(span / count))
    return next(m * power for m in (1, 2, 2.5, 5, 10, 20) if m * power * count >= span * (1 - 1e-9))


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Lowest and highest value, moved apart when they coincide so that an axis can be drawn."""
    low, high = min(values), max(values)
    if high - low > 1e-9 * max(abs(low), abs(high)):
        return low, high
    margin = 0.1 * abs(low) or 1.0
    return low - margin, high + margin


def value_axis(values: Sequence[float], *, from_zero: bool) -> Axis:
    """The y axis: its outermost ticks enclose every value."""
    low, high = spread([*values, 0.0] if from_zero else values)
    step = tick_step(high - low, 4)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(i * step for i in range(first, last + 1))
    return Axis(min(low, ticks[0]), max(high, ticks[-1]), ticks, BOTTOM, TOP)


def step_axis(values: Sequence[float]) -> Axis:
    """The x axis: exactly as long as the data, with whole-number ticks inside it."""
    low, high = min(values), max(values)
    high = high if high > low else low + 1
    step = max(1.0, tick_step(high - low, 5))
    step = step if step.is_integer() else math.ceil(step)
    ticks = tuple(i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1))
    return Axis(low, high, ticks, LEFT, RIGHT)


def downsample(x: Sequence[float], y: Sequence[float], buckets: int = BUCKETS) -> list[int]:
    """Indices to draw: per bucket of x the first, lowest, highest and last value, and one gap where there is one.

    At most five indices per bucket survive, and every extreme of the full data is among them.
    """
    if len(x) <= 2 * buckets:
        return list(range(len(x)))
    width = (x[-1] - x[0]) / buckets
    members: dict[int, list[int]] = {}
    for i, value in enumerate(x):
        members.setdefault(min(int((value - x[0]) / width), buckets - 1), []).append(i)
    kept: set[int] = set()
    for indices in members.values():
        finite = [i for i in indices if math.isfinite(y[i])]
        if finite:
            kept.update((finite[0], min(finite, key=y.__getitem__), max(finite, key=y.__getitem__), finite[-1]))
        if len(finite) < len(indices):
            kept.add(next(i for i in indices if not math.isfinite(y[i])))
    return sorted(kept)


def segments(y: Sequence[float], indices: Sequence[int]) -> Iterator[list[int]]:
    """Runs of indices without a gap in between."""
    run: list[int] = []
    for i in indices:
        if math.isfinite(y[i]):
            run.append(i)
        elif run:
            yield run
            run = []
    if run:
        yield run


def label(value: float, step: float) -> str:
    """A tick label with as many digits as neighbouring ticks need to differ."""
    value = 0.0 if abs(value) < step * 1e-6 else value
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if limit <= abs(value) < 1e12:
            scale = 1e3 if suffix == "k" else limit
            return label(value / scale, step / scale) + suffix
    if value and (abs(value) < 1e-3 or abs(value) >= 1e12):
        digits = max(0, math.floor(math.log10(abs(value))) - math.floor(math.log10(step)) + 1)
        mantissa, exponent = f"{value:.{min(digits, 6)}e}".split("e")
        mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        return f"{mantissa}e{int(exponent)}"
    text = f"{value:.{max(0, 1 - math.floor(math.log10(step)))}f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text).replace("-", "\N{MINUS SIGN}")


def labels(axis: Axis) -> list[tuple[float, str]]:
    step = axis.ticks[1] - axis.ticks[0] if len(axis.ticks) > 1 else axis.high - axis.low
    return [(axis.place(tick), label(tick, step)) for tick in axis.ticks]


def draw(chart: Chart) -> str:
    """The chart as an HTML figure: title, legend when there is more than one line, SVG and the hover box."""
    finite = [v for s in chart.series for v in s.y if math.isfinite(v)]
    title = f"<figcaption>{escape(chart.title)}</figcaption>"
    if not finite:
        return f'<figure class="chart">{title}<p class="absent">No values recorded yet.</p></figure>'
    x_axis = step_axis([v for s in chart.series for v in s.x])
    references = [r for r in chart.references if math.isfinite(r.value)]
    y_axis = value_axis([*finite, *(r.value for r in references)], from_zero=chart.from_zero)
    kept = [downsample(s.x, s.y) for s in chart.series]
    body = [
        *grid(x_axis, y_axis, chart.x_label),
        *(reference_line(r, y_axis, chart.unit) for r in references),
        *(
            curve(s, indices, x_axis, y_axis, colour(s, number), markers=chart.markers)
            for number, (s, indices) in enumerate(zip(chart.series, kept, strict=True))
        ),
        f'<line class="cursor" y1="{TOP}" y2="{BOTTOM}" visibility="hidden"/>',
    ]
    data = {
        "x": [x_axis.low, x_axis.high, x_axis.start, x_axis.end],
        "label": chart.x_label,
        "unit": chart.unit,
        "series": [hover_values(s, indices) for s, indices in zip(chart.series, kept, strict=True)],
    }
    return (
        f'<figure class="chart">{title}{legend(chart.series)}'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(description(chart))}" '
        f'data-chart="{escape(json.dumps(data, separators=(",", ":")))}">{"".join(body)}</svg>'
        '<div class="tip" hidden></div></figure>'
    )


def grid(x_axis: Axis, y_axis: Axis, x_label: str) -> Iterator[str]:
    for place, text in labels(y_axis):
        yield f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{place:.1f}" y2="{place:.1f}"/>'
        yield f'<text x="{LEFT - 7}" y="{place + 4:.1f}" text-anchor="end">{text}</text>'
    yield f'<line class="axis" x1="{LEFT}" x2="{RIGHT}" y1="{BOTTOM}" y2="{BOTTOM}"/>'
    for place, text in labels(x_axis):
        yield f'<line class="axis" x1="{place:.1f}" x2="{place:.1f}" y1="{BOTTOM}" y2="{BOTTOM + 4}"/>'
        # A label centred on the last tick would reach past the right edge.
        anchor = "end" if place > RIGHT - 12 else "middle"
        yield f'<text x="{place:.1f}" y="{BOTTOM + 17}" text-anchor="{anchor}">{text}</text>'
    yield f'<text class="name" x="{LEFT - 7}" y="{BOTTOM + 17}" text-anchor="end">{escape(x_label)}</text>'


def reference_line(reference: Reference, axis: Axis, unit: str) -> str:
    place = axis.place(reference.value)
    text = escape(f"{reference.name} {reference.value:.3g}{unit}")
    return (
        f'<line class="reference" x1="{LEFT}" x2="{RIGHT}" y1="{place:.1f}" y2="{place:.1f}"/>'
        f'<text class="name" x="{RIGHT - 2}" y="{place - 4:.1f}" text-anchor="end">{text}</text>'
    )


def curve(series: Series, indices: list[int], x_axis: Axis, y_axis: Axis, number: int, *, markers: bool) -> str:
    """The line of one series; a value with a gap on both sides is a dot, or it would not be seen."""
    parts: list[str] = []
    dots: list[tuple[float, float]] = []
    for run in segments(series.y, indices):
        points = [(x_axis.place(series.x[i]), y_axis.place(series.y[i])) for i in run]
        if len(points) > 1:
            parts.append("M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in points))
        if len(points) == 1 or (markers and len(indices) <= 60):
            dots += points
    style = f"series-{number}"
    path = f'<path class="line {style}" d="{"".join(parts)}"/>' if parts else ""
    return path + "".join(f'<circle class="dot {style}" cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>' for x, y in dots)


def colour(series: Series, number: int) -> int:
    return (number if series.colour is None else series.colour) % COLOURS


def key(number: int) -> str:
    """A short piece of the line that a colour number has."""
    path = f'<path class="line series-{number}" d="M1,4L21,4"/>'
    return f'<svg class="key" viewBox="0 0 22 8" aria-hidden="true">{path}</svg>'


def legend(series: Sequence[Series]) -> str:
    if len(series) < 2 and all(s.colour is None for s in series):
        return ""
    rows = (f"<li>{key(colour(s, i))}{escape(s.name)}</li>" for i, s in enumerate(series))
    return f'<ul class="legend">{"".join(rows)}</ul>'


def hover_values(series: Series, indices: Sequence[int]) -> dict[str, object]:
    finite = [i for i in indices if math.isfinite(series.y[i])]
    return {
        "name": series.name,
        "x": [rounded(series.x[i]) for i in finite],
        "y": [rounded(series.y[i]) for i in finite],
    }


def rounded(value: float) -> float | int:
    """Five significant digits, but whole numbers in full: a step must not be rounded."""
    return int(value) if float(value).is_integer() and abs(value) < 1e15 else float(f"{value:.5g}")


def shown(value: float, unit: str) -> str:
    return f"{value:.4g}{unit}"


def description(chart: Chart) -> str:
    """The chart in words, for those who hear the page."""
    sentences: list[str] = []
    for s in chart.series:
        finite = [i for i in range(len(s.y)) if math.isfinite(s.y[i])]
        if finite:
            first, last = finite[0], finite[-1]
            sentences.append(
                f"{s.name}: {shown(s.y[first], chart.unit)} at {chart.x_label} {rounded(s.x[first])}, "
                f"{shown(s.y[last], chart.unit)} at {chart.x_label} {rounded(s.x[last])}"
            )
    return f"{chart.title}. " + "; ".join(sentences)

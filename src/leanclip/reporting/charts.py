"""Charts as inline SVG: this module computes coordinates from numbers, and charts.html.j2 draws them.

A missing or non-finite value is a gap in its line. Colours come from the style sheet of the page.
"""

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

WIDTH, HEIGHT = 380, 196
LEFT, RIGHT, TOP, BOTTOM = 54, 370, 10, 172
FRAME = {"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": RIGHT, "top": TOP, "bottom": BOTTOM}
BUCKETS = 240  # of a long curve
COLOURS = 10


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line: `y[i]` was measured at `x[i]`, and `x` increases."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: int | None = None  # by default its position in the chart


@dataclass(frozen=True, kw_only=True)
class Chart:
    title: str
    series: Sequence[Series]
    unit: str = ""
    x_label: str = "step"
    from_zero: bool = False  # the y axis starts at zero
    markers: bool = False
    references: Mapping[str, float] = field(default_factory=dict)  # horizontal lines by name
    note: str = ""  # a sentence below it


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

    @property
    def labels(self) -> list[tuple[float, str]]:
        step = self.ticks[1] - self.ticks[0] if len(self.ticks) > 1 else self.high - self.low
        return [(self.place(tick), label(tick, step)) for tick in self.ticks]


def draw(chart: Chart, *, alone: bool = False) -> str:
    """The chart as an HTML figure: title, legend of several lines, SVG and the box for values under the pointer.

    With `alone` as an SVG file. At least one value is finite.
    """
    finite = [value for series in chart.series for value in series.y if math.isfinite(value)]
    references = {name: value for name, value in chart.references.items() if math.isfinite(value)}
    x_axis = step_axis([x for series in chart.series for x in series.x])
    y_axis = value_axis([*finite, *references.values()], from_zero=chart.from_zero)
    kept = [downsample(series.y) for series in chart.series]
    colours = [(i if s.colour is None else s.colour) % COLOURS for i, s in enumerate(chart.series)]
    named = len(chart.series) > 1 or any(series.colour is not None for series in chart.series)
    data = {
        "x": [x_axis.low, x_axis.high, x_axis.start, x_axis.end],
        "label": chart.x_label,
        "unit": chart.unit,
        "series": [hover_values(series, indices) for series, indices in zip(chart.series, kept, strict=True)],
    }
    module: Any = templates().get_template("charts.html.j2").module
    return (module.svg_file if alone else module.line_chart)(
        chart,
        description(chart),
        frame=FRAME,
        axes={"x": x_axis.labels, "y": y_axis.labels, "name": chart.x_label},
        references=[y_axis.place(value) for value in references.values()],
        curves=[
            (colour, *curve(series, indices, x_axis, y_axis, markers=chart.markers))
            for colour, series, indices in zip(colours, chart.series, kept, strict=True)
        ],
        legend=[
            *((colour, s.name) for colour, s in zip(colours, chart.series, strict=True) if named),
            *(("reference", f"{name} {value:.3g}{chart.unit}") for name, value in references.items()),
        ],
        data=json.dumps(data, separators=(",", ":")),
    )


@cache
def templates() -> Environment:
    """The templates of the report. They escape every text."""
    return Environment(
        loader=PackageLoader("leanclip", "reporting"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def tick_step(span: float, count: int) -> float:
    """The smallest of 1, 2, 2.5, 5 times a power of ten that cuts `span` into at most `count` intervals."""
    power = 10.0 ** math.floor(math.log10(span / count))
    return next(m * power for m in (1, 2, 2.5, 5, 10, 20) if m * power * count >= span * (1 - 1e-9))


def value_axis(values: Sequence[float], *, from_zero: bool) -> Axis:
    """The y axis: its outermost ticks enclose every value. Whole numbers, such as counts, get whole-number ticks."""
    values = [*values, 0.0] if from_zero else values
    low, high = min(values), max(values)
    if low == high == 0:
        high = 1.0
    elif high - low <= 1e-9 * max(abs(low), abs(high)):  # equal values, which need an axis too
        low, high = low - 0.1 * abs(low), high + 0.1 * abs(high)
    step = tick_step(high - low, 4)
    if all(float(value).is_integer() for value in values):
        step = math.ceil(step)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(i * step for i in range(first, last + 1))
    return Axis(min(low, ticks[0]), max(high, ticks[-1]), ticks, BOTTOM, TOP)


def step_axis(values: Sequence[float]) -> Axis:
    """The x axis: exactly as long as the data, with ticks inside it; whole numbers, such as steps, get whole ones."""
    low, high = min(values), max(values)
    high = high if high > low else low + max(1.0, abs(low) * 1e-9)  # never the same number
    step = tick_step(high - low, 5)
    if all(float(value).is_integer() for value in values):
        step = math.ceil(max(1.0, step))
    ticks = tuple(float(i * step) for i in range(math.ceil(low / step), math.floor(high / step) + 1))
    return Axis(low, high, ticks, LEFT, RIGHT)


def downsample(y: Sequence[float], buckets: int = BUCKETS) -> list[int]:
    """Indices to draw: per bucket the first, lowest, highest and last value, and one gap if there is one.

    At most five indices per bucket are kept, and every extreme of the full data is among them.
    """
    if len(y) <= 2 * buckets:
        return list(range(len(y)))
    kept: set[int] = set()
    for _, members in itertools.groupby(range(len(y)), lambda i: i * buckets // len(y)):
        indices = list(members)
        finite = [i for i in indices if math.isfinite(y[i])]
        if finite:
            kept.update((finite[0], min(finite, key=y.__getitem__), max(finite, key=y.__getitem__), finite[-1]))
        if len(finite) < len(indices):
            kept.add(next(i for i in indices if not math.isfinite(y[i])))
    return sorted(kept)


def segments(y: Sequence[float], indices: Sequence[int]) -> Iterator[list[int]]:
    """Runs of indices without a gap between them."""
    for finite, run in itertools.groupby(indices, lambda i: math.isfinite(y[i])):
        if finite:
            yield list(run)


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
        return f"{_without_zeros(mantissa)}e{int(exponent)}"
    text = f"{value:.{max(0, 1 - math.floor(math.log10(step)))}f}"
    return _without_zeros(text).replace("-", "\N{MINUS SIGN}")


def _without_zeros(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text


def curve(
    series: Series, indices: list[int], x_axis: Axis, y_axis: Axis, *, markers: bool
) -> tuple[str, list[tuple[float, float]]]:
    """The path of one series, and its dots: markers, and values with a gap on both sides."""
    path = ""
    dots: list[tuple[float, float]] = []
    for run in segments(series.y, indices):
        points = [(x_axis.place(series.x[i]), y_axis.place(series.y[i])) for i in run]
        if len(points) > 1:
            path += "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in points)
        if len(points) == 1 or (markers and len(indices) <= 60):
            dots += points
    return path, dots


def hover_values(series: Series, indices: Sequence[int]) -> dict[str, object]:
    finite = [i for i in indices if math.isfinite(series.y[i])]
    return {
        "name": series.name,
        "x": [rounded(series.x[i]) for i in finite],
        "y": [rounded(series.y[i]) for i in finite],
    }


def rounded(value: float) -> float | int:
    """Five significant digits; whole numbers, such as steps, in full."""
    return int(value) if float(value).is_integer() and abs(value) < 1e15 else float(f"{value:.5g}")


def description(chart: Chart) -> str:
    """The chart in words, for screen readers."""
    sentences: list[str] = []
    for series in chart.series:
        points = [(x, y) for x, y in zip(series.x, series.y, strict=True) if math.isfinite(y)]
        ends = [f"{y:.4g}{chart.unit} at {chart.x_label} {rounded(x)}" for x, y in points[:1] + points[-1:]]
        sentences += [f"{series.name}: {', '.join(ends)}"] if ends else []
    return f"{chart.title}. " + "; ".join(sentences)

"""Curves as an SVG file: named series of points, each axis linear or logarithmic, the names on the right."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 80, 210, 40, 50
COLORS = ("#1b6ca8", "#c0392b", "#e08e0b", "#6c757d", "#7b4ea3", "#2e8b57", "#8c564b", "#17becf")
Series = Mapping[str, Sequence[tuple[float, float]]]


class Axis:
    """Where a value lies between two pixels, and which values are written down."""

    def __init__(self, values: Sequence[float], pixels: tuple[float, float], *, log: bool) -> None:
        self.log, self.pixels = log, pixels
        if log:
            self.low, self.high = math.log10(min(values)), math.log10(max(values))
        else:
            self.low, self.high = min(0.0, *values), max(values)
        if self.high == self.low:
            self.high = self.low + 1

    def __call__(self, value: float) -> float:
        at = ((math.log10(value) if self.log else value) - self.low) / (self.high - self.low)
        return self.pixels[0] + at * (self.pixels[1] - self.pixels[0])

    def ticks(self) -> list[float]:
        if self.log:
            found = [10.0**power for power in range(math.ceil(self.low - 1e-9), math.floor(self.high + 1e-9) + 1)]
            return found or [10**self.low]
        step = 10 ** math.floor(math.log10(self.high - self.low))
        step = next(step / part for part in (1, 2, 5, 10) if (self.high - self.low) / (step / part) >= 4)
        return [number * step for number in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]


def plain(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}"


def draw(
    path: Path,
    series: Series,
    *,
    title: str,
    x_label: str,
    y_label: str,
    log: tuple[bool, bool] = (False, False),
    x_ticks: Sequence[float] | None = None,
    x_name: Callable[[float], str] = plain,
    dashed: Sequence[str] = (),
) -> None:
    """`dashed` names series that are bounds or targets rather than measurements."""
    points = [point for curve in series.values() for point in curve]
    end = WIDTH - max(RIGHT, 36 + round(6.2 * max(map(len, series))))  # of the curves; the names follow
    x = Axis([point[0] for point in points], (LEFT, end), log=log[0])
    y = Axis([point[1] for point in points], (HEIGHT - BOTTOM, TOP), log=log[1])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="12" y="22" font-size="14">{title}</text>',
        f'<text x="{(LEFT + end) / 2}" y="{HEIGHT - 10}" text-anchor="middle">{x_label}</text>',
        f'<text transform="translate(16 {HEIGHT / 2}) rotate(-90)" text-anchor="middle">{y_label}</text>',
    ]
    for value in y.ticks():
        at = y(value)
        parts.append(f'<line x1="{LEFT}" x2="{end}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{plain(value)}</text>')
    for value in x.ticks() if x_ticks is None else x_ticks:
        parts.append(
            f'<text x="{x(value):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{x_name(value)}</text>'
        )
    for number, (name, curve) in enumerate(series.items()):
        color = COLORS[number % len(COLORS)]
        dash = ' stroke-dasharray="5 4"' if name in dashed else ""
        line = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in curve)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"{dash}/>')
        if not dash:
            parts += [f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="3" fill="{color}"/>' for a, b in curve]
        left, at = end + 12, TOP + 18 * number + 8
        parts.append(
            f'<line x1="{left}" x2="{left + 18}" y1="{at}" y2="{at}" stroke="{color}" stroke-width="2"{dash}/>'
        )
        parts.append(f'<text x="{left + 24}" y="{at + 4}">{name}</text>')
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*parts, "</svg>", ""]))

"""Draws `bench_loss.py`'s newest results as an SVG: time against batch size, on logarithmic axes, and the floor."""

import csv
import math
from pathlib import Path

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 170, 40, 50
COLORS = ("#1b6ca8", "#c0392b", "#e08e0b", "#6c757d", "#7b4ea3")
Series = dict[str, dict[int, float]]


def read(path: Path, loss: str, dim: int) -> tuple[Series, str]:
    """Median milliseconds by provider and batch, the newest of each, and the device they were measured on."""
    found: Series = {}
    device = ""
    with path.open() as file:
        for row in csv.DictReader(file):
            if row["loss"] == loss and int(row["dim"]) == dim and row["median_ms"]:
                found.setdefault(row["provider"], {})[int(row["batch"])] = float(row["median_ms"])
                found.setdefault("arithmetic floor", {})[int(row["batch"])] = float(row["floor_ms"])
                device = f"{row['device']}, {row['dtype']}"
    return found, device


def draw(path: Path, loss: str = "infonce", dim: int = 512) -> Path:
    """Writes the drawing beside the CSV file and returns where."""
    series, device = read(path, loss, dim)
    if not series:
        raise ValueError(f"{path} has no results for {loss} at d = {dim}")
    target = path.with_suffix(".svg")
    target.write_text(svg(series, f"{loss}, forward and backward, d = {dim} ({device})"))
    print(f"wrote {target}")
    return target


def svg(series: Series, title: str) -> str:
    batches = sorted({batch for points in series.values() for batch in points})
    times = [ms for points in series.values() for ms in points.values()]
    low, high = math.floor(math.log10(min(times))), math.ceil(math.log10(max(times)))
    span = math.log2(batches[-1] / batches[0]) or 1.0

    def x(batch: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log2(batch / batches[0]) / span

    def y(ms: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (math.log10(ms) - low) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="14">{title}</text>',
    ]
    for power in range(low, high + 1):
        at = y(10**power)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{10.0**power:g} ms</text>')
    for batch in batches:
        label = f'<text x="{x(batch):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{batch:,}</text>'
        parts.append(label)
    middle = LEFT + (WIDTH - LEFT - RIGHT) / 2
    parts.append(f'<text x="{middle:.1f}" y="{HEIGHT - 8}" text-anchor="middle">batch size</text>')
    for at, (name, points) in enumerate(_ordered(series)):
        parts += _curve(name, [(x(batch), y(ms)) for batch, ms in sorted(points.items())], at)
    return "\n".join([*parts, "</svg>", ""])


def _ordered(series: Series) -> list[tuple[str, dict[int, float]]]:
    """leanclip first, the floor last."""
    names = sorted(series, key=lambda name: (name == "arithmetic floor", name != "leanclip", name))
    return [(name, series[name]) for name in names]


def _curve(name: str, points: list[tuple[float, float]], at: int) -> list[str]:
    floor = name == "arithmetic floor"
    color = "#222" if floor else COLORS[at % len(COLORS)]
    dash = ' stroke-dasharray="4 4"' if floor else ""
    line = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
    label_y = TOP + 20 * at + 10
    left = WIDTH - RIGHT + 14
    return [
        f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"{dash}/>',
        *(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{color}"/>' for px, py in points if not floor),
        f'<line x1="{left}" x2="{left + 20}" y1="{label_y}" y2="{label_y}" stroke="{color}" stroke-width="2"{dash}/>',
        f'<text x="{left + 26}" y="{label_y + 4}">{name}</text>',
    ]

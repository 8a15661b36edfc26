"""Draws `bench_step.py`'s newest results as an SVG: samples per second of everybody, case by case."""

import csv
from pathlib import Path

WIDTH, BAR, GAP, LEFT = 720, 16, 26, 190
COLORS = {"leanclip": "#1b6ca8", "leanclip fastclip-v3": "#4a90c4", "leanclip eager": "#8fbcdc",
          "open_clip compiled": "#e08e0b", "open_clip": "#c0392b"}  # fmt: skip


def read(path: Path) -> tuple[dict[str, dict[str, float]], str]:
    """Samples per second by case and provider, the newest of each, and the device."""
    found: dict[str, dict[str, float]] = {}
    device = ""
    with path.open() as file:
        for row in csv.DictReader(file):
            found.setdefault(f"{row['case']}, batch {row['batch']}", {})[row["provider"]] = float(
                row["samples_per_second"]
            )
            device = row["device"]
    return found, device


def draw(path: Path) -> Path:
    """Writes the drawing beside the CSV file and returns where."""
    cases, device = read(path)
    target = path.with_suffix(".svg")
    target.write_text(svg(cases, f"Training step, samples per second ({device}, bf16)"))
    return target


def svg(cases: dict[str, dict[str, float]], title: str) -> str:
    height = 40 + sum(GAP + 20 + BAR * len(rates) for rates in cases.values())
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="12" y="22" font-size="14">{title}</text>',
    ]
    y = 40
    for case, rates in cases.items():
        parts.append(f'<text x="12" y="{y + 14}" font-weight="bold">{case}</text>')
        y += 20
        most = max(rates.values())
        for name in (name for name in COLORS if name in rates):
            length = (WIDTH - LEFT - 90) * rates[name] / most
            parts += [
                f'<text x="{LEFT - 8}" y="{y + 12}" text-anchor="end">{name}</text>',
                f'<rect x="{LEFT}" y="{y + 2}" width="{length:.1f}" height="{BAR - 4}" fill="{COLORS[name]}"/>',
                f'<text x="{LEFT + length + 6:.1f}" y="{y + 12}">{rates[name]:,.0f}</text>',
            ]
            y += BAR
        y += GAP
    return "\n".join([*parts, "</svg>", ""])

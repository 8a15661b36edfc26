"""Draws the newest rows of bench_loss.py and bench_step.py as SVG files beside their CSV files."""

from pathlib import Path

from evidence.line_chart import figure
from evidence.measurements import rows

FLOOR = "arithmetic floor"
STEP_PROVIDERS = ("leanclip", "leanclip fastclip-v3", "leanclip eager", "open_clip compiled", "open_clip")


def draw_loss(path: Path, loss: str = "infonce", dim: int = 512) -> Path:
    """Median milliseconds over the batch size, one line per provider, and the arithmetic floor."""
    lines: dict[str, dict[int, float]] = {FLOOR: {}}
    title = f"{loss}, forward and backward, d = {dim}"
    for row in rows(path):
        if row["loss"] == loss and int(row["dim"]) == dim and row["median_ms"]:
            batch = int(row["batch"])
            lines.setdefault(row["provider"], {})[batch] = float(row["median_ms"])
            lines[FLOOR][batch] = float(row["floor_ms"])
            title = f"{loss}, forward and backward, d = {dim} ({row['device']}, {row['dtype']})"
    if not lines[FLOOR]:
        raise ValueError(f"{path} has no results for {loss} at d = {dim}")
    target = path.with_suffix(".svg")
    with figure(target) as (_, axes):
        for name in sorted(lines, key=lambda name: (name == FLOOR, name != "leanclip", name)):
            batches = sorted(lines[name])
            form = "k--" if name == FLOOR else "o-"
            axes.plot(batches, [lines[name][batch] for batch in batches], form, label=name)
        axes.set(xscale="log", yscale="log", xlabel="batch size", ylabel="ms", title=title)
        axes.set_xticks(sorted(lines[FLOOR]), [f"{batch:,}" for batch in sorted(lines[FLOOR])])
        axes.minorticks_off()
        axes.legend()
    return target


def draw_step(path: Path) -> Path:
    """Samples per second, one group of bars per case."""
    rates: dict[str, dict[str, float]] = {}
    device = ""
    for row in rows(path):
        case = rates.setdefault(f"{row['case']}, batch {row['batch']}", {})
        case[row["provider"]], device = float(row["samples_per_second"]), row["device"]
    target = path.with_suffix(".svg")
    with figure(target, len(rates), squeeze=False, figsize=(8, 1.7 * len(rates))) as (drawn, panels):
        for axes, (case, values) in zip(panels[:, 0], rates.items(), strict=True):
            names = [name for name in reversed(STEP_PROVIDERS) if name in values]
            bars = axes.barh(names, [values[name] for name in names])
            axes.bar_label(bars, fmt="{:,.0f}", padding=3)
            axes.set_title(case)
            axes.margins(x=0.15)
            axes.grid(False)
        drawn.suptitle(f"Training step, samples per second ({device}, bf16)")
    return target

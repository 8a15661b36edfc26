"""Line charts as SVG files in the style of all benchmarks."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

STYLE = Path(__file__).parents[1] / "plots.mplstyle"
PREDICTED = ", predicted"
Lines = Mapping[str, Sequence[tuple[float, float]]]  # points by name


@contextlib.contextmanager
def figure(path: Path, *panels: int, **options: Any) -> Iterator[tuple[Any, Any]]:
    """matplotlib's figure and axes, saved at the end; `options` are those of its `subplots`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with plt.style.context(STYLE):
        drawn, axes = plt.subplots(*panels, **options)
        yield drawn, axes
        drawn.savefig(path, metadata={"Date": None})
        plt.close(drawn)


def draw(path: Path, panels: Mapping[str, Lines], *, dashed: str = "", **settings: Any) -> None:
    """One panel for each label of an x axis. `settings` are those of matplotlib's Axes.set; the line `dashed` is a
    target, and a line `NAME, predicted` is dashed in the colour of NAME."""
    names = dict.fromkeys(name.removesuffix(PREDICTED) for lines in panels.values() for name in lines)
    colours = {name: f"C{number}" for number, name in enumerate(names)}
    size = (4 + 4 * len(panels), 4.4)
    with figure(path, 1, len(panels), squeeze=False, sharey=True, figsize=size) as (drawn, axes_row):
        for axes, (x_label, lines) in zip(axes_row[0], panels.items(), strict=True):
            for name, points in lines.items():
                base = name.removesuffix(PREDICTED)
                colour = "black" if name == dashed else colours[base]
                style = "--" if name in (dashed, base + PREDICTED) else "o-"
                axes.plot(*zip(*points, strict=True), style, color=colour, label=name)
            axes.set(xlabel=x_label)
            if settings.get("xscale") == "log":
                ticks = sorted({x for points in lines.values() for x, _ in points})
                axes.set_xscale("log")
                axes.set_xticks(ticks, [f"{tick:,.0f}" for tick in ticks])
                axes.set_xticks([], minor=True)
        drawn.suptitle(settings.pop("title"), x=0.01, ha="left")
        axes_row[0, 0].set(**{name: value for name, value in settings.items() if name != "xscale"})
        legend = {line.get_label(): line for axes in axes_row[0] for line in axes.get_lines()}
        axes_row[0, -1].legend(legend.values(), legend.keys(), loc="center left", bbox_to_anchor=(1, 0.5))

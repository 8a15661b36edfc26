"""Line charts as SVG files in the style of all benchmarks."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

STYLE = Path(__file__).parents[1] / "plots.mplstyle"
Lines = Mapping[str, Sequence[tuple[float, float]]]  # points by name


def draw(path: Path, panels: Mapping[str, Lines], *, dashed: str = "", **settings: Any) -> None:
    """One panel for each label of an x axis. `settings` are those of matplotlib's Axes.set; the line `dashed` is a
    target."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with plt.style.context(STYLE):
        figure, axes_row = plt.subplots(
            1, len(panels), squeeze=False, sharey=True, figsize=(4 + 4 * len(panels), 4.4)
        )
        for axes, (x_label, lines) in zip(axes_row[0], panels.items(), strict=True):
            for name, points in lines.items():
                axes.plot(*zip(*points, strict=True), "k--" if name == dashed else "o-", label=name)
            axes.set(xlabel=x_label)
        figure.suptitle(settings.pop("title"), x=0.01, ha="left")
        axes_row[0, 0].set(**settings)
        if settings.get("xscale") == "log":
            ticks = sorted({x for lines in panels.values() for points in lines.values() for x, _ in points})
            axes_row[0, 0].set_xticks(ticks, [f"{tick:,.0f}" for tick in ticks])
            axes_row[0, 0].set_xticks([], minor=True)
        axes_row[0, -1].legend(loc="center left", bbox_to_anchor=(1, 0.5))
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)

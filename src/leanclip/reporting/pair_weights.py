"""The report's section on pair weights: scores with the two fitted parts, the share over time, the worst pairs."""

import math
from collections.abc import Sequence
from typing import Any

from leanclip.reporting.charts import Chart, Series, draw
from leanclip.reporting.report_sections import percent
from leanclip.reporting.run_reader import PairFit, RunData

SHOWN = 6  # worst pairs
GATE = 1.0  # percent that must look wrong for `auto`


def pair_weights_section(run: RunData) -> dict[str, Any] | None:
    """What the page shows; None for a run without fits and suspects."""
    if not run.pair_fits and not run.suspects:
        return None
    charts = [draw(scores_chart(run.pair_fits[-1])), draw(share_chart(run.pair_fits))] if run.pair_fits else []
    return {"summary": summary(run.pair_fits), "charts": charts, "worst": run.suspects[:SHOWN], "path": str(run.path)}


def summary(fits: Sequence[PairFit]) -> str:
    if not fits:
        return "The run made no fit: it was too short, or pair weights were off."
    used, last = [fit for fit in fits if fit.on], fits[-1]
    state = "on" if last.on else "off"
    return (
        f"At the last fit, before step {last.step:,}, {percent(last.share)} of the pairs looked wrong; weights were"
        f" {state}. They were on after {len(used)} of {len(fits)} fits."
    )


def scores_chart(fit: PairFit) -> Chart:
    """The histogram and both normals, in percent of the pairs in each bin, where there are any."""
    bins, total = len(fit.counts), sum(fit.counts)
    width = 2 * fit.range / bins
    filled = [number for number, count in enumerate(fit.counts) if count]
    numbers = range(max(0, filled[0] - 1), min(bins, filled[-1] + 2))
    x = [(number + 0.5) * width - fit.range for number in numbers]
    series = [Series(name="pairs", x=x, y=[100 * fit.counts[number] / total for number in numbers])]
    for name, (mean, spread, share) in zip(("right, as fitted", "wrong, as fitted"), fit.parts, strict=True):
        scale = 100 * share * width / (spread * math.sqrt(2 * math.pi))
        y = [scale * math.exp(-0.5 * ((value - mean) / spread) ** 2) for value in x]
        series.append(Series(name=name, x=x, y=y))
    return Chart(
        title="Scores of the pairs (%)",
        series=series,
        unit=" %",
        x_label="score",
        from_zero=True,
        note="Of all pairs with two visits, at the last fit. High: other captions fit the image better than its own.",
    )


def share_chart(fits: Sequence[PairFit]) -> Chart:
    return Chart(
        title="Pairs that look wrong (%)",
        series=[Series(name="share", x=[fit.step for fit in fits], y=[100 * fit.share for fit in fits])],
        unit=" %",
        from_zero=True,
        markers=True,
        references={"auto weighs above": GATE},
        note="Estimated at each fit by comparison with images that were given another caption on purpose.",
    )

"""What weights between the start and the end of a run keep and gain: one chart."""

from collections.abc import Sequence
from pathlib import Path

from leanclip.evaluation.results import SetResult
from leanclip.filesystem import write_atomically
from leanclip.reporting.charts import COLOURS, Chart, Series, draw

METRICS = {
    "text_to_image_recall@10": "text-to-image recall@10",
    "image_to_text_recall@10": "image-to-text recall@10",
    "top1": "zero-shot top-1",
}


def write_plot(results: Sequence[SetResult], path: Path) -> None:
    """Each set and metric over the weight of the end, as an SVG file."""
    lines: dict[str, dict[float, float]] = {}
    for result in results:
        for metric, title in METRICS.items():
            if metric in result.metrics and result.weight is not None:
                lines.setdefault(f"{result.name}: {title}", {})[result.weight] = 100 * result.metrics[metric]
    series = [Series(name=name, x=list(points), y=list(points.values())) for name, points in lines.items()]
    chart = Chart(
        title="From the start (0) to the end (1) of the run (%)",
        series=series[:COLOURS],
        unit=" %",
        x_label="weight",
        from_zero=True,
        markers=True,
    )
    write_atomically(path, draw(chart, alone=True))

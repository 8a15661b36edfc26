"""Evaluation results of several sets: as rows of a table, as JSON, as CSV, and compared with a baseline."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from leanclip.evaluation.retrieval import DIRECTIONS, RECALL_AT
from leanclip.evaluation.zero_shot import Classified

FACTS = ("images", "captions", "chance@1", "chance@5", "chance@10")  # of the set, not of the model


@dataclass(frozen=True, kw_only=True)
class SetResult:
    """The metrics of one set, and those of the baseline model on it."""

    name: str
    kind: Literal["retrieval", "zero-shot"]
    metrics: Mapping[str, float]
    by: str = "leanclip"
    classified: Classified | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    baseline: Mapping[str, float] | None = None

    @property
    def difference(self) -> dict[str, float]:
        return {
            name: value - self.baseline[name]
            for name, value in self.metrics.items()
            if self.baseline and name in self.baseline and name not in FACTS
        }

    def cell(self, metric: str) -> str:
        """The metric, and the difference from the baseline in percentage points (of a rank: in ranks)."""
        value = self.metrics.get(metric, math.nan)
        if math.isnan(value):
            return "–"
        is_rank = metric.endswith("_rank")
        text = f"{value:,.1f}".removesuffix(".0") if is_rank else f"{value:.1%}"
        difference = self.difference.get(metric)
        return text if difference is None else f"{text} ({difference * (1 if is_rank else 100):+.1f})"


def retrieval_rows(results: Sequence[SetResult]) -> list[list[str]]:
    """Set, direction, recalls and median rank: two rows per set."""
    metrics = [*(f"recall@{k}" for k in RECALL_AT), "median_rank"]
    return [
        [result.name, direction.replace("_", "-"), *(result.cell(f"{direction}_{metric}") for metric in metrics)]
        for result in results
        if result.kind == "retrieval"
        for direction in DIRECTIONS
    ]


def zero_shot_rows(results: Sequence[SetResult]) -> list[list[str]]:
    """Set, images, accuracies and chance: one row per set."""
    rows = []
    for result in results:
        if result.kind == "zero-shot":
            images = result.metrics.get("images")
            accuracies = [result.cell(name) for name in ("top1", "top5", "mean_per_class_recall")]
            rows.append(
                [result.name, "–" if images is None else f"{images:,.0f}", *accuracies, result.cell("chance@1")]
            )
    return rows


def as_json(model: str, results: Sequence[SetResult], baseline: str | None) -> dict[str, Any]:
    """Everything: metrics, confusion counts, the metrics of each class, the baseline's metrics and differences."""
    sets: dict[str, Any] = {}
    for result in results:
        sets[result.name] = {"kind": result.kind, "by": result.by, "metrics": dict(result.metrics), **result.details}
        if result.classified is not None:
            sets[result.name] |= result.classified.to_json()
        if result.baseline is not None:
            sets[result.name] |= {"baseline": dict(result.baseline), "difference": result.difference}
    return {"model": model, "baseline": baseline, "sets": sets}


def as_csv(results: Sequence[SetResult]) -> str:
    text, compared = io.StringIO(), any(result.baseline is not None for result in results)
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["set", "kind", "by", "metric", "value", *(["baseline", "difference"] if compared else [])])
    for result in results:
        for name, value in result.metrics.items():
            beside = [(result.baseline or {}).get(name, ""), result.difference.get(name, "")] if compared else []
            writer.writerow([result.name, result.kind, result.by, name, value, *beside])
    return text.getvalue()

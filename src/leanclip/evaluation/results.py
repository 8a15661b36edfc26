"""Evaluation results of several sets: as rows of a table, as JSON, as CSV, and compared with another model."""

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from leanclip.evaluation.retrieval import DIRECTIONS, RECALL_AT
from leanclip.evaluation.zero_shot import Classified

FACTS = ("images", "captions", "chance@1", "chance@5", "chance@10")  # of the set, not of the model
MODEL_NAMES = {"baseline": "model", "before": "after"}  # beside another model, by what that is called


@dataclass(frozen=True, kw_only=True)
class SetResult:
    """The metrics of one set, and those of another model on it."""

    name: str
    kind: Literal["retrieval", "zero-shot", "datacomp"]
    metrics: Mapping[str, float]
    by: str = "leanclip"
    classified: Classified | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    baseline: Mapping[str, float] | None = None
    compared: Literal["baseline", "before"] = "baseline"  # what `baseline` is: any model, or the run's start
    weight: float | None = None  # of the end, if the weights were interpolated

    @property
    def difference(self) -> dict[str, float]:
        return {
            name: value - self.baseline[name]
            for name, value in self.metrics.items()
            if self.baseline and name in self.baseline and name not in FACTS
        }

    def lines(self) -> Iterator[tuple[str, Mapping[str, float]]]:
        """Metrics by what they are: those of the model, or of both models and their difference."""
        if self.baseline is None:
            yield "" if self.weight is None else f"{self.weight:g}", self.metrics
            return
        yield self.compared, self.baseline
        yield MODEL_NAMES[self.compared], self.metrics
        yield "difference", self.difference


def cell(line: str, metrics: Mapping[str, float], metric: str) -> str:
    """A metric; of a difference, in percentage points (of a rank: in ranks)."""
    value, is_rank = metrics.get(metric, math.nan), metric.endswith("_rank")
    if math.isnan(value):
        return "" if line == "difference" and metric in FACTS else "–"
    if line == "difference":
        return f"{value * (1 if is_rank else 100):+.1f}"
    return f"{value:,.1f}".removesuffix(".0") if is_rank else f"{value:.1%}"


def retrieval_rows(results: Sequence[SetResult]) -> list[list[str]]:
    """Set, direction, which weights, recalls and median rank."""
    names = [*(f"recall@{k}" for k in RECALL_AT), "median_rank"]
    return [
        [set_name, direction.replace("_", "-"), line, *(cell(line, values, f"{direction}_{name}") for name in names)]
        for set_name, members in _by_set(results, "retrieval").items()
        for direction in DIRECTIONS
        for result in members
        for line, values in result.lines()
    ]


def zero_shot_rows(results: Sequence[SetResult]) -> list[list[str]]:
    """Set, images, which weights, accuracies and chance."""
    rows = []
    for name, members in _by_set(results, "zero-shot").items():
        for result in members:
            images = result.metrics.get("images")
            size = "–" if images is None else f"{images:,.0f}"
            for line, values in result.lines():
                metrics = ("top1", "top5", "mean_per_class_recall", "chance@1")
                rows.append([name, size, line, *(cell(line, values, metric) for metric in metrics)])
    return rows


def datacomp_rows(results: Sequence[SetResult]) -> list[list[str]]:
    """Set or mean, its metric, which weights, and the value of its first metric."""
    return [
        [result.details["label"], result.details["metric"], line, cell(line, values, next(iter(result.metrics), ""))]
        for result in results
        if result.kind == "datacomp"
        for line, values in result.lines()
    ]


def _by_set(results: Sequence[SetResult], kind: str) -> dict[str, list[SetResult]]:
    sets: dict[str, list[SetResult]] = {}
    for result in results:
        if result.kind == kind:
            sets.setdefault(result.name, []).append(result)
    return sets


def as_json(model: str, results: Sequence[SetResult], baseline: str | None) -> dict[str, Any]:
    """Everything: metrics, confusion counts, the metrics of each class, the other model's metrics and differences.

    Of interpolated weights one such table of sets for each, under `interpolation`.
    """
    content: dict[str, Any] = {"model": model, "baseline": baseline, "sets": {}}
    for result in results:
        sets = content["sets"]
        if result.weight is not None:
            sets = content.setdefault("interpolation", {}).setdefault(f"{result.weight:g}", {})
        sets[result.name] = {"kind": result.kind, "by": result.by, "metrics": dict(result.metrics), **result.details}
        if result.classified is not None:
            sets[result.name] |= result.classified.to_json()
        if result.baseline is not None:
            sets[result.name] |= {result.compared: dict(result.baseline), "difference": result.difference}
    return content


def as_csv(results: Sequence[SetResult]) -> str:
    text = io.StringIO()
    compared = next((result.compared for result in results if result.baseline is not None), None)
    weighted = any(result.weight is not None for result in results)
    writer = csv.writer(text, lineterminator="\n")
    columns = ["set", "kind", "by", *(["weight"] if weighted else []), "metric", "value"]
    writer.writerow([*columns, *([compared, "difference"] if compared else [])])
    for result in results:
        facts = [result.name, result.kind, result.by, *([result.weight] if weighted else [])]
        for name, value in result.metrics.items():
            beside = [(result.baseline or {}).get(name, ""), result.difference.get(name, "")] if compared else []
            writer.writerow([*facts, name, value, *beside])
    return text.getvalue()

"""The figures of several sets: as rows for a table, as JSON, as CSV, and beside a baseline's."""

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
    """What was measured on one set."""

    name: str
    kind: Literal["retrieval", "zero-shot"]
    metrics: Mapping[str, float]
    by: str = "leanclip"
    classified: Classified | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def difference(found: SetResult, baseline: SetResult | None) -> dict[str, float]:
    """By how much the model is above the baseline, for the figures that both have."""
    if baseline is None:
        return {}
    return {
        name: value - baseline.metrics[name]
        for name, value in found.metrics.items()
        if name in baseline.metrics and name not in FACTS
    }


def figure(found: SetResult, baseline: SetResult | None, metric: str) -> str:
    """One cell: the figure, and the difference in percentage points (of a rank: in ranks) if there is a baseline."""
    value = found.metrics.get(metric, math.nan)
    if math.isnan(value):
        return "–"
    is_rank = metric.endswith("_rank")
    text = f"{value:,.1f}".removesuffix(".0") if is_rank else f"{value:.1%}"
    change = difference(found, baseline).get(metric)
    if change is None:
        return text
    return f"{text} ({change * (1 if is_rank else 100):+.1f})"


def retrieval_rows(results: Sequence[SetResult], baselines: Sequence[SetResult]) -> list[list[str]]:
    """Set, direction, recalls and median rank: two rows per set."""
    rows = []
    for found, baseline in _paired(results, baselines, "retrieval"):
        for direction in DIRECTIONS:
            names = [*(f"{direction}_recall@{k}" for k in RECALL_AT), f"{direction}_median_rank"]
            rows.append([found.name, direction.replace("_", "-"), *(figure(found, baseline, name) for name in names)])
    return rows


def zero_shot_rows(results: Sequence[SetResult], baselines: Sequence[SetResult]) -> list[list[str]]:
    """Set, images, accuracies and chance: one row per set."""
    rows = []
    for found, baseline in _paired(results, baselines, "zero-shot"):
        images, chance = found.metrics.get("images"), found.metrics.get("chance@1")
        figures = [figure(found, baseline, name) for name in ("top1", "top5", "mean_per_class_recall")]
        rows.append([
            found.name,
            "–" if images is None else f"{images:,.0f}",
            *figures,
            "–" if chance is None else f"{chance:.1%}",
        ])  # fmt: skip
    return rows


def as_json(
    model: str, results: Sequence[SetResult], baseline: str | None, baselines: Sequence[SetResult]
) -> dict[str, Any]:
    """Everything: figures, confusion counts, the figures of each class, the baseline's figures and differences."""
    sets: dict[str, Any] = {}
    for found, other in _paired(results, baselines):
        entry: dict[str, Any] = {"kind": found.kind, "by": found.by, "metrics": dict(found.metrics), **found.details}
        if found.classified is not None:
            entry |= found.classified.to_json()
        if other is not None:
            entry |= {"baseline": dict(other.metrics), "difference": difference(found, other)}
        sets[found.name] = entry
    return {"model": model, "baseline": baseline, "sets": sets}


def as_csv(results: Sequence[SetResult], baselines: Sequence[SetResult]) -> str:
    """One line per set and figure."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["set", "kind", "by", "metric", "value", *(["baseline", "difference"] if baselines else [])])
    for found, other in _paired(results, baselines):
        changes = difference(found, other)
        for name, value in found.metrics.items():
            beside = [other.metrics.get(name, "") if other else "", changes.get(name, "")] if baselines else []
            writer.writerow([found.name, found.kind, found.by, name, value, *beside])
    return text.getvalue()


def _paired(
    results: Sequence[SetResult], baselines: Sequence[SetResult], kind: str | None = None
) -> list[tuple[SetResult, SetResult | None]]:
    others = {each.name: each for each in baselines}
    return [(found, others.get(found.name)) for found in results if kind in (None, found.kind)]

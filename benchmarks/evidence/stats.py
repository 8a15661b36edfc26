"""Means, deviations and the paired comparison."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

Name = TypeVar("Name")


class Paired(NamedTuple):
    """Differences of pairs: their mean, standard deviation, and how likely a mean so far from 0 is by chance."""

    mean: float
    deviation: float
    p: float


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Paired:
    """Student's two-sided test of the pairs' differences."""
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    mean, deviation = statistics.fmean(differences), statistics.stdev(differences)
    if deviation == 0:
        return Paired(mean, 0.0, 1.0 if mean == 0 else 0.0)
    t = abs(mean) / (deviation / math.sqrt(len(differences)))
    return Paired(mean, deviation, tail(t, len(differences) - 1))


def tail(t: float, freedom: int) -> float:
    """Both tails of Student's distribution beyond t: Simpson's rule over the angle of tangent t / sqrt(freedom)."""
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    low, high, parts = math.atan(t / math.sqrt(freedom)), math.pi / 2, 2000
    step = (high - low) / parts
    weights = [1, *([4, 2] * (parts // 2))[:-1], 1]
    return 2 * scale * step / 3 * sum(w * math.cos(low + i * step) ** (freedom - 1) for i, w in enumerate(weights))


def holm(chances: Mapping[Name, float], family: int | None = None) -> dict[Name, float]:
    """The p of several comparisons, each raised for the number of those that are not clearer (Holm 1979).

    `family` counts those too that are planned and not made yet, as if they came out less clear."""
    found: dict[Name, float] = {}
    least = 0.0
    for number, name in enumerate(sorted(chances, key=lambda name: chances[name])):
        least = max(least, min(1.0, ((family or len(chances)) - number) * chances[name]))
        found[name] = least
    return found


def shown(values: Sequence[float]) -> str:
    """Mean and deviation in percent."""
    spread = f" ± {100 * statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{100 * statistics.fmean(values):.2f}{spread}"

"""Means, deviations and paired comparisons."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

Name = TypeVar("Name")


class Paired(NamedTuple):
    """Differences of pairs: mean, standard deviation, and p of Student's two-sided test."""

    mean: float
    deviation: float
    p: float

    def __str__(self) -> str:
        """In percentage points."""
        return f"{100 * self.mean:+.2f} ± {100 * self.deviation:.2f}"


def paired(values: Sequence[float], baseline: Sequence[float]) -> Paired:
    differences = [value - other for value, other in zip(values, baseline, strict=True)]
    mean, deviation = statistics.fmean(differences), statistics.stdev(differences)
    if deviation == 0:
        return Paired(mean, 0.0, 1.0 if mean == 0 else 0.0)
    t = abs(mean) / (deviation / math.sqrt(len(differences)))
    return Paired(mean, deviation, two_tails(t, len(differences) - 1))


def two_tails(t: float, freedom: int) -> float:
    """Both tails of Student's distribution beyond t: Simpson's rule over the angle of tangent t / sqrt(freedom)."""
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    low, high, parts = math.atan(t / math.sqrt(freedom)), math.pi / 2, 2000
    step = (high - low) / parts
    weights = [1, *([4, 2] * (parts // 2))[:-1], 1]
    return 2 * scale * step / 3 * sum(w * math.cos(low + i * step) ** (freedom - 1) for i, w in enumerate(weights))


def holm(p_values: Mapping[Name, float], family: int | None = None) -> dict[Name, float]:
    """p of several comparisons, corrected for their number (Holm 1979).

    `family` counts planned comparisons without a result, too, as if their p were larger."""
    corrected: dict[Name, float] = {}
    lowest = 0.0
    for number, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        lowest = max(lowest, min(1.0, ((family or len(p_values)) - number) * p_values[name]))
        corrected[name] = lowest
    return corrected


def mean_and_deviation(values: Sequence[float], digits: int = 2) -> str:
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{deviation}"


def percent(values: Sequence[float]) -> str:
    """Mean and deviation in percent."""
    return mean_and_deviation([100 * value for value in values])

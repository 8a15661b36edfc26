"""Histograms of the per-sample state of a loss, small enough to log at every evaluation."""

import math
from dataclasses import dataclass

import torch

from leanclip.losses import ContrastiveLoss
from leanclip.losses.global_contrastive import GlobalContrastiveLoss
from leanclip.losses.sample_state import SIDES, SampleState
from leanclip.losses.temperature import IndividualTemperature

CHUNK = 1 << 22  # values counted at a time, which bounds the memory
LOG_U_BINS = (-32.0, 16.0, 96)  # natural logarithm; -32.2 is the default eps
TAU_BINS = 40


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """`counts[i]` values lie between `edges[i]` and `edges[i + 1]`; the outermost bins also count values beyond.

    `absent` counts samples without a value, which no step has visited.
    """

    name: str
    edges: tuple[float, ...]
    counts: tuple[int, ...]
    absent: int


def state_histograms(loss: ContrastiveLoss) -> list[Histogram]:
    """Of the running estimates and the per-sample temperatures; none for losses without them. A collective call."""
    if not isinstance(loss, GlobalContrastiveLoss) or loss.state is None or loss.inner_rate is None:
        return []
    low, high, bins = LOG_U_BINS
    edges = torch.linspace(low, high, bins + 1, dtype=torch.float64)
    histograms = [_count(loss.state, f"log_u_{side}", edges) for side in SIDES]
    rule = loss.temperature_rule
    if isinstance(rule, IndividualTemperature) and rule.tau_min < rule.tau_max:
        edges = torch.logspace(math.log10(rule.tau_min), math.log10(rule.tau_max), TAU_BINS + 1, dtype=torch.float64)
        histograms += [_count(loss.state, f"tau_{side}", edges) for side in SIDES]
    return histograms


@torch.no_grad()
def _count(state: SampleState, name: str, edges: torch.Tensor) -> Histogram:
    table = state.table(name)
    counts = torch.zeros(len(edges) - 1, dtype=torch.int64, device=table.device)
    inner = edges[1:-1].to(table.device)
    for part in table.split(CHUNK):
        bins = torch.bucketize(part[part.isfinite()].double(), inner, right=True)
        counts += torch.bincount(bins, minlength=len(counts))
    counts = state.ranks.sum(counts, purpose="histogram")
    total = int(counts.sum())
    return Histogram(
        name=name,
        edges=tuple(float(f"{edge:.6g}") for edge in edges.tolist()),
        counts=tuple(counts.tolist()),
        absent=state.num_samples - total,
    )

"""Batch normalisation's running averages: one update per step, alike on all ranks, whatever the micro-batches.

The statistics that normalise are those of each micro-batch on each rank: the one thing about micro-batches and ranks
that is not exact. The running averages move once a step, by the mean over micro-batches and ranks.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from leanclip.distributed import Ranks

T = TypeVar("T")


class RunningAverages:
    """Those of all batch-norm layers of a model; most models have none, and then nothing here does anything."""

    def __init__(self, model: nn.Module) -> None:
        self.layers = [
            module
            for module in model.modules()
            if isinstance(module, _BatchNorm) and module.track_running_stats and module.running_mean is not None
        ]
        self.before: list[Tensor] = []

    def remember(self) -> None:
        """Before a step, for `restore`."""
        self.before = [buffer.clone() for buffer in self._averages() + self._counts()]

    def restore(self) -> None:
        """As before the step."""
        for buffer, value in zip(self._averages() + self._counts(), self.before, strict=True):
            buffer.copy_(value)

    def as_one_update(self, parts: Iterable[T]) -> Iterator[T]:
        """The parts of one batch, one after the other; together they are one update."""
        totals = [torch.zeros_like(buffer) for buffer in self._averages()]
        number = 0
        for number, part in enumerate(parts, 1):  # noqa: B007
            self.restore()
            yield part
            for total, buffer in zip(totals, self._averages(), strict=True):
                total += buffer
        for total, buffer in zip(totals, self._averages(), strict=True):
            buffer.copy_(total / number)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Forward passes inside leave the averages alone."""
        momenta = [layer.momentum for layer in self.layers]
        counts = [count.clone() for count in self._counts()]
        for layer in self.layers:
            layer.momentum = 0.0
        try:
            yield
        finally:
            for layer, momentum in zip(self.layers, momenta, strict=True):
                layer.momentum = momentum
            for count, value in zip(self._counts(), counts, strict=True):
                count.copy_(value)

    def average(self, ranks: Ranks) -> None:
        """Over the ranks, by one collective."""
        averages = self._averages()
        if ranks.size == 1 or not averages:
            return
        flat = ranks.sum(torch.cat([buffer.ravel() for buffer in averages]), purpose="batch norm") / ranks.size
        for buffer, value in zip(averages, flat.split([buffer.numel() for buffer in averages]), strict=True):
            buffer.copy_(value.view_as(buffer))

    def _averages(self) -> list[Tensor]:
        return [b for layer in self.layers for b in (layer.running_mean, layer.running_var) if b is not None]

    def _counts(self) -> list[Tensor]:
        return [layer.num_batches_tracked for layer in self.layers if layer.num_batches_tracked is not None]

"""Batch normalisation's running averages: one update per step, equal on all ranks, for any number of micro-batches.

Each micro-batch on each rank is normalised by its own statistics: the one thing about micro-batches and ranks that is
not exact. The running averages move once per step, by the mean over micro-batches and ranks.
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
    """The running averages of all batch-norm layers of a model; without such layers every method does nothing."""

    def __init__(self, model: nn.Module) -> None:
        self.layers = [
            module
            for module in model.modules()
            if isinstance(module, _BatchNorm) and module.track_running_stats and module.running_mean is not None
        ]
        self.before: list[Tensor] = []

    def remember(self) -> None:
        """Store the values before a step, for `restore`."""
        self.before = [buffer.clone() for buffer in self._averages() + self._counts()]

    def restore(self) -> None:
        for buffer, value in zip(self._averages() + self._counts(), self.before, strict=True):
            buffer.copy_(value)

    def as_one_update(self, micro_batches: Iterable[T]) -> Iterator[T]:
        """Iterate over the micro-batches of one batch, which together make one update."""
        totals = [torch.zeros_like(buffer) for buffer in self._averages()]
        number = 0
        for number, micro_batch in enumerate(micro_batches, 1):  # noqa: B007
            self.restore()
            yield micro_batch
            for total, buffer in zip(totals, self._averages(), strict=True):
                total += buffer
        for total, buffer in zip(totals, self._averages(), strict=True):
            buffer.copy_(total / number)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Forward passes inside the block do not change the averages."""
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

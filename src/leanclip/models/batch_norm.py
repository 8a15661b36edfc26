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
        names = ("running_mean", "running_var", "num_batches_tracked")
        layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
        buffers = {name: [b for layer in layers if (b := getattr(layer, name)) is not None] for name in names}
        self.averages: list[Tensor] = buffers["running_mean"] + buffers["running_var"]
        self.buffers = self.averages + buffers["num_batches_tracked"]
        self.before: list[Tensor] = []

    def remember(self) -> None:
        """Store the values before a step, for `restore`."""
        self.before = [buffer.clone() for buffer in self.buffers]

    def restore(self) -> None:
        _copy(self.before, self.buffers)

    def as_one_update(self, micro_batches: Iterable[T]) -> Iterator[T]:
        """Iterate over the micro-batches of one batch, which together make one update."""
        totals = [torch.zeros_like(buffer) for buffer in self.averages]
        number = 0
        for number, micro_batch in enumerate(micro_batches, 1):  # noqa: B007
            self.restore()
            yield micro_batch
            for total, buffer in zip(totals, self.averages, strict=True):
                total += buffer
        _copy([total / number for total in totals], self.averages)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Forward passes inside the block do not change the averages."""
        values = [buffer.clone() for buffer in self.buffers]
        try:
            yield
        finally:
            _copy(values, self.buffers)

    def average(self, ranks: Ranks) -> None:
        if ranks.size == 1 or not self.averages:
            return
        flat = ranks.sum(torch.cat([buffer.ravel() for buffer in self.averages]), purpose="batch norm") / ranks.size
        parts = flat.split([buffer.numel() for buffer in self.averages])
        _copy([part.view_as(buffer) for part, buffer in zip(parts, self.averages, strict=True)], self.averages)


def _copy(values: list[Tensor], buffers: list[Tensor]) -> None:
    for value, buffer in zip(values, buffers, strict=True):
        buffer.copy_(value)

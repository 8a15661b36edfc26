"""A running average of the weights (EMA): often better, and steadier, than the weights of any one step."""

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from leanclip.distributed import local_tensor, reshard
from leanclip.models import TwoTower

RISE = 9  # the decay after n updates is at most (1 + n) / (1 + n + RISE)


class WeightEMA:
    """average <- decay average + (1 - decay) weights, after every step that was taken.

    A constant decay would leave a short run, or the beginning of a long one, near its random start. So the decay is
    min(decay, (1 + n) / (10 + n)) at the n-th update: the average spans about the last ninth of the run so far, until
    it spans the 1 / (1 - decay) steps that were asked for.

    Parameters that train are averaged, in float32 (float64 in a float64 run), each rank its own part where they are
    split. Everything else is the model's own: batch normalisation's running averages, and the temperature.
    """

    def __init__(self, model: TwoTower, decay: float) -> None:
        self.decay, self.updates, self._model = decay, 0, model
        self._parameters = {name: p for name, p in model.clip.named_parameters() if p.requires_grad}
        self.averages = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        """By open_clip's names, split over the ranks as the weights are."""

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights of a step. Waits for nothing."""
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (1 + self.updates + RISE))
        get_ema_multi_avg_fn(decay)(_local(self.averages), _local(self._parameters), self.updates)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model has the averaged weights; no step may be taken. Costs the memory of one parameter."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def restart(self) -> None:
        """Begin anew from the model's weights."""
        self.updates = 0
        for average, parameter in zip(_local(self.averages), _local(self._parameters), strict=True):
            average.copy_(parameter)

    @torch.no_grad()
    def _swap(self) -> None:
        reshard(self._model)
        for parameter, average in zip(_local(self._parameters), _local(self.averages), strict=True):
            kept = parameter.clone()
            parameter.copy_(average)
            average.copy_(kept)


def _local(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    return [local_tensor(tensor) for tensor in tensors.values()]

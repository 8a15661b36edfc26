"""An exponential moving average of the weights (EMA): often better, and less noisy, than the weights of one step."""

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from leanclip.distributed import local_tensor, reshard

RISE = 9  # the decay after n updates is at most (1 + n) / (1 + n + RISE)


class WeightEMA:
    """average <- decay average + (1 - decay) weights, after every step that was taken.

    With a constant decay, a short run or the start of a long one would stay near its random weights. So the decay is
    min(decay, (1 + n) / (10 + n)) at the n-th update: the average spans about the last ninth of the run so far, until
    it spans 1 / (1 - decay) steps.

    Trained parameters are averaged, in float32 (float64 in a float64 run), on each rank its shard. Batch-norm
    statistics and the temperature are not averaged.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay, self.updates, self._model = decay, 0, model
        self._parameters = {name.removeprefix("clip."): p for name, p in model.named_parameters() if p.requires_grad}
        self.averages = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        """By open_clip's names, sharded as the weights are."""

    @torch.no_grad()
    def update(self) -> None:
        """Add the weights of a step, without waiting for the device."""
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (1 + self.updates + RISE))
        get_ema_multi_avg_fn(decay)(_local(self.averages), _local(self._parameters), self.updates)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """In this context the model has the averaged weights; take no step. Needs the memory of one parameter."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def restart(self) -> None:
        """Start again from the weights of the model."""
        self.updates = 0
        for average, parameter in zip(_local(self.averages), _local(self._parameters), strict=True):
            average.copy_(parameter)

    @torch.no_grad()
    def _swap(self) -> None:
        reshard(self._model)
        for parameter, average in zip(_local(self._parameters), _local(self.averages), strict=True):
            weights = parameter.clone()
            parameter.copy_(average)
            average.copy_(weights)


def _local(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    return [local_tensor(tensor) for tensor in tensors.values()]

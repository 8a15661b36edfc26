"""What a loss returns."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

Metric = Tensor | float | str | Callable[[], Tensor]


class Metrics(Mapping[str, Tensor | float | str]):
    """Numbers about a step, computed when they are looked at: a step that is not logged does not pay for them."""

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self._metrics = metrics

    def __getitem__(self, name: str) -> Tensor | float | str:
        value = self._metrics[name]
        return value() if callable(value) and not isinstance(value, Tensor) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._metrics)

    def __len__(self) -> int:
        return len(self._metrics)


@dataclass(frozen=True, kw_only=True)
class LossOutput:
    """`loss` carries the gradients; `metrics` are detached and stay on the device, so reading one waits for it."""

    loss: Tensor
    metrics: Mapping[str, Tensor | float | str]

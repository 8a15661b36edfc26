"""What a loss returns."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LossOutput:
    """`loss` carries the gradients; `metrics` are detached and stay on the device, so reading one waits for it."""

    loss: Tensor
    metrics: Mapping[str, Tensor | float | str]

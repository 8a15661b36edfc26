"""The loss scale of fp16: large enough that small gradients do not vanish, halved when one overflows.

A number on the host, since a step waits for one flag anyway (is the gradient finite?) and all ranks have the same;
torch's GradScaler would check each rank's shard separately.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

GROWTH_STEPS = 2000


@dataclass
class LossScale:
    value: float = 1.0
    grows: bool = False
    good_steps: int = 0
    lowered: bool = False  # by the last step

    @classmethod
    def of(cls, precision: str | None) -> "LossScale":
        return cls(2.0**16, grows=True) if precision == "amp" else cls()

    def apply(self, loss: Tensor) -> Tensor:
        return loss * self.value if self.grows else loss

    def remove(self, parameters: Iterable[Tensor]) -> None:
        """Divide the gradients of the parameters by the scale."""
        if self.grows:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(1.0 / self.value)

    def update(self, finite: bool) -> None:
        if not self.grows:
            return
        self.good_steps = self.good_steps + 1 if finite else 0
        self.lowered = not finite and self.value > 1.0
        if not finite:
            self.value = max(1.0, self.value / 2)
        elif self.good_steps == GROWTH_STEPS:
            self.value, self.good_steps = self.value * 2, 0

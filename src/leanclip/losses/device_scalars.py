"""Numbers that a schedule moves, kept on the device: a recorded step reads them anew at every replay."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Numbers(nn.Module):
    """Changed by `set`, read from `value`. They keep their precision where the module around them is cast."""

    value: Tensor

    def __init__(self, *numbers: float) -> None:
        super().__init__()
        self.now = numbers
        self.register_buffer("value", self._on(torch.device("cpu")), persistent=False)

    def set(self, *numbers: float) -> None:
        if numbers != self.now:
            self.now = numbers
            for place, number in zip(self.value, numbers, strict=True):
                place.fill_(number)  # nothing waits, as it would for a copy

    def _on(self, device: torch.device) -> Tensor:
        return torch.tensor(self.now, device=device, dtype=torch.float32 if device.type == "mps" else torch.float64)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Numbers":
        self.value = self._on(fn(self.value.float()).device)
        return self

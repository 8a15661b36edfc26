"""Scalars that a schedule changes, kept on the device: a CUDA graph reads their current values at every replay."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class DeviceScalars(nn.Module):
    """Changed by `set`, read from `value`. They keep their precision where the module around them is cast."""

    value: Tensor

    def __init__(self, *scalars: float) -> None:
        super().__init__()
        self.on_host = scalars
        self.register_buffer("value", self._on(torch.device("cpu")), persistent=False)

    def set(self, *scalars: float) -> None:
        if scalars != self.on_host:
            self.on_host = scalars
            for element, scalar in zip(self.value, scalars, strict=True):
                element.fill_(scalar)  # does not wait for the device, as a copy would

    def _on(self, device: torch.device) -> Tensor:
        dtype = torch.float32 if device.type == "mps" else torch.float64
        return torch.tensor(self.on_host, device=device, dtype=dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "DeviceScalars":
        self.value = self._on(fn(self.value.float()).device)
        return self

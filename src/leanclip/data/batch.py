"""What the loader gives the training step."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

LIGHT = 256 << 10  # bytes


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One step's samples. The ids stay on the host, where the loss checks them without waiting for the device."""

    images: Tensor  # (B, 3, H, W) uint8: the model normalises
    tokens: Tensor  # (B, L)
    sample_ids: Tensor  # (B,) stable integers in [0, n)
    lengths: Tensor | None = None  # (B,) of the texts, end token included; on the host, where shapes are decided
    broken: Mapping[str, int] = field(default_factory=dict)  # samples that others stand in for, by kind
    examples: tuple[str, ...] = ()  # what was wrong with some of them

    def __len__(self) -> int:
        return len(self.images)

    def __reduce__(self) -> "tuple[Any, ...]":
        """On the way from a loader's process. Every tensor travels in shared memory of its own, which takes the
        receiver longer than to copy a small one."""
        return _received, ({name: _light(value) for name, value in vars(self).items()},)

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> "Batch":
        """On the device; the dtype is for images that are not uint8."""
        dtype = dtype if self.images.is_floating_point() else None
        return replace(
            self,
            images=self.images.to(device, dtype, non_blocking=True),
            tokens=self.tokens.to(device, non_blocking=True),
        )

    def pin_memory(self) -> "Batch":
        """Called by torch's DataLoader, so that copies to the device run beside its work."""
        return replace(
            self,
            images=self.images.pin_memory(),
            tokens=self.tokens.pin_memory(),
            sample_ids=self.sample_ids.pin_memory(),
        )

    def split(self, parts: int) -> "list[Batch]":
        """Micro-batches whose sizes differ by one at most."""
        pieces = (part.tensor_split(parts) for part in (self.images, self.tokens, self.sample_ids))
        lengths = [None] * parts if self.lengths is None else self.lengths.tensor_split(parts)
        return [
            Batch(images=i, tokens=t, sample_ids=s, lengths=n) for i, t, s, n in zip(*pieces, lengths, strict=True)
        ]


def _light(value: Any) -> Any:
    """A small tensor as an array, which is pickled whole."""
    small = isinstance(value, Tensor) and value.device.type == "cpu" and value.nbytes <= LIGHT
    return value.numpy() if small and not value.is_floating_point() else value


def _received(values: Mapping[str, Any]) -> Batch:
    found: dict[str, Any] = {
        name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in values.items()
    }
    return Batch(**found)

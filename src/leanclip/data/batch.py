"""What the loader gives the training step."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One step's samples. The ids stay on the host, where the loss checks them without waiting for the device."""

    images: Tensor  # (B, 3, H, W)
    tokens: Tensor  # (B, L)
    sample_ids: Tensor  # (B,) stable integers in [0, n)

    def __len__(self) -> int:
        return len(self.images)

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> "Batch":
        return Batch(
            images=self.images.to(device, dtype, non_blocking=True),
            tokens=self.tokens.to(device, non_blocking=True),
            sample_ids=self.sample_ids,
        )

    def pin_memory(self) -> "Batch":
        """Called by torch's DataLoader, so that copies to the device run beside its work."""
        return Batch(
            images=self.images.pin_memory(), tokens=self.tokens.pin_memory(), sample_ids=self.sample_ids.pin_memory()
        )

    def split(self, parts: int) -> "list[Batch]":
        """Micro-batches whose sizes differ by one at most."""
        pieces = (part.tensor_split(parts) for part in (self.images, self.tokens, self.sample_ids))
        return [Batch(images=i, tokens=t, sample_ids=s) for i, t, s in zip(*pieces, strict=True)]

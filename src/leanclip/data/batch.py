"""The samples of one training step."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leanclip.data.source import MAX_EXAMPLES

MAX_PICKLED_BYTES = 256 << 10  # larger tensors travel through shared memory


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The samples of one step. What the loss takes beside embeddings stays on the host, where it is checked without a
    synchronisation."""

    images: Tensor  # (B, 3, H, W) uint8; the model normalises them
    tokens: Tensor  # (B, L)
    sample_ids: Tensor  # (B,) stable integers in [0, n)
    groups: Tensor | None = None  # (B,) integers: samples of one group are not each other's negatives
    weights: Tensor | None = None  # (B,) of the pairs in the loss
    caption_numbers: Tensor | None = None  # (B,) which of its sample's captions each is, where the loss asks for it
    lengths: Tensor | None = None  # (B,) tokens of each caption with its end token; on the host
    broken: Mapping[str, int] = field(default_factory=dict)  # samples that were replaced, by kind
    examples: tuple[str, ...] = ()  # messages of some of them
    packed: tuple[Any, ...] = ()  # the captions as the text tower takes them, one entry for each micro-batch

    def __len__(self) -> int:
        return len(self.images)

    def __reduce__(self) -> "tuple[Any, ...]":
        """Pickle small tensors by value: opening the shared memory of a tensor takes longer than copying it."""
        return _unpickle, ({name: _small_as_array(value) for name, value in vars(self).items()},)

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> "Batch":
        """Copy to the device; `dtype` applies to floating-point images only."""
        dtype = dtype if self.images.is_floating_point() else None
        return replace(
            self,
            images=self.images.to(device, dtype, non_blocking=True),
            tokens=self.tokens.to(device, non_blocking=True),
        )

    def pin_memory(self) -> "Batch":
        """Called by torch's DataLoader, so that copies to the device are asynchronous."""
        names = ("images", "tokens", "sample_ids", "groups", "weights", "caption_numbers")
        tensors = {name: getattr(self, name) for name in names}
        on_host = {name: tensor for name, tensor in tensors.items() if tensor is not None and tensor.is_cpu}
        return replace(self, **{name: tensor.pin_memory() for name, tensor in on_host.items()})

    @property
    def captions(self) -> Any:
        """What the text tower takes: packed captions, or the padded tokens."""
        return self.packed[0] if self.packed else self.tokens

    def pack(self, texts: "Callable[[Tensor, Tensor | None], Any]", micro_batches: int = 1) -> "Batch":
        """With the captions of each micro-batch packed by `texts`, from their tokens and lengths."""
        parts = self.split(micro_batches)
        return replace(self, packed=tuple(texts(part.tokens, part.lengths) for part in parts))

    def split(self, parts: int) -> "list[Batch]":
        """Micro-batches whose sizes differ by at most one."""
        tensors = (tensor.tensor_split(parts) for tensor in (self.images, self.tokens, self.sample_ids))
        lengths = [None] * parts if self.lengths is None else self.lengths.tensor_split(parts)
        packed = [(captions,) for captions in self.packed] or [()] * parts
        return [
            Batch(images=i, tokens=t, sample_ids=s, lengths=n, packed=p)
            for i, t, s, n, p in zip(*tensors, lengths, packed, strict=True)
        ]

    @staticmethod
    def join(parts: "Sequence[Batch]", images: Tensor) -> "Batch":
        """Parts of a batch, and the images of all of them."""
        names = [name for name, value in vars(parts[0]).items() if isinstance(value, Tensor) and name != "images"]
        tensors: dict[str, Any] = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
        return Batch(
            images=images,
            **tensors,
            broken=sum((Counter(part.broken) for part in parts), Counter()),
            examples=tuple(example for part in parts for example in part.examples)[:MAX_EXAMPLES],
        )


def _small_as_array(value: Any) -> Any:
    small = isinstance(value, Tensor) and value.device.type == "cpu" and value.nbytes <= MAX_PICKLED_BYTES
    return value.numpy() if small and not value.is_floating_point() else value


def _unpickle(fields: Mapping[str, Any]) -> Batch:
    tensors: dict[str, Any] = {
        name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in fields.items()
    }
    return Batch(**tensors)

"""The samples of one training step, and their way to the device.

The next batch is copied there and packed while the device works on the current one.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, is_dataclass, replace
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


def on_device(
    batches: Iterator[Batch],
    device: torch.device,
    dtype: torch.dtype | None = None,
    pack: Callable[[Batch], Batch] = lambda batch: batch,
) -> Iterator[Batch]:
    """The batches on the device, with `pack` applied to each. On CUDA a thread does both on a stream of its own, one
    batch ahead: the training step waits for the device, which would leave no time beside it.

    The first batch is taken by the calling thread, because the loader's workers start with it: a worker that
    a thread of a pool forks tries to join itself when it ends, and fails.
    """
    if device.type != "cuda":
        for batch in batches:
            yield pack(batch.to(device, dtype))
        return
    device = numbered(device)
    stream = torch.cuda.Stream(device)

    def send_next() -> tuple[Batch, Any] | None:
        with torch.cuda.stream(stream):  # on which the loader resizes, too
            for batch in batches:
                return pack(batch.to(device, dtype)), stream.record_event()
        return None

    # Leaving the block waits for the thread, however long the loader takes for a batch: the next epoch reads from the
    # same workers, and two threads would take each other's batches. The wait counts as no activity, since a loader
    # may hang.
    with ThreadPoolExecutor(1, initializer=torch.cuda.set_device, initargs=(device,)) as thread:
        sent = send_next()
        while sent is not None:
            sending = thread.submit(send_next)
            yield _received(*sent)
            sent = sending.result()


def numbered(device: torch.device) -> torch.device:
    """A GPU by its number, for another thread, in which `cuda` may be another one. `set_device` needs the number."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


def _received(batch: Batch, copied: Any) -> Batch:
    """For use on the current stream, which waits for the copy; the host does not."""
    stream = torch.cuda.current_stream(batch.images.device)
    stream.wait_event(copied)
    for tensor in _cuda_tensors(batch):
        tensor.record_stream(stream)
    return batch


def _cuda_tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor) and value.is_cuda:
        yield value
    elif is_dataclass(value):
        yield from _cuda_tensors(tuple(vars(value).values()))
    elif isinstance(value, tuple):
        for item in value:
            yield from _cuda_tensors(item)

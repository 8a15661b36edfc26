"""The next batch is copied to the device and packed while the device works on the current one."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor

from leanclip.data.batch import Batch


def on_device(
    batches: Iterator[Batch],
    device: torch.device,
    dtype: torch.dtype | None = None,
    pack: Callable[[Batch], Batch] = lambda batch: batch,
) -> Iterator[Batch]:
    """The batches on the device, with `pack` applied to each. On CUDA a thread does both on a stream of its own, one
    batch ahead: the training step waits for the device, which would leave no time beside it."""
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
        sending = thread.submit(send_next)
        while (sent := sending.result()) is not None:
            sending = thread.submit(send_next)
            yield _received(*sent)


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

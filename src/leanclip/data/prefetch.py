"""The next batch is copied to the device and packed while the device works on the current one."""

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor

from leanclip.data.batch import Batch

Send = Callable[[Batch], Batch]


def on_device(
    batches: Iterator[Batch],
    device: torch.device,
    dtype: torch.dtype | None = None,
    pack: Send = lambda batch: batch,
) -> Iterator[Batch]:
    """The batches on the device, with `pack` applied to each. On CUDA a thread does both on a stream of its own, one
    batch ahead: the training step waits for the device, which would leave no time beside it."""
    if device.type != "cuda":
        for batch in batches:
            yield pack(batch.to(device, dtype))
        return
    device = numbered(device)
    ready: queue.Queue[_Sent | BaseException | None] = queue.Queue()
    free, stop = threading.Semaphore(1), threading.Event()

    def send_all() -> None:
        try:
            torch.cuda.set_device(device)  # of this thread
            stream = torch.cuda.Stream(device)
            for batch in batches:
                free.acquire()
                if stop.is_set():
                    break
                ready.put(_Sent(batch, lambda batch: pack(batch.to(device, dtype)), stream))
            ready.put(None)
        except BaseException as error:  # raised again by the consumer
            ready.put(error)

    thread = threading.Thread(target=send_all, daemon=True)
    thread.start()
    try:
        while (sent := ready.get()) is not None:
            if isinstance(sent, BaseException):
                raise sent
            free.release()
            yield sent.received()
    finally:  # also where the run ends inside an epoch
        stop.set()
        free.release()
        # However long the loader takes for a batch: the next epoch reads from the same workers, and two threads would
        # take each other's batches. The wait counts as no activity, since a loader may hang.
        thread.join()


def numbered(device: torch.device) -> torch.device:
    """A GPU by its number, for another thread, in which `cuda` may be another one. `set_device` needs the number."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


class _Sent:
    """A batch whose copy has started."""

    def __init__(self, batch: Batch, send: Send, stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            self.batch = send(batch)
            self.done = stream.record_event()

    def received(self) -> Batch:
        """For use on the current stream, which waits for the copy; the host does not."""
        stream = torch.cuda.current_stream(self.batch.images.device)
        stream.wait_event(self.done)
        for tensor in _cuda_tensors(self.batch):
            tensor.record_stream(stream)
        return self.batch


def _cuda_tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor) and value.is_cuda:
        yield value
    elif is_dataclass(value):
        yield from _cuda_tensors(tuple(vars(value).values()))
    elif isinstance(value, tuple):
        for item in value:
            yield from _cuda_tensors(item)

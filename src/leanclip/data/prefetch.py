"""Batches on their way to the device while it works on the one before."""

import contextlib
import queue
import threading
from collections.abc import Iterator

import torch

from leanclip.data.batch import Batch


def on_device(batches: Iterator[Batch], device: torch.device, dtype: torch.dtype | None = None) -> Iterator[Batch]:
    """The batches on the device. On CUDA a thread waits for the loader and copies on a stream of its own, one ahead:
    the training step, which waits for the device itself, would leave the copy no time beside it."""
    if device.type != "cuda":
        for batch in batches:
            yield batch.to(device, dtype)
        return
    device = numbered(device)
    ready: queue.Queue[_Sent | BaseException | None] = queue.Queue(maxsize=1)
    stop = threading.Event()
    thread = threading.Thread(target=_send, args=(batches, device, dtype, ready, stop), daemon=True)
    thread.start()
    try:
        while (sent := ready.get()) is not None:
            if isinstance(sent, BaseException):
                raise sent
            yield sent.received()
    finally:  # also where the run ends inside an epoch
        stop.set()
        # However long its batch takes: the next epoch reads from the same workers, and two threads would take each
        # other's batches. It is no sign of work, as waiting for a batch never is: a loader may hang.
        while thread.is_alive():
            with contextlib.suppress(queue.Empty):
                ready.get(timeout=0.05)


def numbered(device: torch.device) -> torch.device:
    """A GPU by its number, for another thread: `cuda` alone may be another one there, and `set_device` refuses it."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


class _Sent:
    """A batch whose copy was begun."""

    def __init__(
        self, batch: Batch, device: torch.device, dtype: torch.dtype | None, stream: torch.cuda.Stream
    ) -> None:
        with torch.cuda.stream(stream):
            self.batch = batch.to(device, dtype)
            self.done = stream.record_event()

    def received(self) -> Batch:
        """For use on the current stream, which waits for the copy; the host does not."""
        stream = torch.cuda.current_stream(self.batch.images.device)
        stream.wait_event(self.done)
        for tensor in (self.batch.images, self.batch.tokens):
            tensor.record_stream(stream)
        return self.batch


def _send(
    batches: Iterator[Batch],
    device: torch.device,
    dtype: torch.dtype | None,
    ready: "queue.Queue[_Sent | BaseException | None]",
    stop: threading.Event,
) -> None:
    try:
        torch.cuda.set_device(device)  # of this thread
        stream = torch.cuda.Stream(device)
        for batch in batches:
            ready.put(_Sent(batch, device, dtype, stream))
            if stop.is_set():
                break
        ready.put(None)
    except BaseException as error:  # told to the consumer, who stops
        ready.put(error)

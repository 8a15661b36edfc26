"""Shared memory for decoded crops: workers write them, the GPU reads them from there, and no process copies them.

A batch comes in parts of so many samples, each in a slot of its own. Part k goes to slot k modulo their number, and
with it always to the same worker.
"""

import math
import mmap
import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import count, cycle, islice
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leanclip.data.batch import Batch
from leanclip.data.decode import resized
from leanclip.errors import UserError
from leanclip.ops.resize import FILTER_BYTES, bicubic, longest_side, resize_crops

PART = 64  # samples
CROP_BYTES = 6  # times those of a resized crop: the room for each on average
MOST_BYTES = 4 << 30  # of all slots, unless resized crops alone need more
SLOTS = 3  # of each worker: two parts that are decoded or wait, one on its way to the GPU


def device_bytes(images: Tensor) -> int:
    """What resizing a batch to `images` (B, 3, H, W) takes on the device beside them."""
    height, width = images.shape[2:]
    tables = sum(longest_side(side) * side * FILTER_BYTES for side in {height, width})
    return min(PART, len(images)) * 3 * width * (CROP_BYTES * height + longest_side(height)) + tables


class CropRing:
    """The memory. Pickled into a worker, it is the same memory there."""

    def __init__(self, size: tuple[int, int], *, workers: int, samples: int) -> None:
        """`samples`: the most in a slot."""
        self.size = size  # of a resized crop: height, width
        self.crop_bytes = 3 * math.prod(size)
        self.slots = max(1, SLOTS * workers)
        least, most = samples * self.crop_bytes, samples * CROP_BYTES * self.crop_bytes
        self.slot_bytes = max(least, min(most, MOST_BYTES // self.slots))
        self._keep(os.memfd_create("leanclip-crops"))
        os.ftruncate(self._fd, self.slots * self.slot_bytes)

    def _keep(self, fd: int) -> None:
        self._fd = fd
        weakref.finalize(self, os.close, fd)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_fd": DupFd(self._fd), "memory": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        fd = state.pop("_fd").detach()
        del state["memory"]
        vars(self).update(state)
        self._keep(fd)

    @cached_property
    def memory(self) -> np.ndarray:
        """(slots, slot_bytes)"""
        return np.frombuffer(mmap.mmap(self._fd, 0), np.uint8).reshape(self.slots, self.slot_bytes)


class SlotWriter:
    """Writes the crops of a part, one after the other."""

    def __init__(self, ring: CropRing, slot: int, samples: int) -> None:
        self.ring, self.pixels, self.to_come = ring, ring.memory[slot], samples
        self.layout: list[tuple[int, int, int]] = []  # where each crop begins, its height and its width
        self.end = 0

    def append(self, crop: Tensor) -> None:
        """(3, height, width). A crop that is too large is resized here: the pixels are those of the GPU."""
        self.to_come -= 1
        fits = self.end + crop.numel() + self.to_come * self.ring.crop_bytes <= self.ring.slot_bytes
        if not fits or any(map(lambda side, size: side > longest_side(size), crop.shape[1:], self.ring.size)):
            crop = resized(crop, self.ring.size)
        _, height, width = crop.shape
        stop = self.end + crop.numel()
        self.pixels[self.end : stop].reshape(height, width, 3)[:] = crop.permute(1, 2, 0).numpy()
        self.layout.append((self.end, height, width))
        self.end = stop


class RingReader:
    """Resizes what the workers wrote, on a device."""

    def __init__(self, ring: CropRing, device: torch.device) -> None:
        self.ring, self.device = ring, device
        height, width = ring.size
        self.filters = bicubic(height, device), bicubic(width, device)
        self.staging = torch.empty(ring.slot_bytes, dtype=torch.uint8, device=device)
        self._read: dict[int, torch.cuda.Event] = {}  # by slot
        self._pinned = device.type != "cuda"

    def resize(self, part: int, layout: Tensor, out: Tensor) -> None:
        """Fill `out` (B, 3, H, W) with the crops of a part."""
        if not self._pinned:
            self._pin()
        if not len(layout):
            return
        slot = part % self.ring.slots
        begin, height, width = layout[-1].tolist()
        end = begin + 3 * height * width
        crops = self.staging[:end].copy_(torch.from_numpy(self.ring.memory[slot, :end]), non_blocking=True)
        resize_crops(crops, layout, *self.filters, out)
        if self.device.type == "cuda":
            self._read[slot] = torch.cuda.Event(blocking=True)
            self._read[slot].record()

    def wait(self, part: int | None = None) -> None:
        """Until the slot of a part, by default every slot, was read and may be written again."""
        for slot in list(self._read) if part is None else [part % self.ring.slots]:
            if (event := self._read.pop(slot, None)) is not None:
                event.synchronize()

    def _pin(self) -> None:
        """Before the first copy, and not before the workers start: it takes a second for each 3 GB."""
        runtime: Any = torch.cuda.cudart()
        address, size = self.ring.memory.ctypes.data, self.ring.memory.nbytes
        if int(runtime.cudaHostRegister(address, size, 0)):
            raise UserError(
                f"cannot pin {size >> 20:,} MiB of memory for decoded images; give fewer --workers, or --decode cpu",
                code="data.cannot_pin",
            )
        self._pinned = True
        weakref.finalize(self, runtime.cudaHostUnregister, address)


@dataclass(frozen=True)
class CropParts:
    """A sampler of (epoch, step, part, slot), and what joins the parts."""

    reader: RingReader
    steps: list[tuple[int, int]]  # of the current epoch
    share: int  # samples of a batch
    ahead: int  # parts that the workers are asked for before one is taken

    @property
    def number(self) -> int:
        """Parts of a batch."""
        return max(1, -(-self.share // PART))

    def __iter__(self) -> Iterator[tuple[int, int, int, int]]:
        slots = cycle(range(self.reader.ring.slots))
        for epoch, step in self.steps:
            for part in range(self.number):
                yield epoch, step, part, next(slots)

    def joined(self, parts: Iterator[Batch]) -> Iterator[Batch]:
        """The batches. The `images` of a part are where its crops are."""
        numbers = count()
        for _ in self.steps:
            size = (self.share, 3, *self.reader.ring.size)
            images, batches = torch.empty(size, dtype=torch.uint8, device=self.reader.device), []
            for number, target in zip(islice(numbers, self.number), images.split(PART), strict=False):
                self.reader.wait(number + self.ahead)  # which the loader orders when it gives this one
                part = next(parts)
                self.reader.resize(number, part.images, target)
                batches.append(part)
            yield Batch.join(batches, images)

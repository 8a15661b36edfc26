"""Batches whose crops come through shared memory: ordered from the workers in parts, resized and joined."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, cycle, islice

import torch

from leanclip.data.batch import Batch
from leanclip.data.crops.ring import PART, RingReader


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

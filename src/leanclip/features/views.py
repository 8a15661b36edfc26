"""The augmented images of samples, several of each, for tables of their features."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from leanclip.data.decode import Transform, view_of_sample
from leanclip.data.loader import in_order
from leanclip.data.order import sample_seed
from leanclip.data.source import BrokenSample, Source
from leanclip.errors import UserError


@dataclass(frozen=True)
class ViewBatch:
    """Samples with several views each, one sample after the other, and those that could not be read."""

    ids: list[int]
    images: Tensor  # (views * b, 3, H, W) uint8
    broken: dict[int, BrokenSample]


@dataclass(frozen=True)
class _ViewBatches(Dataset):
    source: Source
    ids: np.ndarray
    transform: Transform
    views: int
    seed: int
    batch: int

    def __len__(self) -> int:
        return -(-len(self.ids) // self.batch)

    def __getitem__(self, number: int) -> ViewBatch | UserError:
        ids, images, broken = [], [], {}
        for index in self.ids[number * self.batch : (number + 1) * self.batch].tolist():
            seeds = [sample_seed(self.seed, view, index) for view in range(self.views)]
            try:
                images += [view_of_sample(self.source, index, self.transform, seed=seed) for seed in seeds]
                ids.append(index)
            except BrokenSample as error:
                broken[index] = error
            except UserError as error:
                return error
        return ViewBatch(ids, torch.stack(images) if images else torch.empty(0), broken)


def view_batches(
    source: Source, ids: np.ndarray, transform: Transform, *, views: int, seed: int, batch: int, workers: int
) -> Iterator[ViewBatch]:
    """Each sample's augmented images of the first `views` epochs of a run with this seed."""
    data = _ViewBatches(source, ids, transform, views, seed, batch)
    yield from in_order(data, workers=workers)

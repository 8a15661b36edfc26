"""Batches for training and for evaluation."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from leanclip.data.batch import Batch
from leanclip.data.decode import decode_image, training_sample
from leanclip.data.order import epoch_batches
from leanclip.data.shards import Shards
from leanclip.errors import UserError


class TrainingLoader:
    """The training batches of each epoch. Where it stands is (epoch, step), and going there reads nothing."""

    def __init__(
        self,
        shards: Shards,
        ids: Sequence[int] | np.ndarray,
        *,
        batch: int,
        transform: Callable[..., Tensor],
        tokenizer: Callable[..., Tensor],
        seed: int,
        workers: int,
        pin_memory: bool,
    ) -> None:
        self.ids = np.asarray(ids, dtype=np.int64)
        if len(self.ids) < batch:
            raise UserError(
                f"{len(self.ids)} training samples do not fill one batch of {batch}; give a smaller --batch-size"
            )
        self.batch, self.seed = batch, seed
        self._steps = _Steps()
        self._loader = DataLoader(
            _Augmented(shards, transform, tokenizer, seed),
            batch_sampler=self._steps,
            num_workers=workers,
            collate_fn=_collate,
            pin_memory=pin_memory,
            persistent_workers=workers > 0,
            prefetch_factor=4 if workers else None,
            generator=torch.Generator(),  # else every epoch would draw a seed from the model's random numbers
        )

    @property
    def steps_per_epoch(self) -> int:
        return len(self.ids) // self.batch

    def epoch(self, epoch: int, *, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from step `start` on."""
        self._steps.batches = islice(epoch_batches(self.ids, self.batch, seed=self.seed, epoch=epoch), start, None)
        self._steps.epoch = epoch
        for batch in self._loader:
            if isinstance(batch, UserError):
                raise batch
            yield batch


class _Steps(Sampler):
    """The batches of the current epoch; set anew for each, so that the workers live on."""

    def __init__(self) -> None:
        self.batches: Iterator[np.ndarray] = iter(())
        self.epoch = 0

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for ids in self.batches:
            yield [(self.epoch, index) for index in ids.tolist()]


class _Augmented(Dataset):
    def __init__(
        self, shards: Shards, transform: Callable[..., Tensor], tokenizer: Callable[..., Tensor], seed: int
    ) -> None:
        self.shards, self.transform, self.tokenizer, self.seed = shards, transform, tokenizer, seed

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, Tensor, int] | UserError:
        epoch, index = key
        try:
            image, tokens = training_sample(
                self.shards, index, self.transform, self.tokenizer, seed=self.seed, epoch=epoch
            )
        except UserError as error:
            return error  # raised in a worker it would come back as a page of traceback
        return image, tokens, index


def _collate(samples: list[tuple[Tensor, Tensor, int] | UserError]) -> Batch | UserError:
    good = [sample for sample in samples if not isinstance(sample, UserError)]
    if len(good) < len(samples):
        return next(sample for sample in samples if isinstance(sample, UserError))
    images, tokens, ids = zip(*good, strict=True)
    return Batch(images=torch.stack(images), tokens=torch.stack(tokens), sample_ids=torch.tensor(ids))


class _Images(Dataset):
    def __init__(self, shards: Shards, ids: np.ndarray, transform: Callable[..., Tensor]) -> None:
        self.shards, self.ids, self.transform = shards, ids, transform

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Tensor:
        return self.transform(decode_image(self.shards, int(self.ids[index])))


def evaluation_images(
    shards: Shards, ids: np.ndarray, transform: Callable[..., Tensor], *, batch: int, workers: int
) -> Iterator[Tensor]:
    """The images in order, preprocessed as at inference."""
    loader = DataLoader(
        _Images(shards, ids, transform), batch_size=batch, num_workers=workers, generator=torch.Generator()
    )
    yield from loader

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
from leanclip.data.source import BrokenSample, Source
from leanclip.errors import UserError


class TrainingLoader:
    """The training batches of each epoch. Where it stands is (epoch, step), and going there reads nothing.

    `batch` is the global batch; `share` the slice of every one that this process reads, by default all of it.
    """

    def __init__(
        self,
        source: Source,
        ids: Sequence[int] | np.ndarray,
        *,
        batch: int,
        share: slice | None = None,
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
        self.share = slice(0, batch) if share is None else share
        self._steps = _Steps()
        self._loader = DataLoader(
            _Augmented(source, transform, tokenizer, seed),
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
        batches = epoch_batches(self.ids, self.batch, seed=self.seed, epoch=epoch)
        self._steps.batches = (batch[self.share] for batch in islice(batches, start, None))
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
        self, source: Source, transform: Callable[..., Tensor], tokenizer: Callable[..., Tensor], seed: int
    ) -> None:
        self.source, self.transform, self.tokenizer, self.seed = source, transform, tokenizer, seed

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, Tensor, int] | UserError:
        epoch, index = key
        try:
            image, tokens = training_sample(
                self.source, index, self.transform, self.tokenizer, seed=self.seed, epoch=epoch
            )
        except BrokenSample as error:
            return UserError(f"{error}; remove it")
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
    def __init__(self, source: Source, ids: np.ndarray, transform: Callable[..., Tensor]) -> None:
        self.source, self.ids, self.transform = source, ids, transform

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Tensor:
        return self.transform(decode_image(self.source, int(self.ids[index])))


def evaluation_images(
    source: Source, ids: np.ndarray, transform: Callable[..., Tensor], *, batch: int, workers: int
) -> Iterator[Tensor]:
    """The images in order, preprocessed as at inference."""
    loader = DataLoader(
        _Images(source, ids, transform), batch_size=batch, num_workers=workers, generator=torch.Generator()
    )
    yield from loader

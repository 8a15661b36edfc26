"""Batches for training and for evaluation."""

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from leanclip.data.batch import Batch
from leanclip.data.broken import EXAMPLES
from leanclip.data.decode import Transform, naming, training_sample
from leanclip.data.order import Once, Order, Shuffle, Visits, sample_seed
from leanclip.data.source import BrokenSample, Source
from leanclip.errors import UserError

PREFETCH = 2  # batches per worker
LOOK = 1.0  # seconds between a worker's looks at whether its parent lives


class TrainingLoader:
    """The training batches of each epoch. Where it stands is (epoch, step), and going there reads nothing.

    `batch` is the global batch; `share` the slice of every one that this process reads, by default all of it.
    `end_of_text` finds the lengths of tokenised texts, for models that run them without padding.
    """

    def __init__(
        self,
        source: Source,
        ids: Sequence[int] | np.ndarray | Visits,
        *,
        batch: int,
        share: slice | None = None,
        transform: Transform,
        tokenizer: Callable[..., Tensor],
        seed: int,
        workers: int,
        pin_memory: bool,
        shuffle: Shuffle = "all",
        end_of_text: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        visits = ids if isinstance(ids, Visits) else Once(ids)
        if len(visits) < batch:
            raise UserError(
                f"{len(visits)} training samples do not fill one batch of {batch}; give a smaller --batch-size"
            )
        self.batch = batch
        self.order = Order(visits, batch=batch, seed=seed, shuffle=shuffle)
        self._steps = _Steps()
        steps = _TrainingSteps(
            source, self.order, slice(0, batch) if share is None else share, transform, tokenizer, seed, end_of_text
        )
        self._loader = _data_loader(
            steps, sampler=self._steps, workers=workers, pin_memory=pin_memory, persistent_workers=workers > 0
        )

    @property
    def steps_per_epoch(self) -> int:
        return self.order.steps

    def epoch(self, epoch: int, *, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from step `start` on."""
        self._steps.steps = [(epoch, step) for step in range(start, self.steps_per_epoch)]
        for batch in self._loader:
            if isinstance(batch, UserError):
                raise batch
            yield batch


class _Loader(DataLoader):
    """torch's loader, which knows better than its user how many workers to have, without that."""

    def check_worker_number_rationality(self) -> None:
        pass


class _Steps(Sampler):
    """The steps of the current epoch; set anew for each, so that the workers live on."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)


@dataclass(frozen=True)
class _TrainingSteps(Dataset):
    """(epoch, step) -> this process's share of the global batch."""

    source: Source
    order: Order
    share: slice
    transform: Transform
    tokenizer: Callable[..., Tensor]
    seed: int
    end_of_text: Callable[[Tensor], Tensor] | None  # from tokens to the lengths of the texts

    def __getitem__(self, key: tuple[int, int]) -> Batch | UserError:
        try:
            return self._batch(*key)
        except UserError as error:
            return error  # raised in a worker it would come back as a page of traceback

    def _batch(self, epoch: int, step: int) -> Batch:
        ids, copies = self.order.batch_ids(epoch, step)
        images, captions, taken = [], [], []
        broken: Counter[str] = Counter()
        examples: list[str] = []
        self.source.expect([index for index in ids[self.share].tolist() if index >= 0])
        for slot in range(*self.share.indices(self.order.batch)):
            for index, copy in self._candidates(epoch, step, slot, int(ids[slot]), int(copies[slot])):
                seed = sample_seed(self.seed, epoch, index, copy)
                try:
                    image, caption = training_sample(self.source, index, self.transform, seed=seed)
                except BrokenSample as error:
                    broken[error.kind] += 1
                    if len(examples) < EXAMPLES:
                        examples.append(str(error))
                    continue
                images.append(image)
                captions.append(caption)
                taken.append(index)
                break
            else:
                raise UserError(
                    f"no sample is left to stand in for a broken one ({'; '.join(examples)}): "
                    "remove the broken samples, or give a smaller --batch-size"
                )
        tokens = self.tokenizer(captions) if captions else torch.empty(0, dtype=torch.int64)
        return Batch(
            images=torch.stack(images) if images else torch.empty(0, dtype=torch.uint8),
            tokens=tokens,
            sample_ids=torch.tensor(taken, dtype=torch.int64),
            lengths=self.end_of_text(tokens) if captions and self.end_of_text is not None else None,
            broken=dict(broken),
            examples=tuple(examples),
        )

    def _candidates(self, epoch: int, step: int, slot: int, index: int, copy: int) -> Iterator[tuple[int, int]]:
        if index >= 0:
            yield index, copy
        for other in self.order.replacements(epoch, step, slot):
            yield other, 0


@dataclass(frozen=True)
class EvaluationBatch:
    """Some held-out samples that are whole, with all their captions."""

    ids: list[int]
    images: Tensor  # (b, 3, H, W) uint8
    captions: list[list[str]]
    broken: list[BrokenSample]


@dataclass(frozen=True)
class _EvaluationBatches(Dataset):
    source: Source
    ids: np.ndarray
    transform: Transform
    batch: int

    def __len__(self) -> int:
        return -(-len(self.ids) // self.batch)

    def __getitem__(self, number: int) -> EvaluationBatch | UserError:
        kept, images, captions, broken = [], [], [], []
        for index in self.ids[number * self.batch : (number + 1) * self.batch].tolist():
            try:
                texts, content = self.source.captions(index), self.source.image_bytes(index)
                with naming(self.source, index):
                    images.append(self.transform(content, None))
            except BrokenSample as error:
                broken.append(error)
            except UserError as error:
                return error
            else:
                kept.append(index)
                captions.append(texts)
        return EvaluationBatch(kept, torch.stack(images) if images else torch.empty(0), captions, broken)


def evaluation_batches(
    source: Source, ids: np.ndarray, transform: Transform, *, batch: int, workers: int
) -> Iterator[EvaluationBatch]:
    """The samples in order, preprocessed as at inference. Broken ones are left out and told."""
    for found in _data_loader(_EvaluationBatches(source, ids, transform, batch), workers=workers, pin_memory=False):
        if isinstance(found, UserError):
            raise found
        yield found


def _data_loader(data: Dataset, *, workers: int, **options: Any) -> DataLoader:
    """torch's loader with one whole batch as its unit."""
    return _Loader(
        data,
        batch_size=None,
        num_workers=workers,
        prefetch_factor=PREFETCH if workers else None,
        collate_fn=_unchanged,
        worker_init_fn=_start_worker,
        generator=torch.Generator(),  # else every epoch would draw a seed from the model's random numbers
        **options,
    )


def _unchanged(batch: Any) -> Any:
    return batch


def _start_worker(_: int) -> None:
    """The processes are the parallelism. What tells the run to stop is for the process that trains, not for these."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if hasattr(signal, "sigtimedwait"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()


def _end_with_parent(parent: int) -> None:
    """At its word: SLURM sends SIGTERM to everybody, and a launcher hands it on; only the parent's is meant for a
    worker. Or with it: a worker that sends what nobody receives any more would stay for ever, and keep its parent's
    connections open, so that other ranks wait for one that is dead."""
    while True:
        told = signal.sigtimedwait({signal.SIGTERM}, LOOK)
        if os.getppid() != parent or (told is not None and told.si_pid == parent):
            os._exit(0)

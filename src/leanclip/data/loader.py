"""Batches for training and for evaluation."""

import contextlib
import functools
import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import signal_handling

from leanclip.data.batch import Batch
from leanclip.data.crops.ring import PART, CropParts, CropRing, RingReader, SlotWriter
from leanclip.data.decode import TrainingTransform, Transform, pixels_of_sample, view_of_sample
from leanclip.data.feature_table import NO_FEATURES, Features, FeatureTable
from leanclip.data.order import Order, Shuffle, Visits, WeightedVisits, caption_draws, sample_seed
from leanclip.data.source import MAX_EXAMPLES, BrokenSample, Source, group_of, weight_of
from leanclip.errors import UserError, first_line

PREFETCH_BATCHES = 2  # per worker
PARENT_POLL_SECONDS = 1.0
T = TypeVar("T")


class TrainingLoader:
    """The training batches of each epoch. Its position is (epoch, step), and it can start at any without reading.

    `visits` defaults to the parts of the source. `batch` is the global batch size, `share` the slice of each
    global batch that this process reads, by default all of it. `end_of_text` maps tokens to caption lengths, for
    models that skip the padding. `features` of locked towers are read in the place of images or captions.
    `group_key` and `weight_key` name fields of the samples' metadata. `captions_of` is the sample whose captions each
    one gets, by default its own. With `number_captions` a batch says which of its sample's captions each one is.
    With `resize_on`, workers only decode, and this device resizes.
    """

    def __init__(
        self,
        source: Source,
        visits: Visits | None = None,
        *,
        batch: int,
        share: slice | None = None,
        transform: TrainingTransform,
        tokenizer: Callable[..., Tensor],
        seed: int,
        workers: int,
        pin_memory: bool,
        resize_on: torch.device | None = None,
        shuffle: Shuffle = "all",
        end_of_text: Callable[[Tensor], Tensor] | None = None,
        features: Features = NO_FEATURES,
        group_key: str | None = None,
        weight_key: str | None = None,
        captions_of: np.ndarray | None = None,
        number_captions: bool = False,
    ) -> None:
        visits = WeightedVisits(source.parts) if visits is None else visits
        if len(visits) < batch:
            raise UserError(
                f"{len(visits)} training samples do not fill a batch of {batch}; give a smaller --global-batch-size",
                code="data.too_few_samples",
            )
        self.batch = batch
        self.order = Order(visits, batch=batch, seed=seed, shuffle=shuffle)
        self._steps: list[tuple[int, int]] = []  # of the current epoch; replaced in place, so that the workers stay
        share = slice(0, batch) if share is None else share
        self._parts = ring = None
        if resize_on is not None and features.images is None:
            count = len(range(batch)[share])
            ring = CropRing(transform.size, workers=workers, samples=max(1, min(PART, count)))
            self._parts = CropParts(RingReader(ring, resize_on), self._steps, count, PREFETCH_BATCHES * workers)
        self._batches = _TrainingBatches(
            source, self.order, share, transform if ring is None else transform.crop, tokenizer, seed, end_of_text,
            features, group_key, weight_key, captions_of, number_captions, ring,
        )  # fmt: skip
        quick = all(table is not None and table.quick for table in features)
        self.chunked = self._batches.only_tables and (quick or not workers)
        self.workers, self.pin_memory = 0 if self.chunked else workers, pin_memory
        self._loader = _data_loader(
            self._batches,
            sampler=self._steps if self._parts is None else self._parts,
            workers=self.workers,
            pin_memory=pin_memory and ring is None,
            persistent_workers=self.workers > 0,
        )

    @property
    def resizes_on_gpu(self) -> bool:
        return self._parts is not None

    @property
    def steps_per_epoch(self) -> int:
        return self.order.steps

    def epoch(self, epoch: int, *, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from step `start` on."""
        steps = range(start, self.steps_per_epoch)
        if not self.chunked:
            self._steps[:] = [(epoch, step) for step in steps]
            if self._parts is None:
                yield from _raise_errors(self._loader)
                return
            self._parts.reader.wait()
            for batch in self._parts.joined(_raise_errors(self._loader)):
                yield batch.pin_memory() if self.pin_memory else batch
            return
        at_once = min(table.at_once for table in self._batches.features if table is not None)
        chunk = max(1, at_once // self.batch)
        for first in range(0, len(steps), chunk):  # worker processes would take longer
            yield from self._batches.batches(epoch, steps[first : first + chunk], pin_memory=self.pin_memory)


class _Loader(DataLoader):
    """torch's loader without its warning about the number of workers, and with one line for a worker that died."""

    def __iter__(self) -> Any:
        batches = super().__iter__()
        handler = signal.getsignal(signal.SIGCHLD)  # torch's raises wherever the main thread is
        wrapped = hasattr(handler, "__wrapped__")  # by an epoch before
        if getattr(handler, "__module__", None) == signal_handling.__name__ and callable(handler) and not wrapped:
            with contextlib.suppress(ValueError):  # in another thread, where the queue of batches reports it
                signal.signal(signal.SIGCHLD, _dead_workers_in_one_line()(handler))
        return batches

    def check_worker_number_rationality(self) -> None:
        pass


@dataclass(frozen=True)
class _TrainingBatches(Dataset):
    """Maps (epoch, step) to this process's share of the global batch; with a ring (epoch, step, part, slot) to a part
    of it, whose `images` say where the crops are in the slot."""

    source: Source
    order: Order
    share: slice
    transform: Transform
    tokenizer: Callable[..., Tensor]
    seed: int
    end_of_text: Callable[[Tensor], Tensor] | None  # from tokens to caption lengths
    features: Features
    group_key: str | None
    weight_key: str | None
    captions_of: np.ndarray | None
    number_captions: bool
    ring: CropRing | None
    slot: int = 0

    def __getitem__(self, key: tuple[int, ...]) -> Batch:
        epoch, step, *place = key
        data = self
        if self.ring is not None:
            part, slot = place
            places = range(self.order.batch)[self.share][part * PART : (part + 1) * PART]
            data = replace(self, share=slice(places.start, places.stop), slot=slot)
        return data.batches(epoch, range(step, step + 1))[0]

    @property
    def only_tables(self) -> bool:
        """Whether the source is not read at all."""
        return None not in self.features and self.group_key is None and self.weight_key is None

    def batches(self, epoch: int, steps: range, *, pin_memory: bool = False) -> list[Batch]:
        """Of consecutive steps. What tables hold is read for all samples at once, after broken ones are replaced."""
        ids, copies = (values[:, self.share] for values in self.order.batch_ids(epoch, steps))
        images, texts = self.features
        unread = np.ones(ids.shape, bool)
        if self.only_tables and images is not None and texts is not None:
            unread = (ids < 0) | images.broken(ids) | texts.broken(self._owners(ids))
        read = [self._read(epoch, *step) for step in zip(steps, ids, copies, unread, strict=True)]

        def by_step(values: Tensor) -> Sequence[Tensor]:
            return (values.pin_memory() if pin_memory else values).unbind()

        image_rows = text_rows = numbers = [None] * len(steps)
        if images is not None:
            image_rows = by_step(images.take(images.views(ids, epoch + copies)))
        if texts is not None:
            draws = caption_draws(self.seed, epoch, ids, copies)
            drawn = texts.drawn(self._owners(ids), draws)
            text_rows = by_step(texts.take(drawn))
            if self.number_captions:
                numbers = by_step(torch.from_numpy(drawn - texts.first[self._owners(ids)]))
        rows = zip(read, by_step(torch.from_numpy(ids)), image_rows, text_rows, numbers, strict=True)
        return [self._batch(*step) for step in rows]

    def _batch(
        self, read: "_Contents", sample_ids: Tensor, images: Tensor | None, tokens: Tensor | None,
        numbers: Tensor | None,
    ) -> Batch:  # fmt: skip
        lengths = None
        if images is None and isinstance(read.images, SlotWriter):
            images = torch.tensor(read.images.layout, dtype=torch.int64)
        elif images is None:
            images = stacked(read.images)
        if tokens is None:
            tokens = self.tokenizer(read.captions) if read.captions else torch.empty(0, dtype=torch.int64)
            lengths = self.end_of_text(tokens) if read.captions and self.end_of_text is not None else None
            numbers = torch.tensor(read.numbers, dtype=torch.int64) if self.number_captions else None
        return Batch(
            images=images,
            tokens=tokens,
            sample_ids=sample_ids,
            groups=None if self.group_key is None else torch.tensor(read.groups, dtype=torch.int64),
            weights=None if self.weight_key is None else torch.tensor(read.weights, dtype=torch.float32),
            caption_numbers=numbers,
            lengths=lengths,
            broken=dict(read.broken),
            examples=tuple(read.examples),
        )

    def _owners(self, ids: np.ndarray) -> np.ndarray:
        """The samples whose captions they get."""
        return ids if self.captions_of is None else self.captions_of[ids]

    def _read(self, epoch: int, step: int, ids: np.ndarray, copies: np.ndarray, unread: np.ndarray) -> "_Contents":
        """What unread samples have beside their features. Broken ones are replaced, in `ids` and `copies` too."""
        images = [] if self.ring is None else SlotWriter(self.ring, self.slot, len(ids))
        contents, start = _Contents(images), self.share.indices(self.order.batch)[0]
        if None in self.features:  # what the tables do not hold is read from the source
            self.source.prefetch([index for index in ids.tolist() if index >= 0])
        for place in np.flatnonzero(unread).tolist():
            sample = [(int(ids[place]), int(copies[place]))] if ids[place] >= 0 else []
            replacements = ((index, 0) for index in self.order.replacements(epoch, step, start + place))
            for index, copy in chain(sample, replacements):
                try:
                    self._add_sample(contents, epoch, index, copy)
                except BrokenSample as error:
                    contents.broken[error.kind] += 1
                    if len(contents.examples) < MAX_EXAMPLES:
                        contents.examples.append(str(error))
                else:
                    ids[place], copies[place] = index, copy
                    break
            else:
                raise UserError(
                    f"no sample is left to replace a broken one ({'; '.join(contents.examples)}); remove the"
                    " broken samples, or give a smaller --global-batch-size",
                    code="data.no_replacement",
                )
        return contents

    def _add_sample(self, contents: "_Contents", epoch: int, index: int, copy: int) -> None:
        """Read a sample; one that is broken adds nothing."""
        source, (images, texts) = self.source, self.features
        group = None if self.group_key is None else group_of(source, index, self.group_key)
        weight = None if self.weight_key is None else weight_of(source, index, self.weight_key)
        visit, copies = np.array([index]), np.array([copy])
        (owner,) = self._owners(visit).tolist()
        caption = number = image = None
        if texts is None:
            caption, number = source.caption(owner, float(caption_draws(self.seed, epoch, visit, copies)[0]))
        else:
            texts.rows(owner)
        if images is None:
            seed = sample_seed(self.seed, epoch, index, copy)
            image = view_of_sample(source, index, self.transform, seed=seed)
        else:
            images.rows(index)
        lists = contents.images, contents.captions, contents.numbers, contents.groups, contents.weights
        for values, value in zip(lists, (image, caption, number, group, weight), strict=True):
            if value is not None:
                values.append(value)


@dataclass(frozen=True)
class _Contents:
    """What was read of the samples of a batch from the source, and which of them were replaced."""

    images: Any  # a list, or a SlotWriter
    captions: list[Any] = field(default_factory=list)
    numbers: list[Any] = field(default_factory=list)  # of the captions
    groups: list[Any] = field(default_factory=list)
    weights: list[Any] = field(default_factory=list)
    broken: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)


class EvaluationBatch(NamedTuple):
    """Held-out samples with all their captions, and the samples that could not be read."""

    ids: list[int]
    images: Tensor  # (b, 3, H, W) uint8, or (b, D) features of a locked tower
    captions: list[list[str]]
    broken: list[BrokenSample]


def evaluation_batches(
    source: Source,
    ids: np.ndarray,
    transform: Transform,
    *,
    batch: int,
    workers: int,
    features: FeatureTable | None = None,
) -> Iterator[EvaluationBatch]:
    """The samples in order, preprocessed as for inference, or with the features of their images."""
    read = functools.partial(_evaluation_batch, source, transform, features)
    return in_parts(read, ids, batch, workers=workers)


def _evaluation_batch(
    source: Source, transform: Transform, features: FeatureTable | None, ids: list[int]
) -> EvaluationBatch:
    def read(index: int) -> tuple[list[str], Tensor]:
        captions = source.captions(index)
        if features is not None:  # autocast stacks no float16
            return captions, torch.from_numpy(features.rows(index)[0].astype(np.float32))
        return captions, pixels_of_sample(source, index, transform)

    samples, broken = read_each(read, ids)
    images = stacked(image for _, image in samples.values())
    return EvaluationBatch(list(samples), images, [captions for captions, _ in samples.values()], [*broken.values()])


def read_each(read: Callable[[int], T], ids: Iterable[int]) -> tuple[dict[int, T], dict[int, BrokenSample]]:
    """What `read` gives of every sample, and the samples that are broken."""
    values, broken = {}, {}
    for index in ids:
        try:
            values[index] = read(index)
        except BrokenSample as error:
            broken[index] = error
    return values, broken


def stacked(images: Iterable[Tensor]) -> Tensor:
    parts = list(images)
    return torch.stack(parts) if parts else torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True)
class _Parts(Dataset):
    function: Callable[[list[int]], Any]
    ids: np.ndarray
    size: int

    def __len__(self) -> int:
        return -(-len(self.ids) // self.size)

    def __getitem__(self, number: int) -> Any:
        return self.function(self.ids[number * self.size : (number + 1) * self.size].tolist())


def in_parts(
    function: Callable[[list[int]], T], ids: np.ndarray, size: int, *, workers: int, pin_memory: bool = False
) -> Iterator[T]:
    """`function` of so many ids at a time, in their order, computed by worker processes."""
    yield from _raise_errors(_data_loader(_Parts(function, ids, size), workers=workers, pin_memory=pin_memory))


@contextlib.contextmanager
def _dead_workers_in_one_line() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise UserError(
            f"a process that loads data was killed ({first_line(error)}); if the memory was full, give fewer"
            " --workers; continue with --resume latest",
            code="data.worker_killed",
        ) from error


def _raise_errors(batches: Iterable[Any]) -> Iterator[Any]:
    with _dead_workers_in_one_line():
        for batch in batches:
            if isinstance(batch, UserError):
                raise batch
            yield batch


@dataclass(frozen=True)
class _ReturningErrors(Dataset):
    """Whole batches, or the UserError of reading one: raised in a worker, it would arrive with a traceback."""

    data: Dataset

    def __len__(self) -> int:
        return len(self.data)  # pyright: ignore[reportArgumentType]

    def __getitem__(self, key: Any) -> Any:
        try:
            return self.data[key]
        except UserError as error:
            return error


def _data_loader(data: Dataset, *, workers: int, **options: Any) -> DataLoader:
    """torch's loader over a data set whose items are whole batches."""
    return _Loader(
        _ReturningErrors(data),
        batch_size=None,
        num_workers=workers,
        prefetch_factor=PREFETCH_BATCHES if workers else None,
        worker_init_fn=_start_worker,
        generator=torch.Generator(),  # the default one would advance the random state of the model
        **options,
    )


def _start_worker(_: int) -> None:
    torch.set_num_threads(1)  # the worker processes are the parallelism
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the training process handles requests to stop
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if hasattr(signal, "sigtimedwait"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """Exit on the parent's SIGTERM, not on that of SLURM or a launcher, which send it to every process; and exit when
    the parent dies. A worker blocked in sending a batch would otherwise live on and keep copies of the parent's
    connections open, so that other ranks would wait for a dead one."""
    parent, system_parent = multiprocessing.parent_process(), os.getppid()  # the second may be a fork server
    assert parent is not None
    while True:
        received = signal.sigtimedwait({signal.SIGTERM}, PARENT_POLL_SECONDS)
        ended = os.getppid() != system_parent or not parent.is_alive()
        if ended or (received is not None and received.si_pid == parent.pid):
            os._exit(0)

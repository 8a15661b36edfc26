"""What fits on a GPU, and which way of running a step is the fastest that does: all from traced steps."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from leanclip.planning import Card, Network
from leanclip.planning.step_prediction import Predicted, predict_step
from leanclip.runs.config import TrainConfig
from leanclip.training.model_setup import model_for_run, tower_depth

USED = 0.92  # of the memory: the allocator needs room to move, CUDA and NCCL take some for themselves
LITTLE = (512, 128, 32, 8)  # samples of a micro-batch that leaves half of the free memory to the batch
BUCKET = 25 << 20  # bytes of the last gradients, whose averaging nothing hides
Tell = Callable[[str], None]
"""Hears what is being done now, for whoever waits."""


def silent(_: str) -> None:
    pass


@dataclass
class Search:
    """Steps of one configuration in different micro-batches; each is traced once."""

    config: TrainConfig
    samples: int
    ranks: int
    capability: tuple[int, int]
    processors: int
    caption_length: float | None = None
    tell: Tell = silent

    def __post_init__(self) -> None:
        self.known: dict[int, Predicted] = {}

    @property
    def share(self) -> int:
        assert self.config.data.global_batch_size is not None
        return -(-self.config.data.global_batch_size // self.ranks)

    def step(self, micro: int) -> Predicted:
        parts = -(-self.share // micro)
        if parts not in self.known:
            self.tell(f"tracing a step of {self.config.model.model}, {self._way(parts)}")
            self.known[parts] = predict_step(
                self.config,
                samples=self.samples,
                ranks=self.ranks,
                parts=parts,
                capability=self.capability,
                processors=self.processors,
                caption_length=self.caption_length,
            )
        return self.known[parts]

    def _way(self, parts: int) -> str:
        size = f"micro-batch {-(-self.share // parts):,} of {self.share:,}" if parts > 1 else f"batch {self.share:,}"
        recomputed = self.config.parallel.grad_checkpointing
        number = "all" if recomputed is True else recomputed
        return f"{size}, {number} blocks recomputed" if recomputed else size

    def largest(self, room: int) -> int:
        """The largest micro-batch that needs no more than `room` bytes, in whole eights where there are; 0 for none.

        The whole share's trace says what a sample needs; the guess that follows from it is traced, and lowered until
        it fits.
        """
        whole = self.step(self.share)
        if whole.needed <= room:
            return self.share
        activations = whole.memory["activations"]
        fixed = whole.needed - activations - whole.memory["gradients"] + whole.trained_bytes
        micro = min(self.share - 1, int((room - fixed) / max(1.0, activations / self.share)))
        while micro >= 1:
            micro = micro if micro < 8 else micro - micro % 8
            needed = self.step(micro).needed
            if needed <= room:
                return micro
            micro = min(micro - 1, int(micro * max(0.0, room - fixed) / (needed - fixed)))
        return 0


@dataclass(frozen=True, kw_only=True)
class Option:
    """One way of running a step that fits."""

    config: TrainConfig  # as it would be run
    micro: int
    predicted: Predicted
    ranks: int
    compute: float  # seconds
    communication: float  # seconds in all
    exposed: float  # of those, what the backward pass does not hide

    @property
    def seconds(self) -> float:
        return self.compute + self.exposed

    @property
    def samples_per_second(self) -> float:
        assert self.config.data.global_batch_size is not None
        return self.config.data.global_batch_size / self.seconds


def options(
    config: TrainConfig,
    *,
    samples: int,
    ranks: int,
    card: Card,
    network: Network,
    room: int,
    caption_length: float | None = None,
    tell: Tell = silent,
) -> Iterator[Option]:
    """The ways that fit: the whole share at once, recomputing no more blocks than it must, or in micro-batches."""

    @lru_cache(None, typed=True)  # True is not 1 here
    def search(recomputed: bool | int) -> Search:
        tried = replace(config, parallel=replace(config.parallel, grad_checkpointing=recomputed))
        return Search(tried, samples, ranks, card.capability, card.processors, caption_length, tell)

    def option(found: Search, micro: int) -> Option:
        return timed(found.config, found.step(micro), micro=micro, ranks=ranks, card=card, network=network)

    given = config.parallel.grad_checkpointing
    least, all_blocks = search(given), search(True)
    micro = min(config.parallel.micro_batch or least.largest(room), least.share)
    if micro >= 1 and least.step(micro).needed <= room:
        yield option(least, micro)
    if given or (micro == least.share and least.step(micro).needed <= room):
        return  # recomputing can only be slower
    micro = min(config.parallel.micro_batch or all_blocks.largest(room), all_blocks.share)
    if micro < 1 or all_blocks.step(micro).needed > room:
        return
    fewer = _fewest(search, micro, room)
    yield option(all_blocks if fewer is None else fewer, micro)


def _fewest(search: Callable[[bool | int], Search], micro: int, room: int) -> Search | None:
    """The search with the fewest recomputed blocks that lets a micro-batch fit; None where it takes all of them.

    Each block saves about as much as another.
    """
    none, most = search(False), search(True)
    blocks = tower_depth(model_for_run(none.config, shapes_only=True))
    if blocks is None:
        return None
    above = none.step(micro).needed - room
    saved = none.step(micro).peak - most.step(micro).peak
    for number in range(max(1, math.floor(blocks * above / max(1, saved))), blocks):
        if (found := search(number)).step(micro).needed <= room:
            return found
    return None


def timed(
    config: TrainConfig, predicted: Predicted, *, micro: int, ranks: int, card: Card, network: Network
) -> Option:
    """The loss's collectives stand between the passes; the gradients' run beside the last backward pass, all but the
    last bucket."""
    gathered = sum(entry.bytes for purpose, entry in predicted.sent.volumes.items() if purpose not in SUMMED)
    summed = [entry for purpose, entry in predicted.sent.volumes.items() if purpose in SUMMED]
    loss = network.gather(gathered, ranks) + sum(network.sum(entry.bytes, ranks) for entry in summed)
    gradients = network.sum(predicted.trained_bytes, ranks)
    if config.parallel.fsdp:
        gradients += predicted.parts * 2 * network.gather(predicted.trained_bytes, ranks)
    hidden = card.times(predicted.kernels).get("backward", 0.0) / predicted.parts
    last = network.sum(min(BUCKET, predicted.trained_bytes), ranks)
    return Option(
        config=config,
        micro=micro,
        predicted=predicted,
        ranks=ranks,
        compute=card.step(predicted),
        communication=loss + gradients,
        exposed=loss + max(last, gradients - hidden),
    )


SUMMED = ("state", "sums", "batch norm")


def largest_batch(
    config: TrainConfig,
    *,
    samples: int,
    ranks: int,
    card: Card,
    room: int,
    caption_length: float | None = None,
    tell: Tell = silent,
) -> int:
    """The largest global batch, of the data's samples at most, that fits in micro-batches; 0 for none.

    In whole multiples of 1,024 for each rank.

    Micro-batches make activations a matter of choice: what grows with the batch is its pixels, the embeddings and the
    loss. Two small batches give the line, and the result is traced too.
    """

    def step(share: int, micro: int) -> Predicted:
        tried = replace(config, data=replace(config.data, global_batch_size=share * ranks))
        return Search(tried, samples, ranks, card.capability, card.processors, caption_length, tell).step(micro)

    unit = 1024
    sizes = (config.parallel.micro_batch,) if config.parallel.micro_batch else LITTLE
    micro, first = sizes[-1], step(unit, sizes[-1])
    if first.needed > room:
        return 0
    for size in sizes[:-1]:
        tried = step(unit, size)
        activations = tried.memory["activations"]
        if activations <= (room - tried.peak + activations) / 2:
            micro, first = size, tried
            break
    each = (step(4 * unit, micro).needed - first.needed) / (3 * unit)
    share = unit + int((room - first.needed) / max(1.0, each))
    share = min(share, max(samples // ranks, unit))  # no batch is larger than the data
    while share > unit:
        share -= share % unit
        found = step(share, micro).needed
        if found <= room:
            break
        share = min(share - unit, int(share * room / found))
    return max(share, unit) * ranks

"""What fits on a GPU, and which way of running a step is the fastest that does: all from traced steps."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from leanclip.models import is_resnet
from leanclip.planning.gpu_model import GpuModel
from leanclip.planning.network import NETWORKS, Network
from leanclip.planning.step_prediction import Predicted, predict_step
from leanclip.runs.config import TrainConfig
from leanclip.runs.defaults import interpolated
from leanclip.training.model_setup import model_for_run, tower_depth

USABLE = 0.92  # of the memory: the allocator cannot fill every gap, CUDA and NCCL take some for themselves
SMALL_MICRO_BATCH = 8  # of the largest batch
UNIT = 1024  # samples: a rank's share of the largest batch is a multiple
MOST_TRACES, MOST_SHARE = 7, 1 << 24  # in the search for it, and samples of a rank
LEAST_SHARE, SMALLEST = 64, 128  # samples: of a rank, of a batch that is proposed
BUCKET = 25 << 20  # bytes of the last gradients, whose averaging the backward pass cannot hide
SUMMED = ("state", "sums", "batch norm")  # by an all-reduce; everything else is gathered


def proposed_batch(samples: int, ranks: int) -> int:
    """A global batch: FastCLIP's published one for so many samples, which its losses train well with.

    Every rank gets at least LEAST_SHARE, to use the GPU. An epoch has at least a hundred steps, or a batch SMALLEST.
    """
    batch = max(interpolated(samples).batch, LEAST_SHARE * ranks)
    share = max(1, int(min(batch, max(SMALLEST, samples / 100), samples)) // ranks)
    unit = next(unit for unit in (64, 8, 1) if share >= unit)
    return share // unit * unit * ranks


def share_of(config: TrainConfig, ranks: int) -> int:
    """Samples of one rank."""
    assert config.data.global_batch_size is not None
    return -(-config.data.global_batch_size // ranks)


@dataclass(frozen=True, kw_only=True)
class Option:
    """One way of running a step that fits."""

    config: TrainConfig
    step: Predicted
    ranks: int
    compute: float  # seconds
    communication: float  # seconds in all
    exposed: float  # seconds of communication that the backward pass does not hide

    @property
    def micro_batch(self) -> int:
        return -(-share_of(self.config, self.ranks) // self.step.parts)

    @property
    def seconds(self) -> float:
        return self.compute + self.exposed

    @property
    def samples_per_second(self) -> float:
        return share_of(self.config, 1) / self.seconds


@dataclass(kw_only=True)
class Planner:
    """Steps on `ranks` GPUs of one kind; each is traced once."""

    samples: int
    ranks: int
    gpu: GpuModel
    room: int  # bytes that a step may need
    network: Network = NETWORKS["nvlink"]
    caption_length: float | None = None  # tokens on average; default: as long as the model takes
    report: Callable[[str], object] = lambda doing: None
    """Called with what is being traced, for a status line."""
    traced: dict[tuple[str, ...], Predicted] = field(default_factory=dict)

    def step(self, config: TrainConfig, micro_batch: int) -> Predicted:
        share = share_of(config, self.ranks)
        parts = -(-share // micro_batch)
        key = (str(config), str(parts))
        if key not in self.traced:
            size = f"micro-batch {-(-share // parts):,} of {share:,}" if parts > 1 else f"batch {share:,}"
            self.report(f"tracing a step of {config.model.model}, {size}{_recomputed(config)}")
            self.traced[key] = predict_step(
                config,
                samples=self.samples,
                ranks=self.ranks,
                parts=parts,
                capability=self.gpu.capability,
                processors=self.gpu.processors,
                caption_length=self.caption_length,
            )
        return self.traced[key]

    def fits(self, config: TrainConfig, micro_batch: int) -> bool:
        return micro_batch >= 1 and self.step(config, micro_batch).needed <= self.room

    def _memory_of_a_sample(self, config: TrainConfig) -> tuple[int, float]:
        """Bytes without activations, and activations per sample of a micro-batch, from the trace of the share."""
        share = share_of(config, self.ranks)
        whole = self.step(config, share)
        activations = whole.memory["activations"]
        return whole.needed - activations - whole.memory["gradients"] + whole.trained_bytes, activations / share

    def largest_micro_batch(self, config: TrainConfig) -> int:
        """The largest that fits, a multiple of eight if possible; 0 for none.

        The estimate from the trace of the whole share is traced, and lowered until it fits.
        """
        share = share_of(config, self.ranks)
        if self.fits(config, share):
            return share
        fixed, activations = self._memory_of_a_sample(config)
        micro = min(share - 1, int((self.room - fixed) / max(1.0, activations)))
        while micro >= 1:
            micro = micro if micro < 8 else micro - micro % 8
            if self.fits(config, micro):
                return micro
            needed = self.step(config, micro).needed
            micro = min(micro - 1, int(micro * max(0.0, self.room - fixed) / (needed - fixed)))
        return 0

    def options(self, config: TrainConfig) -> Iterator[Option]:
        """The ways that fit: the whole share at once, recomputing as few blocks as possible, or in micro-batches."""
        share = share_of(config, self.ranks)

        def micro_batch(tried: TrainConfig) -> int:
            return min(config.parallel.micro_batch or self.largest_micro_batch(tried), share)

        micro = micro_batch(config)
        if fits := self.fits(config, micro):
            yield self._option(config, micro)
        assert config.model.model is not None
        if config.parallel.grad_checkpointing or (fits and micro == share) or is_resnet(config.model.model):
            return  # recomputing more can only be slower, and ResNets cannot
        micro = micro_batch(_recomputing(config, True))
        if self.fits(_recomputing(config, True), micro):
            yield self._option(self._fewest_recomputed(config, micro), micro)

    def _fewest_recomputed(self, config: TrainConfig, micro: int) -> TrainConfig:
        """With as few recomputed blocks as let a micro-batch fit. Every block saves about as much as another."""
        everything = _recomputing(config, True)
        blocks = tower_depth(model_for_run(config, shapes_only=True))
        if blocks is None:
            return everything
        fixed, activations = self._memory_of_a_sample(config)
        above = fixed + activations * micro - self.room
        saved = activations * micro - self.step(everything, micro).memory["activations"]
        numbers = range(max(1, math.floor(blocks * above / max(1, saved))), blocks)
        fewer = (_recomputing(config, number) for number in numbers)
        return next((tried for tried in fewer if self.fits(tried, micro)), everything)

    def _option(self, config: TrainConfig, micro: int) -> Option:
        """The loss's collectives run between the passes; the gradients' during the last backward pass, all but the
        last bucket."""
        step, network, ranks = self.step(config, micro), self.network, self.ranks
        volumes = step.sent.volumes.items()
        loss = network.gather(sum(volume.bytes for purpose, volume in volumes if purpose not in SUMMED), ranks)
        loss += sum(network.sum(volume.bytes, ranks) for purpose, volume in volumes if purpose in SUMMED)
        gradients = network.sum(step.trained_bytes, ranks)
        if config.parallel.fsdp:
            gradients += step.parts * 2 * network.gather(step.trained_bytes, ranks)
        hidden = self.gpu.times(step.kernels).get("backward", 0.0) / step.parts
        last = network.sum(min(BUCKET, step.trained_bytes), ranks)
        return Option(
            config=config,
            step=step,
            ranks=ranks,
            compute=self.gpu.step(step),
            communication=loss + gradients,
            exposed=loss + max(last, gradients - hidden),
        )

    def largest_batch(self, config: TrainConfig) -> int:
        """The largest global batch, of the data's samples at most, that fits in small micro-batches; 0 for none.

        Lines through the last two shares lead to the result; the first of them starts at what an empty batch would
        need.
        """
        fixed, activations = self._memory_of_a_sample(config)
        micro = config.parallel.micro_batch or SMALL_MICRO_BATCH
        most = max(1, min(self.samples // self.ranks, MOST_SHARE))
        unit = min(UNIT, most)
        share = share_of(config, self.ranks)
        pixels = max(1.0, 2 * self.step(config, share).memory["batch"] / share)  # in this batch and the next
        needed = {0: fixed + micro * activations}
        last, line = 0, (self.room - needed[0]) / pixels
        while (share := max(unit, min(int(line), most) // unit * unit)) not in needed and len(needed) <= MOST_TRACES:
            data = replace(config.data, global_batch_size=share * self.ranks)
            needed[share] = self.step(replace(config, data=data), micro).needed
            slope = max(pixels, (needed[share] - needed[last]) / (share - last))
            last, line = share, share + (self.room - needed[share]) / slope
        return max((size for size, memory in needed.items() if memory <= self.room), default=0) * self.ranks


def _recomputing(config: TrainConfig, blocks: bool | int) -> TrainConfig:
    return replace(config, parallel=replace(config.parallel, grad_checkpointing=blocks))


def _recomputed(config: TrainConfig) -> str:
    blocks = config.parallel.grad_checkpointing
    return f", {'all' if blocks is True else blocks} blocks recomputed" if blocks else ""

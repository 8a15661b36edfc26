"""Where the time of a step goes: a short real run with a mark at every change of phase, which then stops.

On a GPU the marks are CUDA events, read at the end, so that the profile adds no waiting. A normal run has no marks.
Marks around the wait for a collective give the time that nothing hides: on a GPU its queue stands still between them.
What the same collective takes by itself is measured after the steps; the difference is what the step hides.
"""

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.distributed import GradBucket  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from leanclip.data import Batch
from leanclip.distributed import TRAFFIC_COUNTER, Ranks
from leanclip.evaluation.embed import EvaluationSettings, embed
from leanclip.planning.gpu_model import matrix_rate, seconds
from leanclip.planning.planner import SUMMED
from leanclip.progress import make_table
from leanclip.training.setup import Job
from leanclip.training.step import training_step

PHASES = ("data", "image tower", "text tower", "loss", "backward", "optimizer", "communication")
WARM_UP, STEPS, SECONDS = 3, 20, 30.0
COUNTED = 8  # samples whose arithmetic is counted
GRADIENTS = "parameter gradients"  # the purpose of DDP's collectives


@dataclass(frozen=True, kw_only=True)
class Collectives:
    """Those of one purpose in a step."""

    calls: float
    bytes: float  # of the vectors
    alone: float  # seconds that they take while nothing else runs
    waited: float  # seconds in which the step waits for them, or for a slower process

    @property
    def exposed(self) -> float:
        return min(self.waited, self.alone)

    @property
    def hidden(self) -> float:
        return self.alone - self.exposed


@dataclass(frozen=True, kw_only=True)
class Profile:
    seconds: dict[str, float]  # of a step, by phase
    launching: float  # seconds in which the host prepares a step, up to where it waits for the device
    samples_per_second: float  # of all processes
    flops: float  # per second of this process: three times the towers' forward pass
    matrix_rate: float  # FLOP/s of a large product
    steps: int
    collectives: dict[str, Collectives] = field(default_factory=dict)  # by purpose, of several processes

    @property
    def step(self) -> float:
        return sum(self.seconds.values())

    @property
    def mfu(self) -> float:
        return self.flops / self.matrix_rate

    def share(self, phase: str) -> float:
        return self.seconds[phase] / self.step

    def breakdown(self) -> dict[str, float]:
        """The seconds of a step as the FastCLIP paper divides them."""
        exposed, hidden = (sum(getattr(c, part) for c in self.collectives.values()) for part in ("exposed", "hidden"))
        other = self.seconds["data"] + self.seconds["communication"] - exposed
        computation = self.step - hidden - exposed - other
        return {
            "computation": computation, "communication not hidden": exposed, "overlap": hidden, "other": other
        }  # fmt: skip

    def table(self) -> Table:
        rows = [(phase, f"{self.seconds[phase] * 1e3:,.1f}", f"{self.share(phase):.1%}") for phase in PHASES]
        table = make_table(f"time of a step, mean of {self.steps}", ("phase", "ms", "share"), rows)
        table.add_section()
        table.add_row("total", f"{self.step * 1e3:,.1f}", "100.0%")
        return table

    def communication_table(self) -> Table:
        """What every collective takes, and how much of it the step hides."""
        return make_table(
            "communication in a step",
            ("collective", "calls", "MB", "ms alone", "hidden", "not hidden"),
            [
                (
                    purpose,
                    f"{collectives.calls:,.0f}",
                    f"{collectives.bytes / 1e6:,.2f}",
                    *(f"{1e3 * t:,.1f}" for t in (collectives.alone, collectives.hidden, collectives.exposed)),
                )
                for purpose, collectives in self.collectives.items()
            ],
        )


class StartUp:
    """Where the time before the first step goes: seconds of this process by part, from its start on. Each part begins
    where the one before ends."""

    def __init__(self) -> None:
        self.at = time.monotonic()
        age = process_age()
        self.seconds: dict[str, float] = {} if age is None else {"Python, imports": age}

    def end(self, part: str) -> None:
        now = time.monotonic()
        self.seconds[part], self.at = now - self.at, now

    def table(self) -> Table:
        parts = [(part, f"{seconds:.2f}") for part, seconds in self.seconds.items()]
        table = make_table("until the first step is done", ("part", "s"), parts)
        table.add_section()
        table.add_row("total", f"{sum(self.seconds.values()):.2f}")
        return table


def process_age() -> float | None:
    """Seconds since this process started; none where Linux's /proc does not say."""
    try:
        ticks = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")


class _Marks:
    """From each mark on, time belongs to its phase."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.marks: list[tuple[str, Any]] = []
        self.launching = 0.0  # seconds of the host from the begin of a step to its optimizer

    def enter(self, phase: str) -> None:
        now = time.perf_counter()
        if phase == "optimizer":
            self.launching += now
        elif self.marks and self.marks[-1][0] == "data":
            self.launching -= now
        self._mark(phase)

    def _mark(self, phase: str) -> None:
        mark: Any = torch.cuda.Event(enable_timing=True) if self.cuda else time.perf_counter()
        if self.cuda:
            mark.record()
        self.marks.append((phase, mark))

    @contextlib.contextmanager
    def waiting(self, purpose: str) -> Iterator[None]:
        """Around a wait for a collective, in whichever phase it is."""
        phase = self.marks[-1][0] if self.marks else "data"
        self._mark(purpose)
        yield
        self._mark(phase)

    def follow_loss_backward(self, loss: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """A forward hook of the loss: its own backward pass belongs to it."""
        output.loss.register_hook(lambda gradient: self.enter("loss"))
        for features in args[:2]:
            if features.requires_grad:
                features.register_hook(lambda gradient: self.enter("backward"))

    def average(self, group: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """A communication hook of DDP: what remains of the averaging when all gradients are computed."""
        TRAFFIC_COUNTER.record(GRADIENTS, bucket.buffer().nbytes)
        if bucket.is_last():
            self._mark(GRADIENTS)
        return allreduce_hook(group, bucket)

    def seconds(self) -> Counter[str]:
        """All time from the first mark to the last."""
        if self.cuda:
            torch.cuda.synchronize()
        total: Counter[str] = Counter()
        for (phase, begin), (_, end) in pairwise(self.marks):
            total[phase] += begin.elapsed_time(end) / 1e3 if self.cuda else end - begin
        return total


def profile(job: Job, *, steps: int = STEPS, done: Callable[[str], None] = lambda part: None) -> Profile:
    """Run real steps of a job. What they train is discarded with it. `done` is called after each part of the first
    step."""
    loss, ranks = job.context.loss, job.context.ranks
    if job.data.val is not None:
        settings = EvaluationSettings(
            device=job.device, autocast=job.context.autocast, workers=job.config.data.workers
        )
        embed(job.model, job.data.val, settings, features=job.val_features)
        done("first evaluation")
    job.model.train()
    loss.train()
    batches = _batches(job)
    first = next(batches)
    done("first batch")
    loss.set_epoch(0, 1)
    training_step(job.context, first).loss.item()
    done("first step")
    flops = 3 * _forward_flops(job, first)
    rate = matrix_rate(job.device, torch.bfloat16 if job.context.autocast._enabled else job.dtype)
    marks = _Marks(job.device)
    context = replace(job.context, cuda_graphs=None, phase=marks.enter)  # a CUDA graph has no phases
    loss.register_forward_hook(marks.follow_loss_backward)
    if isinstance(context.towers, DistributedDataParallel):
        context.towers.register_comm_hook(ranks.group, marks.average)
    with TRAFFIC_COUNTER.observed(marks.waiting):
        for batch in (first, *(next(batches) for _ in range(WARM_UP - 1))):
            loss.set_epoch(0, 1)
            training_step(context, batch)
        marks.marks, marks.launching = [], 0.0
        TRAFFIC_COUNTER.clear()
        count, until = 0, time.perf_counter() + SECONDS
        # All processes take as many steps as rank 0 decides, at least one.
        while count < steps and (count == 0 or ranks.broadcast_from_first(lambda: time.perf_counter() < until)):
            marks.enter("data")
            batch = next(batches)
            loss.set_epoch(0, 1)
            training_step(context, batch)
            count += 1
        marks.enter("data")
    total = marks.seconds()
    step = sum(total.values()) / count
    waited = {purpose: total.pop(purpose) / count for purpose in total.keys() - PHASES}
    return Profile(
        seconds={phase: total[phase] / count for phase in PHASES} | {"communication": sum(waited.values())},
        launching=marks.launching / count,
        samples_per_second=job.loader.batch / step,
        flops=flops * len(first) / step,
        matrix_rate=rate,
        steps=count,
        collectives=_collectives(ranks, job.device, waited, count),
    )


def _collectives(
    ranks: Ranks, device: torch.device, waited: Mapping[str, float], steps: int
) -> dict[str, Collectives]:
    """Each purpose's collectives, repeated by themselves: those of one size each, the mean of its calls."""
    measured = {}
    for purpose, (calls, total) in dict(TRAFFIC_COUNTER.volumes).items():
        if purpose in (*SUMMED, GRADIENTS):
            vector = torch.zeros(total // calls // 4, device=device)
            alone = seconds(lambda vector=vector: ranks.sum(vector, purpose="profile"))
        else:
            part = torch.zeros(total // calls // ranks.size, dtype=torch.uint8, device=device)
            alone = seconds(lambda part=part: ranks.gather(part, ranks.size * len(part), purpose="profile"))
        measured[purpose] = Collectives(
            calls=calls / steps, bytes=total / steps, alone=alone * calls / steps, waited=waited[purpose]
        )
    return measured


def _batches(job: Job) -> Iterator[Batch]:
    """Epoch after epoch, on the device."""
    epoch = 0
    while True:
        for batch in job.loader.epoch(epoch):
            yield job.pack(batch.to(job.device, job.dtype))
        epoch += 1


@torch.no_grad()
def _forward_flops(job: Job, batch: Batch) -> float:
    """Of one sample through both towers."""
    job.model.eval()  # keeps the statistics of batch normalisation
    count = min(COUNTED, len(batch))
    with FlopCounterMode(display=False) as counter, job.context.autocast, torch.compiler.set_stance("force_eager"):
        job.model.encode_image(batch.images[:count])
        job.model.encode_text(batch.tokens[:count])
    job.model.train()
    return counter.get_total_flops() / count


def summary(result: Profile, job: Job) -> list[str]:
    """Speed, use of the hardware, and the verdict."""
    parts = ", ".join(f"{part} {time / result.step:.1%}" for part, time in result.breakdown().items())
    unit, name = (1e12, "TFLOP/s") if result.matrix_rate > 1e12 else (1e9, "GFLOP/s")
    return [
        f"{result.samples_per_second:,.0f} samples/s; MFU {result.mfu:.1%}: {result.flops / unit:,.1f} of the"
        f" {result.matrix_rate / unit:,.1f} {name} of a large matrix product on this machine",
        *([parts] if result.collectives else []),
        verdict(result, job),
    ]


def verdict(result: Profile, job: Job) -> str:
    """What bounds the run, and what to change."""
    if result.share("data") > 0.2:
        workers, cores = job.config.data.workers, os.cpu_count() or 1
        remedy = f"Raise --workers (now {workers}, of {cores} cores), or pack"
        if job.device.type == "cpu" and workers >= cores:  # more would take them from the towers
            remedy = "Pack"
        return (
            f"bound by the data: the step waits {result.share('data'):.0%} of the time. {remedy} the images at the"
            " training size (leanclip data pack)"
        )
    exposed = result.breakdown()["communication not hidden"] / result.step
    if exposed > 0.2:
        return (
            f"bound by the network: {exposed:.0%} of the time. A larger --global-batch-size sends the gradients less"
            " often"
        )
    if (waiting := result.share("communication") - exposed) > 0.2:
        return (
            f"bound by the slowest process: this one waits for others {waiting:.0%} of the time, beyond what the"
            " collectives take by themselves. Look for other programs on their hosts"
        )
    if result.share("loss") > 0.25:
        return f"bound by the loss: {result.share('loss'):.0%} of the time. A smaller --global-batch-size helps"
    if job.device.type == "cuda" and result.launching > 0.9 * (result.step - result.seconds["data"]):
        return "bound by the host, which launches kernels more slowly than the GPU runs them. Raise --micro-batch"
    towers = sum(result.share(phase) for phase in ("image tower", "text tower", "backward"))
    return (
        f"bound by the towers' arithmetic: {towers:.0%} of the time, at {result.mfu:.0%} of the matrix rate."
        f"{_tower_remedy(job)}"
    )


def _tower_remedy(job: Job) -> str:
    if (parts := job.context.micro_batches) > 1:
        return f" {parts} micro-batches embed everything twice: one batch, where it fits, saves a quarter."
    if job.config.parallel.grad_checkpointing:
        return " --grad-checkpointing computes the blocks twice: omit it if the memory suffices (leanclip plan)."
    if job.device.type == "cpu":
        return " Use a smaller model or image, or a GPU."
    if job.config.run.precision in ("fp32", "fp64"):
        return " --precision amp_bf16 multiplies several times faster."
    return ""

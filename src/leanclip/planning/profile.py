"""Where a step's time goes: a short real run with a mark at every change of phase, which then stops.

On a GPU the marks are CUDA events, read when all is over, so that nothing waits that would not wait anyway. A normal
run has none of this.
"""

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.distributed import GradBucket  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from leanclip.data import Batch
from leanclip.distributed import PendingGather, Ranks
from leanclip.planning.gpu_measurement import matrix_rate
from leanclip.training.setup import Job
from leanclip.training.step import training_step

PHASES = ("data", "image tower", "text tower", "loss", "backward", "optimizer", "communication")
WARM_UP, STEPS, SECONDS = 3, 20, 30.0
FEW = 8  # samples whose arithmetic is counted


@dataclass(frozen=True, kw_only=True)
class Profile:
    seconds: dict[str, float]  # of a step, by phase
    launching: float  # seconds in which the host prepares a step, up to where it waits for the device
    samples_per_second: float  # of all processes
    flops: float  # per second of this process: three times the towers' forward pass
    matrix_rate: float  # FLOP/s of a large product
    steps: int

    @property
    def step(self) -> float:
        return sum(self.seconds.values())

    @property
    def mfu(self) -> float:
        return self.flops / self.matrix_rate

    def share(self, phase: str) -> float:
        return self.seconds[phase] / self.step

    def table(self) -> Table:
        table = Table(title=f"a step, mean of {self.steps}", title_justify="left")
        for heading in ("phase", "ms", "share"):
            table.add_column(heading, justify="left" if heading == "phase" else "right")
        for phase in PHASES:
            table.add_row(phase, f"{self.seconds[phase] * 1e3:,.1f}", f"{self.share(phase):.1%}")
        table.add_section()
        table.add_row("together", f"{self.step * 1e3:,.1f}", "100.0%")
        return table


class _Marks:
    """From each mark on, time belongs to its phase."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.phase = "data"
        self.found: list[tuple[str, Any]] = []

    def enter(self, phase: str) -> None:
        self.phase = phase
        mark: Any = time.perf_counter()
        if self.cuda:
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
        self.found.append((phase, mark))

    def seconds(self) -> Counter[str]:
        """All time from the first mark to the last."""
        if self.cuda:
            torch.cuda.synchronize()
        total: Counter[str] = Counter()
        for (phase, begin), (_, end) in zip(self.found, self.found[1:], strict=False):
            total[phase] += begin.elapsed_time(end) / 1e3 if self.cuda else end - begin
        return total


def profile(job: Job, *, steps: int = STEPS) -> Profile:
    """Take real steps of a job; what they train is thrown away with it."""
    job.model.train()
    job.context.loss.train()
    context = replace(job.context, cuda_graphs=None)  # a recording has no phases
    batches = _batches(job)
    first = next(batches)
    flops = 3 * _forward_flops(job, first)
    rate = matrix_rate(job.device, torch.bfloat16 if job.context.autocast._enabled else job.dtype)
    for batch in (first, *(next(batches) for _ in range(WARM_UP - 1))):
        job.context.loss.set_epoch(0, 1)
        training_step(context, batch)
    marks, launching, taken = _Marks(job.device), [], 0
    with _marked(job, marks, launching):
        until = time.perf_counter() + SECONDS
        # All processes must take as many: the first one decides. Its clock is asked after the first step.
        while taken < steps and (
            taken == 0 or job.context.ranks.broadcast_from_first(lambda: time.perf_counter() < until)
        ):
            marks.enter("data")
            batch = next(batches)
            launching.append(-time.perf_counter())
            marks.enter("backward")
            job.context.loss.set_epoch(0, 1)
            training_step(context, batch)
            taken += 1
        marks.enter("data")
        total = marks.seconds()
    step = sum(total.values()) / taken
    return Profile(
        seconds={phase: total[phase] / taken for phase in PHASES},
        launching=sum(launching) / taken,
        samples_per_second=job.loader.batch / step,
        flops=flops * len(first) / step,
        matrix_rate=rate,
        steps=taken,
    )


def _batches(job: Job) -> Iterator[Batch]:
    """Epoch after epoch, on the device."""
    epoch = 0
    while True:
        for batch in job.loader.epoch(epoch):
            yield job.pack(batch.to(job.device, job.dtype))
        epoch += 1


@torch.no_grad()
def _forward_flops(job: Job, batch: Batch) -> float:
    """Of one sample through both towers, as they run on these data."""
    job.model.eval()  # so that batch normalisation learns nothing
    few = min(FEW, len(batch))
    with FlopCounterMode(display=False) as counter, job.context.autocast, torch.compiler.set_stance("force_eager"):
        job.model.encode_image(batch.images[:few])
        job.model.encode_text(batch.tokens[:few])
    job.model.train()
    return counter.get_total_flops() / few


@contextlib.contextmanager
def _marked(job: Job, marks: _Marks, launching: list[float]) -> Iterator[None]:
    """Marks where a step changes its phase; what is between the named ones belongs to the backward pass."""
    model, loss = job.model, job.context.loss

    def inside(phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            before = marks.phase
            marks.enter(phase)
            try:
                return call(*args, **kwargs)
            finally:
                marks.enter(before)

        return run

    def before_loss(module: nn.Module, args: tuple[Any, ...]) -> None:
        for features in args[:2]:
            if features.requires_grad:
                features.register_hook(lambda gradient: marks.enter("backward"))
        marks.enter("loss")

    def after_loss(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        marks.enter("backward")
        if output.loss.requires_grad:
            output.loss.register_hook(lambda gradient: marks.enter("loss"))

    def norm(*args: Any, **kwargs: Any) -> Tensor:
        launching[-1] += time.perf_counter()
        marks.enter("optimizer")
        return real_norm(*args, **kwargs)

    def start_gather(self: Ranks, *args: Any, **kwargs: Any) -> PendingGather:
        return PendingGather(inside("communication", real_gather(self, *args, **kwargs).wait))

    def averaged(group: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        if bucket.is_last():
            marks.enter("communication")  # what is left of it when all gradients are there
        return allreduce_hook(group, bucket)

    real_norm, real_gather, real_sum = nn.utils.get_total_norm, Ranks.start_gather, Ranks.sum
    exchanged = [
        (nn.utils, "get_total_norm", norm),
        (Ranks, "start_gather", start_gather),
        (Ranks, "sum", lambda self, *args, **kwargs: inside("communication", real_sum)(self, *args, **kwargs)),
    ]
    hooks = [loss.register_forward_pre_hook(before_loss), loss.register_forward_hook(after_loss)]
    if isinstance(job.context.towers, DistributedDataParallel):
        job.context.towers.register_comm_hook(job.context.ranks.group, averaged)
    with contextlib.ExitStack() as stack:
        for owner, name, value in exchanged:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        for name, phase in (("encode_image", "image tower"), ("encode_text", "text tower")):
            setattr(model, name, inside(phase, getattr(model, name)))
            stack.callback(delattr, model, name)
        for hook in hooks:
            stack.callback(hook.remove)
        yield


def summary(found: Profile, job: Job) -> list[str]:
    """Speed, use of the hardware, and the verdict."""
    unit = 1e12 if found.matrix_rate > 1e12 else 1e9
    name = "TFLOP/s" if unit == 1e12 else "GFLOP/s"
    return [
        f"{found.samples_per_second:,.0f} samples/s; MFU {found.mfu:.1%}: {found.flops / unit:,.1f} of the"
        f" {found.matrix_rate / unit:,.1f} {name} that a large product reaches here",
        verdict(found, job),
    ]


def verdict(found: Profile, job: Job) -> str:
    """What bounds the run, and what to change."""
    towers = sum(found.share(phase) for phase in ("image tower", "text tower", "backward"))
    if found.share("data") > 0.2:
        workers, cores = job.config.data.workers, os.cpu_count() or 1
        remedy = f"Raise --workers ({workers} now, {cores} cores here), or pack"
        if job.device.type == "cpu" and workers >= cores:  # more would take them from the towers
            remedy = "Pack"
        return (
            f"bound by the data: the step waits {found.share('data'):.0%} of the time. {remedy} the images at the"
            " training size (leanclip data pack)"
        )
    if found.share("communication") > 0.2:
        return (
            f"bound by the network: {found.share('communication'):.0%} of the time. A larger --global-batch-size"
            " sends the gradients less often"
        )
    if found.share("loss") > 0.25:
        return f"bound by the loss: {found.share('loss'):.0%} of the time. A smaller --global-batch-size helps"
    if job.device.type == "cuda" and found.launching > 0.9 * (found.step - found.seconds["data"]):
        return "bound by the host, which launches kernels more slowly than the GPU runs them. Raise --micro-batch"
    remedy = ""
    if job.context.micro_batches > 1:
        remedy = (
            f" {job.context.micro_batches} micro-batches embed everything twice:"
            " a quarter of it is saved where one fits."
        )
    elif job.config.parallel.grad_checkpointing:
        remedy = " --grad-checkpointing computes the blocks twice: leave it out if the memory allows (leanclip plan)."
    elif job.device.type == "cuda" and job.config.run.precision in ("fp32", "fp64"):
        remedy = " --precision amp_bf16 multiplies several times faster."
    elif job.device.type == "cpu":
        remedy = " Take a smaller model or image, or a GPU."
    return (
        f"bound by the towers' arithmetic: {towers:.0%} of the time, at {found.mfu:.0%} of the matrix rate.{remedy}"
    )

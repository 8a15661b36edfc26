"""What a run measures before its first step: the micro-batch that fits on a GPU, the threads of a CPU."""

import contextlib
import gc
import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from leanclip.distributed import Ranks, gradient_sync, local_tensor
from leanclip.errors import UserError
from leanclip.models import TwoTower
from leanclip.training.gradient_caching import RandomState, propagate
from leanclip.training.model_setup import CAPTION
from leanclip.training.step_context import StepContext

USED = 0.92  # of the free memory: the rest is for fragmentation, CUDA and NCCL
STATE_COPIES = {"lion": 1, "sgdm": 1}  # of the trained weights, in the optimizer's state; other optimizers keep two

MOST_PASSES = 12
PASS_SECONDS = 0.1  # of the processor, or more: as many samples has a pass that compares numbers of threads
ROUNDS, MOST_SECONDS = 3, 3.0  # of these passes; a large model has fewer
BUSY_SHARE = 0.7  # of a core that one thread gets, or less: others keep the host busy
Measure = Callable[[int, int], tuple[float, float]]  # threads and samples; seconds of a pass and of the processor


@contextlib.contextmanager
def _without_trace(context: StepContext, model: TwoTower) -> Iterator[None]:
    """Inside, passes can be measured: weights, gradients, loss state, batch-norm statistics and random numbers are
    the same afterwards."""
    device = model.image_mean.device
    random, modes = RandomState.now(device), (model.training, context.loss.training)
    model.train()
    context.loss.eval()  # it computes, and updates nothing
    context.norms.remember()
    try:
        yield
    finally:
        context.norms.restore()
        context.optimizer.zero_grad(set_to_none=True)
        random.restore(device)
        model.train(modes[0])
        context.loss.train(modes[1])


class MicroBatch(NamedTuple):
    size: int  # 0 where not one sample fits
    peak_bytes: int


def probe_micro_batch(context: StepContext, model: TwoTower, *, share: int, optimizer: str, fsdp: bool) -> MicroBatch:
    """The largest micro-batch of a run, for captions as long as the model takes.

    While a pass is measured, the memory is allocated that a step holds beside one micro-batch.
    """
    device = model.image_mean.device
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients, dim = sum(local_tensor(parameter).nbytes for parameter in trained), int(model.config["embed_dim"])
    held = STATE_COPIES.get(optimizer, 2) * gradients
    held += 6 * share * dim * trained[0].itemsize  # both sides' embeddings: of micro-batches, joined, and gradients
    held += sum(parameter.nbytes for parameter in trained) if fsdp else 0  # not sharded until the last micro-batch

    def measure(size: int) -> float:
        beside = [torch.empty(held, dtype=torch.uint8, device=device)]
        images = _images(model, 2 * share)  # of this batch and the next
        texts = _texts(model, size)
        for _ in range(2):  # the first pass compiles, and leaves the gradients to which later micro-batches add
            if size == share:
                context.optimizer.zero_grad(set_to_none=True)
            torch.cuda.reset_peak_memory_stats(device)
            with gradient_sync(context.towers, fsdp):  # FSDP2 keeps gradients that it has not reduced
                with context.autocast:
                    pair = context.towers(images[:size], texts)
                if size == share:  # without gradient caching the loss is computed beside the activations
                    beside.append(torch.empty(loss_bytes, dtype=torch.uint8, device=device))
                    beside.pop()
                propagate(pair, [torch.zeros_like(embeddings) for embeddings in pair])
        return torch.cuda.max_memory_allocated(device)

    def peak(size: int) -> float:
        try:
            return measure(size)
        except torch.OutOfMemoryError as error:
            if fsdp:  # it cannot start another pass after one that failed
                message = f"a micro-batch of {size} does not fit on {device}; give a smaller one: --micro-batch"
                raise UserError(message, code="training.out_of_memory") from error
        gc.collect()  # after the handler: the exception holds the tensors of the pass
        torch.cuda.empty_cache()
        return math.inf

    try:
        with _without_trace(context, model):
            loss_bytes = _loss_bytes(context, dim, trained[0].dtype, device)
            torch.cuda.empty_cache()
            free, _ = torch.cuda.mem_get_info(device)
            room = int(USED * (free + torch.cuda.memory_reserved(device)))
            return largest_micro_batch(peak, share=share, room=room, ranks=context.ranks, spared=gradients)
    finally:
        if model.compiled:
            torch.compiler.reset()  # the run compiles for its own shapes, as if nothing had been measured
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _images(model: TwoTower, count: int) -> torch.Tensor:
    """What the image tower gets in a step: pixels, or the features of a locked one."""
    if (width := model.feature_sizes[0]) is not None:
        return torch.zeros(count, width, dtype=torch.float16, device=model.image_mean.device)
    return torch.zeros(count, 3, *model.image_size, dtype=torch.uint8, device=model.image_mean.device)


def _texts(model: TwoTower, count: int, length: int | None = None) -> Any:
    """What the text tower gets: captions of this many tokens (default: the longest), or features of a locked one."""
    if (width := model.feature_sizes[1]) is not None:
        return torch.zeros(count, width, dtype=torch.float16, device=model.image_mean.device)
    rows = model.tokenizer([""]).repeat(count, 1)
    longest = rows.shape[1]
    length = min(length or longest, longest)
    if model.padding is not None:  # their length is where padding begins: any other token fills them
        rows[:, :length], rows[:, length:] = rows[0, 0].clone(), model.padding
    return model.texts(rows, torch.full((count,), length))


def _loss_bytes(context: StepContext, dim: int, dtype: torch.dtype, device: torch.device) -> int:
    """What the loss of a step allocates beside the embeddings."""
    count = len(range(context.global_batch)[context.ranks.share(context.global_batch)])
    image, text = (
        torch.full((count, dim), dim**-0.5, dtype=dtype, device=device, requires_grad=True) for _ in range(2)
    )
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    with context.autocast:
        ids = torch.arange(count)
        output = context.loss(image, text, ids, caption_numbers=ids, global_batch=context.global_batch)
    output.loss.backward()
    return torch.cuda.max_memory_allocated(device) - before


def largest_micro_batch(
    peak: Callable[[int], float], *, share: int, room: int, ranks: Ranks, spared: int = 0
) -> MicroBatch:
    """The largest micro-batch whose peak is at most `room` bytes on every rank: the whole share, or a multiple of 8
    where 8 fit; 0 where not one sample fits.

    `peak` measures a size: bytes, infinite where memory ran out. All ranks measure the same sizes. The whole share, a
    step without gradient caching, needs up to `spared` bytes less than a line through two small sizes says.
    """
    room = min(ranks.all_gather_objects(room))
    peaks = {0: 0.0}

    def fits(size: int) -> bool:
        if size not in peaks:
            peaks[size] = max(ranks.all_gather_objects(peak(size)))
        return peaks[size] <= room

    low, high = max(1, min(8, share // 4)), max(1, min(32, share // 2))
    if fits(low) and fits(high):
        slope = max(1.0, (peaks[high] - peaks[low]) / max(1, high - low))
        if peaks[high] + slope * (share - high) - spared <= room and fits(share):
            return MicroBatch(share, int(peaks[share]))
        size = min(share - 1, high + int((room - peaks[high]) / slope))
        size -= size % 8 if size > 8 else 0
    else:
        size = _size_between(peaks, room)
    while size not in peaks and len(peaks) < MOST_PASSES:
        fits(size)
        size = _size_between(peaks, room)
    size = max(size for size in peaks if fits(size))
    return MicroBatch(size, int(peaks[size]))


def _size_between(peaks: dict[int, float], room: int) -> int:
    """Between the largest size that fits and the smallest that does not, where the line between them meets `room`: on
    a convex curve that fits, too. The middle where no line is known. Where nothing failed, the largest that fits."""
    low = max(size for size, bytes_ in peaks.items() if bytes_ <= room)
    high = min((size for size, bytes_ in peaks.items() if bytes_ > room), default=low)
    if low == 0 or math.isinf(peaks[high]):
        size = (low + high) // 2
    else:
        size = low + int((high - low) * (room - peaks[low]) / max(1.0, peaks[high] - peaks[low]))
    return max(low, size - size % 8 if size > 8 else size)


class Threads(NamedTuple):
    """The compute threads of each process on a CPU."""

    number: int
    seconds_per_step: float | None = None  # measured, without the optimizer
    notes: tuple[str, ...] = ()


def set_threads(
    context: StepContext, model: TwoTower, *, share: int, workers: int, flag: int | None, saved: int | None
) -> Threads:
    """As the flag says, as the run was saved, or the fastest. OMP_NUM_THREADS counts as a choice, too. Where
    the number is chosen, only the time of a step is measured."""
    ranks, cores = context.ranks, os.cpu_count() or 1
    facts = ranks.all_gather_objects((socket.gethostname(), bool(os.environ.get("OMP_NUM_THREADS"))))
    on_host = [host for host, _ in facts].count(socket.gethostname())
    # Loader workers and compute threads beyond the number of cores make every step wait for the scheduler.
    most = max(1, min(torch.get_num_threads(), cores // on_host - workers))
    most = min(ranks.all_gather_objects(most))
    number, notes = None, list[str]()
    if flag is not None:
        number = flag
        if saved not in (None, flag):
            notes.append(f"resumed with --threads {flag}, the run has {saved}: sums are rounded differently")
        if flag * on_host > cores:
            processes = f" in each of {on_host} processes" if on_host > 1 else ""
            notes.append(f"warning: --threads {flag}{processes} on {cores} cores: more threads than cores are slower")
    elif saved is not None and saved <= min(ranks.all_gather_objects(cores)):
        number = saved
        if saved != torch.get_num_threads() and any(chosen for _, chosen in facts):
            notes.append(f"CPU threads of each process: {saved}, as the run began with; --threads changes it")
    elif any(chosen for _, chosen in facts) and not model.compiled:
        number = torch.get_num_threads()
        notes.append(f"CPU threads of each process: {number}, as OMP_NUM_THREADS says (--threads sets it)")
    # A pass would compile, or take minutes. All ranks do the same, as they measure together.
    if model.compiled or any(ranks.all_gather_objects((number or 1) * on_host > cores)):
        threads = Threads(most if number is None else number, notes=tuple(notes))
    else:
        with _without_trace(context, model):
            measure = _measured_pass(context, model)
            if number is None:
                threads = fastest_threads(sorted({1, -(-most // 2), most}), measure, share, ranks)
            else:
                size, seconds, _ = _large_pass(number, measure, share, ranks)
                seconds_per_step = max(ranks.all_gather_objects(seconds)) * share / size
                threads = Threads(number, seconds_per_step, tuple(notes))
    torch.set_num_threads(threads.number)
    return threads


def _large_pass(threads: int, measure: Measure, share: int, ranks: Ranks) -> tuple[int, float, float]:
    """The samples of a pass that takes long enough to be measured, its seconds and those of the processor."""
    size = min(2, share)
    measure(threads, size)  # allocates
    seconds, processor = measure(threads, size)
    while size < share and max(ranks.all_gather_objects(processor)) < PASS_SECONDS:
        size = min(share, 2 * size)
        seconds, processor = measure(threads, size)
    return size, seconds, processor


def fastest_threads(candidates: Sequence[int], measure: Measure, share: int, ranks: Ranks) -> Threads:
    """The smallest of the candidates, the first of which is 1, that is about as fast as the fastest.

    All ranks measure together, so that each has the load of the others.
    """
    size, seconds, processor = _large_pass(1, measure, share, ranks)
    busy = ranks.size == 1 and processor < BUSY_SHARE * seconds
    totals, rounds = dict.fromkeys(candidates, 0.0), 0
    while rounds < ROUNDS and sum(totals.values()) < MOST_SECONDS:
        rounds += 1
        for threads in totals:
            totals[threads] += max(ranks.all_gather_objects(measure(threads, size)[0]))
        totals = {threads: total for threads, total in totals.items() if total <= 2 * min(totals.values())}
    count = min(threads for threads, total in totals.items() if total <= 1.1 * min(totals.values()))
    reason = f"the fastest of {', '.join(map(str, candidates))}" if len(candidates) > 1 else "other cores are taken"
    notes = [f"CPU threads of each process: {count}, {reason} (--threads sets it)"]
    if busy or os.getloadavg()[0] > 1.5 * (os.cpu_count() or 1):
        load = f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
        notes.append(f"warning: other programs keep this host busy ({load}): the run is slower than it could be")
    return Threads(count, totals[count] / rounds * share / size, tuple(notes))


def _measured_pass(context: StepContext, model: TwoTower) -> Measure:
    """Forward and backward through towers and loss, of captions of a typical length."""

    def measure(threads: int, samples: int) -> tuple[float, float]:
        torch.set_num_threads(threads)
        images, texts = _images(model, samples), _texts(model, samples, CAPTION)
        began, processor = time.perf_counter(), time.process_time()
        with context.autocast:
            image, text = context.towers(images, texts)
            ids, batch = torch.arange(samples), samples * context.ranks.size
            output = context.loss(image, text, ids, caption_numbers=ids, global_batch=batch)
        output.loss.backward()
        return time.perf_counter() - began, time.process_time() - processor

    return measure

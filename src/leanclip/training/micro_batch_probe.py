"""The largest micro-batch that fits on the GPU, measured by a few real passes before the first step."""

import gc
import math
from collections.abc import Callable

import torch

from leanclip.distributed import Ranks, gradient_sync, local_tensor
from leanclip.errors import UserError
from leanclip.models import TwoTower
from leanclip.training.gradient_caching import RandomState, propagate
from leanclip.training.step_context import StepContext

USED = 0.92  # of the free memory: the rest is for fragmentation, CUDA and NCCL
STATE_COPIES = {"lion": 1, "sgdm": 1}  # of the trained weights, in the optimizer's state; other optimizers keep two

MOST_PASSES = 12


def probe_micro_batch(context: StepContext, model: TwoTower, *, share: int, optimizer: str, fsdp: bool) -> int:
    """The largest micro-batch of a run, for captions as long as the model takes; 0 where not one sample fits.

    While a pass is measured, the memory is allocated that a step holds beside one micro-batch. Weights, gradients,
    loss state, batch-norm statistics and random numbers are the same afterwards.
    """
    device, loss, random = model.image_mean.device, context.loss, RandomState.now(model.image_mean.device)
    pixels, row, modes = model.preprocess.size, model.tokenizer([""]), (model.training, context.loss.training)
    height, width = (pixels, pixels) if isinstance(pixels, int) else pixels
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients, dim = sum(local_tensor(parameter).nbytes for parameter in trained), int(model.config["embed_dim"])
    held = STATE_COPIES.get(optimizer, 2) * gradients
    held += 6 * share * dim * trained[0].itemsize  # both sides' embeddings: of micro-batches, joined, and gradients
    held += sum(parameter.nbytes for parameter in trained) if fsdp else 0  # not sharded until the last micro-batch

    def measure(size: int) -> float:
        beside = [torch.empty(held, dtype=torch.uint8, device=device)]
        images = torch.zeros(2 * share, 3, height, width, dtype=torch.uint8, device=device)  # of this batch, the next
        texts = model.texts(row.expand(size, -1), torch.full((size,), row.shape[1]))
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

    model.train()
    loss.eval()  # it computes, and updates nothing
    context.norms.remember()
    try:
        loss_bytes = _loss_bytes(context, dim, trained[0].dtype, device)
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        room = int(USED * (free + torch.cuda.memory_reserved(device)))
        return largest_micro_batch(peak, share=share, room=room, ranks=context.ranks, spared=gradients)
    finally:
        context.norms.restore()
        context.optimizer.zero_grad(set_to_none=True)
        random.restore(device)
        model.train(modes[0])
        loss.train(modes[1])
        if model.compiled:
            torch.compiler.reset()  # the run compiles for its own shapes, as if nothing had been measured
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _loss_bytes(context: StepContext, dim: int, dtype: torch.dtype, device: torch.device) -> int:
    """What the loss of a step allocates beside the embeddings."""
    count = len(range(context.global_batch)[context.ranks.share(context.global_batch)])
    image, text = (
        torch.full((count, dim), dim**-0.5, dtype=dtype, device=device, requires_grad=True) for _ in range(2)
    )
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    with context.autocast:
        output = context.loss(image, text, torch.arange(count), global_batch=context.global_batch)
    output.loss.backward()
    return torch.cuda.max_memory_allocated(device) - before


def largest_micro_batch(peak: Callable[[int], float], *, share: int, room: int, ranks: Ranks, spared: int = 0) -> int:
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
            return share
        size = min(share - 1, high + int((room - peaks[high]) / slope))
        size -= size % 8 if size > 8 else 0
    else:
        size = _size_between(peaks, room)
    while size not in peaks and len(peaks) < MOST_PASSES:
        fits(size)
        size = _size_between(peaks, room)
    return max(size for size in peaks if fits(size))


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

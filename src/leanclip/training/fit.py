"""How many samples a GPU can embed at a time: measured, because memory is linear in them."""

import torch

from leanclip.distributed import Ranks
from leanclip.errors import UserError
from leanclip.models import TwoTower
from leanclip.training.batch_norm import RunningAverages

TRIALS = (128, 32, 8)  # samples of the larger of two trial passes; the smaller has a quarter
USED = 0.92  # of the free memory: the allocator needs room to move
PER_PARAMETER = 4 + 8  # bytes to come, beside the weights: gradient and AdamW's moments, in float32


def fitting(
    model: TwoTower, *, share: int, batch: int, ranks: Ranks, autocast: torch.autocast, split: bool = False
) -> int:
    """The largest micro-batch that fits on every rank's GPU, at most the share of a rank.

    Two small passes through the towers, forward and backward, give the bytes per sample. Called before the model is
    given to DDP or split by FSDP (`split`), so the weights must fit once as a whole.
    """
    device = next(model.parameters()).device
    if device.type != "cuda" or share <= TRIALS[-1]:
        return share
    fixed, each = _memory(model, share, autocast)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    sample = sum(part.nbytes for part in _trial(model, 1, device))
    dim = model.config["embed_dim"]
    kept = trained // ranks.size if split else trained
    to_come = fixed + PER_PARAMETER * kept + share * sample + batch * 2 * dim * 12
    torch.cuda.empty_cache()
    room, _ = torch.cuda.mem_get_info(device)
    micro = largest(room=USED * room - to_come, each=each)
    micro = min(ranks.everyones(min(micro, share)))
    if micro < 1:
        raise UserError(
            f"not one sample fits beside the weights: {room / 2**30:.1f} GiB are free, {to_come / 2**30:.1f} needed"
            " for gradients, optimizer and embeddings; take a smaller model or batch"
        )
    return micro


def largest(*, room: float, each: int) -> int:
    """How many of `each` bytes fit, rounded down to whole eights where there are that many."""
    count = int(max(0.0, room) // each)
    return count if count < 8 else count - count % 8


def _memory(model: TwoTower, share: int, autocast: torch.autocast) -> tuple[int, int]:
    """Bytes that a pass needs beside weights and gradients, whatever its size, and for each sample."""
    for size in TRIALS:
        if size > share:
            continue
        try:
            small, large = _peak(model, size // 4, autocast), _peak(model, size, autocast)
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            continue
        each = max(1, (large - small) // (size - size // 4))
        return max(0, large - size * each), each
    raise UserError(f"not even {TRIALS[-1]} samples fit on the GPU; take a smaller model, or give --micro-batch")


def _peak(model: TwoTower, size: int, autocast: torch.autocast) -> int:
    """Bytes that one pass needs beside the weights. The model and the random numbers are left as they were."""
    device = next(model.parameters()).device
    norms = RunningAverages(model)
    norms.remember()
    images, tokens = _trial(model, size, device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    try:
        with torch.random.fork_rng(devices=[device]):
            with autocast:
                image, text = model(images, tokens)
            (image.float().sum() + text.float().sum()).backward()
        return torch.cuda.max_memory_allocated(device) - before
    finally:
        for parameter in model.parameters():
            parameter.grad = None
        norms.restore()


def _trial(model: TwoTower, size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    pixels = model.preprocess.size
    height, width = (pixels, pixels) if isinstance(pixels, int) else pixels
    tokens = model.tokenizer(["a " * 1000]).to(device).expand(size, -1).contiguous()  # as long as any
    return torch.zeros(size, 3, height, width, device=device, dtype=torch.uint8), tokens

"""How many samples a GPU can embed at a time: measured, because memory is linear in them."""

import torch

from leanclip.distributed import Ranks
from leanclip.errors import UserError
from leanclip.models import TwoTower
from leanclip.training.batch_norm import RunningAverages

SMALL, LARGE = 8, 32  # samples of the two trial passes
USED = 0.92  # of the free memory: the allocator needs room to move
PER_PARAMETER = 4 + 8  # bytes to come, beside the weights: gradient and AdamW's moments, in float32


def fitting(model: TwoTower, *, share: int, batch: int, ranks: Ranks, autocast: torch.autocast) -> int:
    """The largest micro-batch that fits on every rank's GPU, at most the share of a rank.

    Two small passes through the towers, forward and backward, give the bytes per sample. Called before the model is
    split over ranks, so the rank of a larger GPU does not help a smaller one, and FSDP's savings are not counted.
    """
    device = next(model.parameters()).device
    if device.type != "cuda" or share <= LARGE:
        return share
    small, large = (_peak(model, size, autocast) for size in (SMALL, LARGE))
    each = max(1, (large - small) // (LARGE - SMALL))
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    sample = sum(part.nbytes for part in _trial(model, 1, device))
    dim = model.config["embed_dim"]
    to_come = PER_PARAMETER * trained + share * sample + batch * 2 * dim * 12
    free, _ = torch.cuda.mem_get_info(device)
    room = free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    micro = largest(room=USED * room - to_come - (small - SMALL * each), each=each)
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


def _peak(model: TwoTower, size: int, autocast: torch.autocast) -> int:
    """Bytes that one pass needs beside the weights. The model and the random numbers are left as they were."""
    device = next(model.parameters()).device
    norms = RunningAverages(model)
    norms.remember()
    images, tokens = _trial(model, size, device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    with torch.random.fork_rng(devices=[device]):
        with autocast:
            image, text = model(images, tokens)
        (image.float().sum() + text.float().sum()).backward()
    peak = torch.cuda.max_memory_allocated(device) - before
    for parameter in model.parameters():
        parameter.grad = None
    norms.restore()
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    return max(0, peak - trained)


def _trial(model: TwoTower, size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    pixels = model.preprocess.size
    height, width = (pixels, pixels) if isinstance(pixels, int) else pixels
    tokens = model.tokenizer(["a"]).to(device).expand(size, -1).contiguous()
    return torch.zeros(size, 3, height, width, device=device, dtype=torch.uint8), tokens

"""One rank of the collectives' tests: steps through a process group that records every collective."""

import torch
import torch.distributed as dist
from spy import Spy, make
from torch.nn.functional import normalize
from training_worker import BATCH, SAMPLES, batch, small_vit

import leanclip
from leanclip.data import Batch
from leanclip.distributed import TRAFFIC_COUNTER, wrap_ddp
from leanclip.training.step import training_step
from leanclip.training.step_context import StepContext

NAMES = ("infonce", "siglip", "fastclip-v2", "fastclip-v3")
LARGE, DIM = 8192, 512


def observe(ranks, folder):
    """Per loss: the collectives of one step, those of the loss alone at a large batch, and our count of them."""
    dist.destroy_process_group()
    dist.Backend.register_backend("spy", make, devices=["cpu"])
    dist.init_process_group("spy", init_method=f"file://{folder}/spied", rank=ranks.rank, world_size=ranks.size)
    ranks = type(ranks).current()
    return {name: {"step": one_step(name, ranks, folder)} | large_batch(name, ranks) for name in NAMES}


def one_step(name, ranks, folder):
    model = small_vit(folder)
    loss = leanclip.create_loss(name, num_samples=SAMPLES if name.startswith("fast") else None, tau=0.1)
    loss.set_epoch(0, 1)
    towers = wrap_ddp(model, ranks, torch.device("cpu"))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD([*trained, *loss.parameters()], lr=0.1)
    context = StepContext(towers=towers, loss=loss, optimizer=optimizer, global_batch=BATCH - 1)
    share = ranks.share(BATCH - 1)
    for step in range(3):  # DDP settles its buckets in the first two
        Spy.seen.clear()
        images, tokens, ids = (part[: BATCH - 1][share] for part in batch(step, torch.float32))
        training_step(context, Batch(images=images, tokens=tokens, sample_ids=ids))
    return {"seen": list(Spy.seen), "parameters": sum(parameter.nbytes for parameter in trained)}


def large_batch(name, ranks):
    draw = torch.Generator().manual_seed(ranks.rank)
    image, text = (
        normalize(torch.randn(LARGE // ranks.size, DIM, generator=draw), dim=1).bfloat16() for _ in range(2)
    )
    ids = torch.arange(ranks.rank, LARGE, ranks.size)
    loss = leanclip.create_loss(name, num_samples=LARGE if name.startswith("fast") else None)
    loss.set_epoch(0, 1)
    Spy.seen.clear()
    TRAFFIC_COUNTER.clear()
    with torch.no_grad():
        loss(image, text, ids)
    return {"large": list(Spy.seen), "counted": {key: tuple(entry) for key, entry in TRAFFIC_COUNTER.volumes.items()}}

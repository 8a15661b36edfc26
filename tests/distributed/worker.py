"""One rank of the distributed tests: three steps of every loss on its share, results to a file."""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import normalize

import leanclip
from leanclip.distributed import Ranks, whole

SAMPLES, BATCH, DIM, STEPS = 40, 11, 6, 3
CASES = [(name, {}) for name in leanclip.LOSSES]
CASES += [("fastclip-v2", {"eps_form": "published"}), ("infonce", {"groups": True}), ("siglip", {"groups": True})]


def batch(step):
    draw = torch.Generator().manual_seed(step)
    image, text = (normalize(torch.randn(BATCH, DIM, generator=draw), dim=1) for _ in range(2))
    ids = torch.randperm(SAMPLES // 2, generator=draw)[:BATCH]  # half the samples, so that they come again
    return image, text, ids, torch.randint(8, (BATCH,), generator=draw)


def run(name, hyper, ranks, total=BATCH):
    """The last step's loss and gradients of this rank's share, and the state after all steps."""
    hyper = dict(hyper)
    grouped = hyper.pop("groups", False)
    stateful = name not in ("infonce", "siglip")
    loss = leanclip.create_loss(name, num_samples=SAMPLES if stateful else None, tau=0.1, **hyper)
    mine = ranks.share(total)
    found: dict[str, Any] = {}
    for step in range(STEPS):
        loss.set_epoch(step, STEPS)
        image, text, ids, groups = (part[:total][mine] for part in batch(step))
        image, text = image.clone().requires_grad_(), text.clone().requires_grad_()
        loss.zero_grad()
        output = loss(image, text, ids, groups=groups if grouped else None, global_batch=total)
        output.loss.backward()
        found = {"loss": output.loss.detach(), "image": image.grad, "text": text.grad}
    found |= {f"grad {key}": parameter.grad for key, parameter in loss.named_parameters()}
    return found | {f"state {key}": whole(value) for key, value in loss.state_dict().items()}


def main(rank, size, meeting, out):
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    ranks = Ranks.current()
    results: dict[Any, Any] = {index: run(name, hyper, ranks) for index, (name, hyper) in enumerate(CASES)}
    results["even"] = run("fastclip-v3", {}, ranks, total=BATCH - BATCH % size)
    try:
        leanclip.create_loss("infonce")(torch.eye(rank + 1, 4), torch.eye(rank + 1, 4), global_batch=BATCH + 9)
        results["complaint"] = ""
    except ValueError as error:
        results["complaint"] = str(error)
    torch.save(results, f"{out}-{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])

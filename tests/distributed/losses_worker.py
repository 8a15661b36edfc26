"""One rank of the losses' tests: some steps of every loss on its share."""

from typing import Any

import torch
from torch.nn.functional import normalize

import leanclip
from leanclip.distributed import full_tensor
from refusal import refuses

SAMPLES, BATCH, DIM, STEPS = 40, 11, 6, 4
CASES = [(name, {}) for name in leanclip.LOSSES]
CASES += [(name, extra) for name in leanclip.LOSSES for extra in ({"groups": True}, {"weights": True})]
CASES += [(name, {"pair_weights": "learned"}) for name in leanclip.LOSSES]
CASES += [(name, {"pair_weights": "learned", "captions_per_sample": 2}) for name in leanclip.LOSSES]
CASES += [("fastclip-v2", {"eps_form": "published"}), ("fastclip-v2", {"eps_form": "published", "groups": True})]
CASES += [(name, {"tau_weight": "exact"}) for name in ("isogclr", "fastclip-v2")]


def batch(step):
    draw = torch.Generator().manual_seed(step)
    image, text = (normalize(torch.randn(BATCH, DIM, generator=draw), dim=1) for _ in range(2))
    ids = torch.randperm(SAMPLES // 2, generator=draw)[:BATCH]  # half the samples, so that they are visited again
    groups = torch.randint(8, (BATCH,), generator=draw) * (step != 1)  # in the second step nobody has a negative
    weights = torch.rand(BATCH, generator=draw).sub(0.2).clamp_min(0)
    return image, text, ids, groups, weights


def run(name, hyper, ranks, total=BATCH):
    """The last step's loss and gradients of this rank's share, and the state after all steps."""
    hyper = dict(hyper)
    extras = [name for name in ("groups", "weights") if hyper.pop(name, False)]
    loss = leanclip.create_loss(name, num_samples=SAMPLES, tau=0.1, **hyper)
    share = ranks.share(total)
    results: dict[str, Any] = {}
    for step in range(STEPS):
        loss.set_epoch(step, STEPS)
        image, text, ids, groups, weights = (part[:total][share] for part in batch(step))
        image, text = image.clone().requires_grad_(), text.clone().requires_grad_()
        loss.zero_grad()
        values = {"groups": groups, "weights": weights}
        extra = {name: values[name] for name in extras}
        output = loss(image, text, ids, global_batch=total, caption_numbers=(ids + step // 2) % 2, **extra)
        output.loss.backward()
        results = {"loss": output.loss.detach(), "image": image.grad, "text": text.grad}
    results |= {f"grad {key}": parameter.grad for key, parameter in loss.named_parameters()}
    return results | {f"state {key}": full_tensor(value) for key, value in loss.state_dict().items()}


def run_all(ranks, folder):
    torch.set_default_dtype(torch.float64)
    results: dict[Any, Any] = {index: run(name, hyper, ranks) for index, (name, hyper) in enumerate(CASES)}
    results["even"] = run("fastclip-v3", {}, ranks, total=BATCH - BATCH % ranks.size)
    with refuses("loss.bad_share", f"rank {ranks.rank} of {ranks.size} has {ranks.rank + 1} samples"):
        leanclip.create_loss("infonce")(*torch.eye(ranks.rank + 1, 4).expand(2, -1, -1), global_batch=BATCH + 9)
    return results

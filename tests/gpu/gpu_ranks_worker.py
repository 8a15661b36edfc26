"""What one of two processes on one GPU does: three steps of a loss by the Triton kernels on its share."""

import torch
from torch.nn.functional import normalize

import leanclip
from leanclip.distributed import full_tensor

NAMES = ("infonce", "fastclip-v2", "fastclip-v3")
SAMPLES, BATCH, DIM = 1000, 517, 192


def steps(ranks, folder):
    return {name: run(name, ranks) for name in NAMES}


def run(name, ranks):
    loss = leanclip.create_loss(name, num_samples=SAMPLES if name != "infonce" else None, implementation="triton")
    loss = loss.cuda()
    mine = ranks.share(BATCH)
    found = {}
    for step in range(3):
        draw = torch.Generator().manual_seed(step)
        image = normalize(torch.randn(BATCH, DIM, generator=draw), dim=1)
        text = normalize(image + torch.randn(BATCH, DIM, generator=draw), dim=1)
        ids = torch.randperm(SAMPLES, generator=draw)[:BATCH]
        image, text = (side[mine].cuda().bfloat16().requires_grad_() for side in (image, text))
        loss.set_epoch(step, 3)
        loss.zero_grad()
        loss.start_gather(image, global_batch=BATCH)
        output = loss(image, text, ids[mine], global_batch=BATCH)
        assert output.metrics["implementation"] == "triton"
        output.loss.backward()
        found = {"loss": output.loss.detach(), "image": image.grad, "text": text.grad}
    found |= {f"gradient of {key}": parameter.grad for key, parameter in loss.named_parameters()}
    found |= {f"state {key}": full_tensor(value) for key, value in loss.state_dict().items()}
    return {key: value.double().cpu() for key, value in found.items() if value is not None}

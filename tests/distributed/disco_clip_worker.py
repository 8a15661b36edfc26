"""One rank of the tests of DisCo-CLIP's decomposition: gradients of its rows and what the loss sent."""

import torch
from torch.nn.functional import normalize

import leanclip
from leanclip.distributed import TRAFFIC_COUNTER, compare_traffic
from leanclip.losses.disco_clip import disco_clip

BATCH, DIM, TAU = 12, 6, 0.1


def batch():
    draw = torch.Generator().manual_seed(0)
    return [normalize(torch.randn(BATCH, DIM, generator=draw, dtype=torch.float64), dim=1) for _ in range(2)]


def step(ranks, loss, **parameters):
    """Loss, gradients and traffic of this rank's share of the batch."""
    share = ranks.share(BATCH)
    image, text = (rows[share].clone().requires_grad_() for rows in batch())
    TRAFFIC_COUNTER.clear()
    value = loss(image, text)
    value.backward()
    gradients = {name: parameter.grad for name, parameter in parameters.items()}
    volumes = {purpose: tuple(volume) for purpose, volume in TRAFFIC_COUNTER.volumes.items()}
    received = tuple(compare_traffic(TRAFFIC_COUNTER, ranks=ranks.size))
    gradients |= {"image": image.grad, "text": text.grad}
    return gradients | {"loss": value.detach(), "volumes": volumes, "received": received}


def run_both(ranks, folder=None):
    torch.set_default_dtype(torch.float64)
    log_scale = torch.tensor(1 / TAU).log().requires_grad_()
    module = leanclip.create_loss("infonce", tau=TAU)
    (parameter,) = module.parameters()
    return {
        "disco": step(ranks, lambda image, text: disco_clip(image, text, log_scale.exp()), scale=log_scale),
        "infonce": step(ranks, lambda image, text: module(image, text).loss, scale=parameter),
    }

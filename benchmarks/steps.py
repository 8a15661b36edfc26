"""Shared by the benchmarks of a training step: a step context, a synthetic batch."""

import torch

import leanclip
from leanclip.data import Batch
from leanclip.losses.pair_weights import Mode
from leanclip.models import TwoTower
from leanclip.optim import OptimConfig, create_optimizer, weight_decay_groups
from leanclip.training.step_context import StepContext

WORDS = "a photograph of two small brown dogs that play with an old red ball on the wet green grass"


def synthetic_batch(model: TwoTower, batch: int, device: torch.device) -> Batch:
    """uint8 pixels, and captions of 8 to 23 tokens, padded."""
    captions = model.tokenizer([" ".join(WORDS.split()[: 6 + number % 14]) for number in range(28)])
    return Batch(
        images=torch.randint(256, (batch, 3, *model.image_size), dtype=torch.uint8, device=device),
        tokens=captions.to(device)[torch.arange(batch, device=device) % len(captions)],
        sample_ids=torch.arange(batch),
    )


def step_context(
    model: TwoTower,
    loss_name: str,
    *,
    batch: int,
    samples: int,
    device: torch.device,
    micro_batches: int = 1,
    pair_weights: Mode = "off",
) -> StepContext:
    """AdamW, and bf16 autocast on CUDA."""
    without_state = loss_name in ("infonce", "siglip") and pair_weights == "off"
    num_samples = None if without_state else samples
    loss = leanclip.create_loss(loss_name, num_samples=num_samples, pair_weights=pair_weights).to(device)
    loss.set_epoch(1, 4)
    config = OptimConfig(lr=1e-5, wd=0.1, beta1=0.9, beta2=0.98, eps_opt=1e-6)
    return StepContext(
        towers=model,
        loss=loss,
        optimizer=create_optimizer(config, [*weight_decay_groups(model, 0.1), *loss.param_groups()]),
        global_batch=batch,
        micro_batches=micro_batches,
        autocast=torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"),
    )


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"

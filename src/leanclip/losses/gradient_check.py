"""Every implementation of the losses against float64, with plain PyTorch's error as the yardstick."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from leanclip import ops
from leanclip.losses.registry import create_loss, spec_of

STEPS = 2  # the second contains every id again
Batch = tuple[Tensor, Tensor, Tensor]  # images, texts, ids


@dataclass(frozen=True, kw_only=True)
class Check:
    """The largest error of one quantity over the steps, relative to its largest entry."""

    loss: str
    implementation: str
    dtype: str
    quantity: str
    error: float
    plain: float  # plain PyTorch's error at the same input precision

    @property
    def passed(self) -> bool:
        return self.error <= max(2 * self.plain, 4 * torch.finfo(torch.float32).eps)  # false for NaN


def check_implementations(losses: list[str], *, device: torch.device, batch: int, dim: int) -> Iterator[Check]:
    """Compare loss, gradients and state of each implementation with float64."""
    for name in losses:
        for dtype in (torch.float32, torch.bfloat16):
            batches = [_batch(batch, dim, dtype, device, seed) for seed in range(STEPS)]
            truth = _run(name, "reference", batches, torch.float64)
            plain = _errors(_run(name, "reference", batches, dtype), truth)
            for implementation in ops.available(batches[0][0])[1:]:
                for quantity, error in _errors(_run(name, implementation, batches, dtype), truth).items():
                    yield Check(
                        loss=name, implementation=implementation, dtype=str(dtype).removeprefix("torch."),
                        quantity=quantity, error=error, plain=plain[quantity],
                    )  # fmt: skip


def _batch(batch: int, dim: int, dtype: torch.dtype, device: torch.device, seed: int) -> Batch:
    """Embeddings that are similar to their partners, as in training; every step permutes the same ids."""
    draw = torch.Generator().manual_seed(seed)
    image = torch.randn(batch, dim, generator=draw)
    text = image + 2 * torch.randn(batch, dim, generator=draw)
    image, text = (torch.nn.functional.normalize(side, dim=1).to(device, dtype) for side in (image, text))
    return image, text, torch.randperm(batch, generator=draw)


def _run(name: str, implementation: str, batches: list[Batch], dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """Loss, gradients and tables of each step, in float64."""
    samples = len(batches[0][2]) if spec_of(name).running else None
    loss = create_loss(name, num_samples=samples, implementation=implementation)
    loss = loss.to(batches[0][0].device, torch.float64 if dtype == torch.float64 else None)
    results = []
    for step, (image, text, ids) in enumerate(batches):
        loss.set_epoch(step, STEPS)
        image, text = (side.detach().to(dtype).requires_grad_() for side in (image, text))
        loss.zero_grad()
        value = loss(image, text, ids).loss
        value.backward()
        quantities = {"loss": value.detach(), "image gradient": image.grad, "text gradient": text.grad}
        quantities |= {f"{key.split('.')[-1]} gradient": parameter.grad for key, parameter in loss.named_parameters()}
        quantities |= {key.split(".")[-1]: table for key, table in loss.named_buffers() if table.ndim}
        results.append({key: tensor.double().clone() for key, tensor in quantities.items() if tensor is not None})
    return results


def _errors(results: list[dict[str, Tensor]], truth: list[dict[str, Tensor]]) -> dict[str, float]:
    largest: dict[str, float] = {}
    for step, expected in zip(results, truth, strict=True):
        for key, value in expected.items():
            scale = value.abs().max().clamp_min(torch.finfo(torch.float32).tiny)
            error = ((step[key] - value).abs().max() / scale).item()
            largest[key] = max(largest.get(key, 0.0), error) if error == error else float("nan")
    return largest

"""Does every implementation compute what it should here? Float64 is the truth, plain PyTorch the yardstick."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from leanclip import ops
from leanclip.losses.base import ContrastiveLoss
from leanclip.losses.registry import create_loss, spec_of

STEPS = 2  # the second meets every id again


@dataclass(frozen=True, kw_only=True)
class Check:
    """The worst error of one quantity over the steps, relative to its largest entry."""

    loss: str
    implementation: str
    dtype: str
    quantity: str
    error: float
    plain: float  # plain PyTorch's error at the same input precision
    allowed: float

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed  # false for NaN


def selftest(losses: list[str], *, device: torch.device, batch: int, dim: int, seed: int = 0) -> Iterator[Check]:
    """Compare loss, gradients and state of each implementation with float64."""
    for name in losses:
        for dtype in (torch.float32, torch.bfloat16):
            batches = [_batch(batch, dim, dtype, device, seed + step) for step in range(STEPS)]
            truth = _run(name, "reference", batches, torch.float64)
            plain = _errors(_run(name, "reference", batches, dtype), truth)
            for implementation in ops.available(batches[0][0])[1:]:
                found = _errors(_run(name, implementation, batches, dtype), truth)
                for quantity, error in found.items():
                    allowed = max(2 * plain[quantity], 4 * torch.finfo(torch.float32).eps)
                    yield Check(
                        loss=name, implementation=implementation, dtype=str(dtype).removeprefix("torch."),
                        quantity=quantity, error=error, plain=plain[quantity], allowed=allowed,
                    )  # fmt: skip


def _batch(
    batch: int, dim: int, dtype: torch.dtype, device: torch.device, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Embeddings that agree somewhat with their partners, as in training; every step permutes the same ids."""
    draw = torch.Generator().manual_seed(seed)
    image = torch.randn(batch, dim, generator=draw)
    text = image + 2 * torch.randn(batch, dim, generator=draw)
    image, text = (torch.nn.functional.normalize(side, dim=1).to(device, dtype) for side in (image, text))
    return image, text, torch.randperm(batch, generator=draw)


def _run(
    name: str, implementation: str, batches: list[tuple[Tensor, Tensor, Tensor]], dtype: torch.dtype
) -> list[dict[str, Tensor]]:
    """What each step gives, in float64."""
    samples = len(batches[0][2]) if spec_of(name).running else None
    loss: ContrastiveLoss = create_loss(name, num_samples=samples, implementation=implementation)
    loss = loss.to(batches[0][0].device, torch.float64 if dtype == torch.float64 else None)
    results = []
    for step, (image, text, ids) in enumerate(batches):
        loss.set_epoch(step, STEPS)
        image, text = (side.detach().to(dtype).requires_grad_() for side in (image, text))
        loss.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            output = loss(image, text, ids)
            output.loss.backward()
        found = {"loss": output.loss.detach(), "image gradient": image.grad, "text gradient": text.grad}
        found |= {f"{key.split('.')[-1]} gradient": parameter.grad for key, parameter in loss.named_parameters()}
        found |= {key.split(".")[-1]: table for key, table in loss.named_buffers() if table.ndim}
        results.append({key: value.double().clone() for key, value in found.items() if value is not None})
    return results


def _errors(found: list[dict[str, Tensor]], truth: list[dict[str, Tensor]]) -> dict[str, float]:
    worst: dict[str, float] = {}
    for one, right in zip(found, truth, strict=True):
        for key, value in right.items():
            scale = value.abs().max().clamp_min(torch.finfo(torch.float32).tiny)
            error = ((one[key] - value).abs().max() / scale).item()
            worst[key] = max(worst.get(key, 0.0), error) if error == error else float("nan")
    return worst

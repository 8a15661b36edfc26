"""The short measurement behind a `Card`: bare operations on the GPU that is here, no model among them."""

import time
from collections.abc import Callable
from itertools import combinations_with_replacement
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leanclip import ops
from leanclip.planning.card import LAUNCH, Card, Shares
from leanclip.planning.trace import tracing

SIDES = (64, 256, 512, 1024, 2048, 4096)
LONG = 32_768
LENGTHS = (16, 32, 50, 77, 128, 197, 257, 577, 1024)


def measure(device: torch.device) -> Card:
    """Takes a few seconds and a few GiB."""
    properties: Any = torch.cuda.get_device_properties(device)
    with torch.cuda.device(device), torch.random.fork_rng(devices=[device]):
        torch.manual_seed(0)
        made = _Maker(device)
        big = made(8192, 8192)
        matrix = 2 * 8192**3 / seconds(lambda: big @ big)
        source = made(1 << 30, dtype=torch.uint8)
        target = torch.empty_like(source)
        bandwidth = 2 * source.nbytes / seconds(lambda: target.copy_(source))
        del source, target, big
        forward, backward = _host(device)
        shares = Shares(
            products={f"{a}x{b}": _product(made, a, b) / matrix for a, b in combinations_with_replacement(SIDES, 2)},
            wide=_wide(made) / matrix,
            **{name: {k: v / matrix for k, v in table.items()} for name, table in _attention(made).items()},
            loss=_loss(made) / matrix,
            **_convolutions(made, matrix, bandwidth),
            **{name: rate / bandwidth for name, rate in _moving(made).items()},
        )
        torch.cuda.empty_cache()
    return Card(
        name=properties.name,
        memory=properties.total_memory,
        capability=(properties.major, properties.minor),
        processors=properties.multi_processor_count,
        matrix=matrix,
        bandwidth=bandwidth,
        host_forward=forward,
        host_backward=backward,
        shares=shares,
        measured=True,
    )


def seconds(call: Callable[[], object], repeats: int = 7) -> float:
    """Median on the device, less the gap that every kernel is charged."""
    for _ in range(2):
        call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    torch.cuda._sleep(6_000_000)  # so that the host is ahead
    for event in events[:-1]:
        event.record()
        call()
    events[-1].record()
    torch.cuda.synchronize()
    found = sorted(a.elapsed_time(b) / 1e3 for a, b in zip(events, events[1:], strict=False))
    return max(found[len(found) // 2] - LAUNCH, 1e-7)


class _Maker:
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, *shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> Tensor:
        if dtype == torch.uint8:
            return torch.randint(255, shape, dtype=dtype, device=self.device)
        return torch.randn(shape, dtype=dtype, device=self.device).requires_grad_(grad)


def _product(made: _Maker, small: int, middle: int) -> float:
    """FLOP/s of products with one long side, which is the rows', or the one that is summed over."""
    rows, factor = made(LONG, small), made(small, middle)
    other = made(LONG, middle)
    both = seconds(lambda: rows @ factor) + seconds(lambda: rows.T @ other)
    return 2 * 2 * LONG * small * middle / both


def _wide(made: _Maker) -> float:
    square = made(4096, 4096, dtype=torch.float32)
    return 2 * 4096**3 / seconds(lambda: square @ square)


def _attention(made: _Maker) -> dict[str, dict[str, float]]:
    """FLOP/s by length, heads of 64; the mean of attention with a causal mask and without."""
    found: dict[str, dict[str, float]] = {"attention": {}, "attention_backward": {}}
    for length in LENGTHS:
        batch, heads = max(1, 65_536 // length), 12
        # As the towers' attention layers hold them: length first, then batch.
        packed = made(3, length, batch, heads * 64)
        parts = [part.view(length, batch, heads, 64).permute(1, 2, 0, 3).requires_grad_() for part in packed]
        mask = torch.full((length, length), -torch.inf, device=made.device).triu_(1).bfloat16()
        flops = 4 * batch * heads * length * length * 64
        forward = backward = 0.0
        for chosen in (None, mask):
            out = F.scaled_dot_product_attention(*parts, attn_mask=chosen)
            pull = torch.randn_like(out)
            forward += seconds(lambda c=chosen: F.scaled_dot_product_attention(*parts, attn_mask=c))
            backward += seconds(lambda o=out, p=pull: torch.autograd.grad(o, parts, p, retain_graph=True))
        found["attention"][str(length)] = 2 * flops / forward
        found["attention_backward"][str(length)] = 2 * 2.5 * flops / backward
    return found


def _loss(made: _Maker) -> float:
    """FLOP/s of the fused similarities: a whole backward pass of the engine less its two products."""
    rows, cols = (F.normalize(made(16_384, 512), dim=1) for _ in range(2))
    scale = torch.full((), 14.0, device=made.device)
    engine = ops.implementation("auto", rows)[1]
    took = seconds(lambda: engine.statistics(rows, cols, scale, scale, pairs=ops.Pairs(mask_positives=True)))
    return 2 * 16_384**2 * 512 / took


def _convolutions(made: _Maker, matrix: float, bandwidth: float) -> dict[str, Any]:
    """3 x 3 on few pixels is bound by arithmetic, 1 x 1 on many by bytes; patches have a form of their own."""
    shares: dict[str, Any] = {"convolution": {}, "convolution_backward": {}}
    for what, channels, size, kernel in (("arithmetic", 512, 14, 3), ("bytes", 64, 56, 1)):
        images, weight = made(256, channels, size, size, grad=True), made(channels, channels, kernel, kernel, grad=True)
        out = F.conv2d(images, weight, padding=kernel // 2)
        pull = torch.randn_like(out)
        took = seconds(lambda i=images, w=weight, k=kernel: F.conv2d(i, w, padding=k // 2))
        back = seconds(lambda o=out, p=pull, i=images, w=weight: torch.autograd.grad(o, (i, w), p, retain_graph=True))
        flops, moved = 2 * out.numel() * channels * kernel**2, images.nbytes + out.nbytes
        ceiling, work = (matrix, flops) if what == "arithmetic" else (bandwidth, moved)
        shares["convolution"][what] = work / took / ceiling
        more = 2 * flops if what == "arithmetic" else 2 * images.nbytes + out.nbytes
        shares["convolution_backward"][what] = more / back / ceiling
    images, weight = made(512, 3, 224, 224), made(768, 3, 16, 16, grad=True)
    out = F.conv2d(images, weight, stride=16)
    pull = torch.randn_like(out)
    moved = images.nbytes + out.nbytes + weight.nbytes
    shares["patches"] = moved / seconds(lambda: F.conv2d(images, weight, stride=16)) / bandwidth
    back = seconds(lambda: torch.autograd.grad(out, weight, pull, retain_graph=True))
    shares["patches_backward"] = (moved + weight.nbytes) / back / bandwidth
    return shares


def _moving(made: _Maker) -> dict[str, float]:
    """Bytes/s of what is bound by them, counted as a trace counts."""
    rows, size = 65_536, 768
    a, b = (made(rows, size, dtype=torch.float32) for _ in range(2))
    wide, narrow = made(rows, 4 * size), made(rows, size)
    pull = torch.randn_like(wide)
    packed = made(64, 1024, 3, size)
    simple = (
        3 * a.nbytes / seconds(lambda: a + b),
        1.5 * a.nbytes / seconds(lambda: a.bfloat16()),
        2 * wide.nbytes / seconds(lambda: F.gelu(wide)),
        3 * wide.nbytes / seconds(lambda: torch.ops.aten.gelu_backward(pull, wide)),
        2 * packed.nbytes / seconds(lambda: packed.permute(2, 1, 0, 3).contiguous()),
    )
    x = made(rows, size, dtype=torch.float32, grad=True)
    gain, shift = (made(size, dtype=torch.float32, grad=True) for _ in range(2))
    out = F.layer_norm(x, (size,), gain, shift)
    back = seconds(lambda: torch.autograd.grad(out, (x, gain, shift), a, retain_graph=True))
    weights = [made(2048, 2048, dtype=torch.float32, grad=True) for _ in range(24)]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    adam = torch.optim.AdamW(weights, fused=True)
    adam.step()
    return {
        "elementwise": len(simple) / sum(1 / rate for rate in simple),
        "reduction": narrow.nbytes / seconds(lambda: narrow.sum(0)),
        "norm": 2 * x.nbytes / seconds(lambda: F.layer_norm(x, (size,), gain, shift)),
        "norm_backward": 3 * x.nbytes / back,
        "optimizer": 4 * sum(weight.nbytes for weight in weights) / seconds(adam.step),
    }


def _host(device: torch.device) -> tuple[float, float]:
    """Seconds of the host for each kernel of the forward and the backward pass, by a network too small to matter."""
    with torch.device(device):
        layers = nn.Sequential(*(_Block(64) for _ in range(12)))
        x = torch.randn(4, 16, 64)

    def forward() -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return layers(x).sum()

    found = []
    for _ in range(6):
        torch.cuda.synchronize()
        began = time.perf_counter()
        loss = forward()
        middle = time.perf_counter()
        loss.backward()
        torch.cuda.synchronize()
        found.append((middle - began, time.perf_counter() - middle))
        layers.zero_grad(set_to_none=True)
    ahead, back = (sorted(times)[len(times) // 2] for times in zip(*found, strict=True))
    with tracing() as trace:
        small = nn.Sequential(*(_Block(64) for _ in range(12)))
        fake = torch.randn(4, 16, 64)
        trace.start_again()
        with torch.autocast("cpu", torch.bfloat16):
            small(fake).sum().backward()
    backward = sum(count for kernel, count in trace.kernels.items() if kernel.phase == "backward")
    return ahead / (trace.kernels.total() - backward), back / backward


class _Block(nn.Module):
    """A transformer's block."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(size, 4, batch_first=True)
        self.first, self.second = nn.LayerNorm(size), nn.LayerNorm(size)
        self.mlp = nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.second(x))

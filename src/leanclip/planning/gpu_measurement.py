"""The short measurement behind a `Card`: bare operations on the GPU that is here, no model among them."""

import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import combinations_with_replacement, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leanclip import ops
from leanclip.ops.attention import short_attention, short_attention_backward
from leanclip.planning.compiled_cost import traced_compile
from leanclip.planning.gpu_model import LAUNCH, Card, Host, Shares
from leanclip.planning.step_trace import tracing

SIDES = (64, 256, 512, 1024, 2048, 4096)
LONG = 32_768
TILES = (16, 32, 64, 128)
LENGTHS = (16, 32, 50, 77, 197, 257, 577)


def measure(device: torch.device) -> Card:
    """Takes a few seconds and a few GiB."""
    properties: Any = torch.cuda.get_device_properties(device)
    with torch.cuda.device(device), torch.random.fork_rng(devices=[device]):
        torch.manual_seed(0)
        made = _Maker(device)
        matrix, bandwidth = matrix_rate(device, torch.bfloat16), _copy_rate(made)
        host = _host(device)
        moving: dict[str, Any] = {name: rate / bandwidth for name, rate in (_moving(made) | _pooling(made)).items()}
        attention, norms, short = (
            _over(_attention(made), matrix),
            _over(_batch_norms(made), bandwidth),
            _over(_short(made), bandwidth),
        )
        shares = Shares(
            products={f"{a}x{b}": _product(made, a, b) / matrix for a, b in combinations_with_replacement(SIDES, 2)},
            wide=_wide(made) / matrix,
            attention=attention["attention"],
            attention_backward=attention["attention_backward"],
            short_attention=short["short_attention"],
            short_attention_backward=short["short_attention_backward"],
            batch_norm=norms["batch_norm"],
            batch_norm_backward=norms["batch_norm_backward"],
            loss=_loss(made) / matrix,
            **_convolutions(made, matrix, bandwidth),
            **_fused(made, bandwidth),
            **moving,
        )
        torch.cuda.empty_cache()
    return Card(
        name=properties.name,
        memory=properties.total_memory,
        capability=(properties.major, properties.minor),
        processors=properties.multi_processor_count,
        matrix=matrix,
        bandwidth=bandwidth,
        host=host,
        shares=shares,
        measured=True,
    )


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large product on this machine."""
    side = 8192 if device.type == "cuda" and dtype.itemsize == 2 else 4096 if device.type == "cuda" else 1024
    square = torch.randn(side, side, device=device).to(dtype)
    if device.type == "cuda":
        return 2 * side**3 / seconds(lambda: square @ square)
    took = []
    for _ in range(5):
        began = time.perf_counter()
        torch.mm(square, square)
        took.append(time.perf_counter() - began)
    return 2 * side**3 / min(took)


def _copy_rate(made: "_Maker") -> float:
    source = made(1 << 30, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source))


def _over(tables: dict[str, dict[str, float]], ceiling: float) -> dict[str, dict[str, float]]:
    return {name: {key: rate / ceiling for key, rate in table.items()} for name, table in tables.items()}


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
    found = sorted(a.elapsed_time(b) / 1e3 for a, b in pairwise(events))
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
            forward += seconds(partial(F.scaled_dot_product_attention, *parts, attn_mask=chosen))
            backward += seconds(partial(torch.autograd.grad, out, parts, pull, retain_graph=True))
        found["attention"][str(length)] = 2 * flops / forward
        found["attention_backward"][str(length)] = 2 * 2.5 * flops / backward
    return found


def _short(made: _Maker) -> dict[str, dict[str, float]]:
    """Bytes/s of our own attention, heads of 64, by the length of its tiles, which are full."""
    found: dict[str, dict[str, float]] = {"short_attention": {}, "short_attention_backward": {}}
    for length in TILES:
        count, heads = 65_536 // length, 12
        qkv, pull = made(count * length, 3, heads, 64), made(count * length, heads, 64)
        ahead = seconds(partial(short_attention, qkv, None, None, length, length))
        back = seconds(partial(short_attention_backward, qkv, pull, None, None, length, length))
        found["short_attention"][str(length)] = 4 * pull.nbytes / ahead
        found["short_attention_backward"][str(length)] = 7 * pull.nbytes / back
    return found


def _between_products(
    x: Tensor, y: Tensor, wide: Tensor, bias: Tensor, gain: Tensor, shift: Tensor
) -> tuple[Tensor, ...]:
    """What a transformer's block does between its products."""
    x = x + (y + bias)
    return x, F.layer_norm(x, gain.shape, gain, shift).to(y.dtype), F.gelu(wide)


def _fused(made: _Maker, bandwidth: float) -> dict[str, float]:
    """Shares of the bandwidth that compiled code reaches, its bytes counted as a trace counts them."""

    def given(make: Callable[..., Tensor]) -> list[Tensor]:
        rows, size = 65_536, 768
        shapes = ((rows, size), torch.float32), ((rows, size), torch.bfloat16), ((rows, 4 * size), torch.bfloat16)
        vectors = (((size,), dtype) for dtype in (torch.bfloat16, torch.float32, torch.float32))
        return [make(*shape, dtype=dtype).requires_grad_() for shape, dtype in (*shapes, *vectors)]

    values = given(made)
    compiled = torch.compile(_between_products)
    outputs = compiled(*values)
    pulls = [torch.randn_like(each) for each in outputs]
    took = (
        seconds(lambda: compiled(*values)),
        seconds(lambda: torch.autograd.grad(outputs, values, pulls, retain_graph=True)),
    )
    with tracing() as trace:
        fakes = given(lambda *shape, dtype: torch.empty(shape, dtype=dtype))
        trace.start_again()
        ahead = traced_compile(_between_products)(*fakes)
        torch.autograd.grad(ahead, fakes, [torch.empty_like(each) for each in ahead])
    moved: Counter[tuple[str, bool]] = Counter()
    for kernel, count in trace.kernels.items():
        moved[kernel.kind, kernel.phase == "backward"] += count * kernel.bytes
    fused = moved["fused", False] / took[0]
    sums = max(took[1] - moved["fused", True] / fused, 0.1 * took[1])
    return {"fused": fused / bandwidth, "fused_sums": moved["fused sums", True] / sums / bandwidth}


def _loss(made: _Maker) -> float:
    """FLOP/s of the fused similarities: a whole backward pass of the engine less its two products."""
    rows, cols = (F.normalize(made(16_384, 512), dim=1) for _ in range(2))
    scale = torch.full((), 14.0, device=made.device)
    engine = ops.implementation("auto", rows)[1]
    pairs = ops.Pairs(rows=rows, cols=cols, mask_positives=True)
    took = seconds(lambda: engine.statistics(pairs, scale, scale))
    return 2 * 16_384**2 * 512 / took


def _convolutions(made: _Maker, matrix: float, bandwidth: float) -> dict[str, Any]:
    """Shares of both ceilings such that arithmetic and bytes, one after the other, come nearest to what four shapes
    take; patches and convolutions of single channels have forms of their own."""
    work = []
    for channels, size, kernel in ((64, 56, 1), (64, 56, 3), (256, 28, 3), (512, 14, 3)):
        work.append(_convolution(made, (256, channels, size, size), (channels, channels, kernel, kernel)))
    shares: dict[str, Any] = {}
    for at, name in ((1, "convolution"), (2, "convolution_backward")):
        flops = torch.tensor([[entry[0] * at / matrix, entry[2 + at] / bandwidth] for entry in work])
        took = torch.tensor([entry[at] for entry in work])
        # Relative errors; neither share above 1.
        found = (
            torch.linalg.lstsq(flops / took[:, None], torch.ones_like(took)[:, None]).solution[:, 0].clamp_min(1.0)
        )
        shares[name] = {"arithmetic": 1 / float(found[0]), "bytes": 1 / float(found[1])}
    patches = [_convolution(made, (512, 3, 224, 224), (768, 3, size, size), stride=size) for size in (16, 32)]
    flops, ahead, back = (sum(entry[at] for entry in patches) for at in range(3))
    shares |= {"patches": flops / ahead / matrix, "patches_backward": flops / back / matrix}
    # Single channels stand last in memory where models use them (ConvNeXt), which is several times faster.
    _, ahead, back, moved, moved_back = _convolution(made, (128, 256, 28, 28), (256, 1, 7, 7), groups=256, last=True)
    shares |= {"depthwise": moved / ahead / bandwidth, "depthwise_backward": moved_back / back / bandwidth}
    return shares


def _convolution(
    made: _Maker,
    images_shape: tuple[int, ...],
    weight_shape: tuple[int, ...],
    *,
    stride: int = 1,
    groups: int = 1,
    last: bool = False,
) -> tuple[float, float, float, float, float]:
    """Arithmetic of the forward pass, seconds of both passes, and bytes of both as a trace counts them."""
    images = made(*images_shape)
    images = images.to(memory_format=torch.channels_last) if last else images
    images.requires_grad_(stride == 1)
    weight = made(*weight_shape, grad=True)
    padding = weight_shape[-1] // 2 if stride == 1 else 0

    def run() -> Tensor:
        return F.conv2d(images, weight, stride=stride, padding=padding, groups=groups)

    out = run()
    pull = torch.randn_like(out)
    wanted = [part for part in (images, weight) if part.requires_grad]
    back = seconds(lambda: torch.autograd.grad(out, wanted, pull, retain_graph=True))
    moved = images.nbytes + weight.nbytes + out.nbytes
    return (
        2.0 * out.numel() * weight[0].numel(), seconds(run), back, moved,
        moved + sum(part.nbytes for part in wanted),
    )  # fmt: skip


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


def _batch_norms(made: _Maker) -> dict[str, dict[str, float]]:
    """Bytes/s by channels, each of which one block of threads sums; and of the pooling beside them."""
    found: dict[str, dict[str, float]] = {"batch_norm": {}, "batch_norm_backward": {}}
    for channels, size in ((32, 56), (64, 56), (256, 28), (1024, 14), (2048, 7)):
        images = made(256, channels, size, size, grad=True)
        gains = [made(channels, dtype=torch.float32, grad=True) for _ in range(2)]
        run = partial(F.batch_norm, images, None, None, *gains, training=True)
        out = run()
        pull = torch.randn_like(out)
        back = seconds(partial(torch.autograd.grad, out, (images, *gains), pull, retain_graph=True))
        found["batch_norm"][str(channels)] = 2 * images.nbytes / seconds(run)
        found["batch_norm_backward"][str(channels)] = 3 * images.nbytes / back
    return found


def _pooling(made: _Maker) -> dict[str, float]:
    images = made(256, 128, 56, 56, grad=True)
    out = F.avg_pool2d(images, 2)
    pull = torch.randn_like(out)
    back = seconds(lambda: torch.autograd.grad(out, images, pull, retain_graph=True))
    return {
        "pooling": 1.25 * images.nbytes / seconds(lambda: F.avg_pool2d(images, 2)),
        "pooling_backward": 2.25 * images.nbytes / back,
    }


def _host(device: torch.device) -> Host:
    """What the host takes for each kernel and parameter, by a network too small to matter, compiled and not."""
    with torch.device(device):
        layers = nn.ModuleList(_Block(64) for _ in range(12))
        x = torch.randn(4, 16, 64)
    optimizer = torch.optim.AdamW(layers.parameters(), fused=True)
    compiled = torch.compile(_run)

    def step(run: Callable[[nn.Module, Tensor], Tensor]) -> list[float]:
        torch.cuda.synchronize()
        marks = [time.perf_counter()]
        with torch.autocast("cuda", torch.bfloat16):
            loss = _through(layers, x, run)
        marks.append(time.perf_counter())
        loss.backward()
        torch.cuda.synchronize()
        marks.append(time.perf_counter())
        bool(torch.isfinite(nn.utils.clip_grad_norm_(layers.parameters(), torch.inf)))
        marks.append(time.perf_counter())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        marks.append(time.perf_counter())
        return [b - a for a, b in pairwise(marks)]

    ahead, back, norm, rest = _medians([step(_run) for _ in range(8)])
    fast_ahead, fast_back, _, _ = _medians([step(compiled) for _ in range(8)])
    parameters = sum(1 for _ in layers.parameters())
    (forward, backward), (fast_forward, fast_backward) = _launches(compiled=False), _launches(compiled=True)
    return Host(
        forward=ahead / forward,
        backward=back / backward,
        compiled=(fast_ahead + fast_back) / (fast_forward + fast_backward),
        norm=norm / parameters,
        optimizer=rest / parameters,
    )


def _medians(rows: list[list[float]]) -> list[float]:
    return [sorted(times)[len(times) // 2] for times in zip(*rows, strict=True)]


def _launches(*, compiled: bool) -> tuple[int, int]:
    """Kernels of both passes as a trace counts them."""
    with tracing() as trace:
        layers = nn.ModuleList(_Block(64) for _ in range(12))
        x = torch.randn(4, 16, 64)
        trace.start_again()
        with torch.autocast("cpu", torch.bfloat16):
            loss = _through(layers, x, traced_compile(_run) if compiled else _run)
        loss.backward()
    backward = sum(count for kernel, count in trace.kernels.items() if kernel.phase == "backward")
    return trace.kernels.total() - backward, backward


def _through(layers: nn.ModuleList, x: Tensor, run: Callable[[nn.Module, Tensor], Tensor]) -> Tensor:
    for layer in layers:
        x = run(layer, x)
    return x.sum()


def _run(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)


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

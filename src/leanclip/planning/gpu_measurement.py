"""The short measurement behind a `GpuModel`: bare operations on the GPU of this machine, no model among them."""

import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import combinations_with_replacement, pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leanclip import ops
from leanclip.filesystem import cache_directory
from leanclip.ops.attention import short_attention, short_attention_backward
from leanclip.planning.compiled_cost import traced_compile
from leanclip.planning.gpu_model import LAUNCH, GpuModel, Host, read_gpu, write_gpu
from leanclip.planning.step_trace import launches, tracing

SIDES = (64, 256, 512, 1024, 2048, 4096)
LONG = 32_768
TILES = (16, 32, 64, 128)
LENGTHS = (16, 32, 50, 77, 197, 257, 577)
TOKENS, WIDTH, HEADS = 65_536, 768, 12
BF16, FP32 = torch.bfloat16, torch.float32


def calibrated(device: torch.device, *, again: bool = False) -> GpuModel:
    """The GPU of this machine, measured in a few seconds the first time and then read from the cache directory."""
    name, version = torch.cuda.get_device_name(device), torch.__version__.split("+")[0]
    path = cache_directory() / "gpus" / f"{name.replace(' ', '-')}-torch{version}.json"
    if path.is_file() and not again:
        return read_gpu(path)
    gpu = measure(device)
    write_gpu(gpu, path)
    return gpu


def measure(device: torch.device) -> GpuModel:
    """Takes a few seconds and a few GiB."""
    properties: Any = torch.cuda.get_device_properties(device)
    with torch.cuda.device(device), torch.device(device), torch.random.fork_rng(devices=[device]):
        torch.manual_seed(0)
        matrix, bandwidth, host = matrix_rate(device, BF16), _copy_rate(), _host()
        shares = {
            "matrix": {f"{a}x{b}": _product_rate(a, b) / matrix for a, b in combinations_with_replacement(SIDES, 2)},
            "float32": matrix_rate(device, FP32) / matrix,
            "loss": _loss_rate() / matrix,
            **_divided(_attention_rates(), matrix),
            **_convolution_shares(matrix, bandwidth),
            **_divided(_bandwidths(), bandwidth),
        }
        torch.cuda.empty_cache()
    return GpuModel(
        name=properties.name,
        memory=properties.total_memory,
        capability=(properties.major, properties.minor),
        processors=properties.multi_processor_count,
        matrix_rate=matrix,
        bandwidth=bandwidth,
        host=host,
        shares=shares,
        measured=True,
    )


def _divided(rates: dict[str, Any], ceiling: float) -> dict[str, Any]:
    return {name: _divided(r, ceiling) if isinstance(r, dict) else r / ceiling for name, r in rates.items()}


def seconds(call: Callable[[], object], repeats: int = 7) -> float:
    """Median on the device, less the gap that every kernel is charged; on a CPU the shortest time."""
    if not torch.cuda.is_available():
        marks = [time.perf_counter()]
        for _ in range(repeats):
            call()
            marks.append(time.perf_counter())
        return min(b - a for a, b in pairwise(marks))
    for _ in range(2):
        call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    torch.cuda._sleep(6_000_000)  # so that the host is ahead
    for event in events[:-1]:
        event.record()
        call()
    events[-1].record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) / 1e3 for a, b in pairwise(events))
    return max(times[len(times) // 2] - LAUNCH, 1e-7)


class Passes(NamedTuple):
    """Seconds of both passes, and bytes as a trace counts them."""

    forward: float
    backward: float
    forward_bytes: int
    backward_bytes: int


def _passes(call: Callable[..., Any], *inputs: Tensor) -> Passes:
    outputs: Any = call(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    gradients = [torch.randn_like(output) for output in outputs]
    trained = [tensor for tensor in inputs if tensor.requires_grad]
    moved = sum(tensor.nbytes for tensor in (*inputs, *outputs))
    return Passes(
        seconds(lambda: call(*inputs)),
        seconds(lambda: torch.autograd.grad(outputs, trained, gradients, retain_graph=True)),
        moved,
        moved + sum(tensor.nbytes for tensor in trained),
    )


def _random(*shape: int, dtype: torch.dtype = BF16, grad: bool = False) -> Tensor:
    return torch.randn(shape, dtype=dtype).requires_grad_(grad)


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large product on this machine."""
    side = 1024 if device.type == "cpu" else 8192 if dtype.itemsize == 2 else 4096
    square = torch.randn(side, side, device=device).to(dtype)
    return 2 * side**3 / seconds(lambda: square @ square)


def _copy_rate() -> float:
    source = torch.randint(255, (1 << 30,), dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source))


def _product_rate(small: int, middle: int) -> float:
    """FLOP/s of products with one long side: the rows, or the side that is summed over."""
    rows, factor, other = _random(LONG, small), _random(small, middle), _random(LONG, middle)
    return 4 * LONG * small * middle / (seconds(lambda: rows @ factor) + seconds(lambda: rows.T @ other))


def _attention_rates() -> dict[str, dict[str, float]]:
    """FLOP/s by length, heads of 64; the mean of attention with a causal mask and without."""
    forward, backward = {}, {}
    for length in LENGTHS:
        batch = max(1, TOKENS // length)
        # As the attention layers of the towers hold them: length first, then batch.
        packed = _random(3, length, batch, HEADS * 64)
        parts = [part.view(length, batch, HEADS, 64).permute(1, 2, 0, 3).requires_grad_() for part in packed]
        mask = torch.full((length, length), -torch.inf).triu_(1).bfloat16()
        timed = [
            _passes(partial(F.scaled_dot_product_attention, attn_mask=attn_mask), *parts)
            for attn_mask in (None, mask)
        ]
        flops = 4 * batch * HEADS * length * length * 64
        forward[str(length)] = 2 * flops / sum(passes.forward for passes in timed)
        backward[str(length)] = 2 * 2.5 * flops / sum(passes.backward for passes in timed)
    return {"attention": forward, "attention backward": backward}


def _short_attention_bandwidths() -> dict[str, dict[str, float]]:
    """Our own attention, heads of 64, by the length of its tiles, which are full."""
    forward, backward = {}, {}
    for length in TILES:
        qkv, gradient = _random(TOKENS, 3, HEADS, 64), _random(TOKENS, HEADS, 64)
        ahead = seconds(partial(short_attention, qkv, None, None, length, length))
        back = seconds(partial(short_attention_backward, qkv, gradient, None, None, length, length))
        forward[str(length)], backward[str(length)] = 4 * gradient.nbytes / ahead, 7 * gradient.nbytes / back
    return {"short attention": forward, "short attention backward": backward}


def _loss_rate() -> float:
    """FLOP/s of the fused similarities."""
    rows, cols = (F.normalize(_random(16_384, 512), dim=1) for _ in range(2))
    scale = torch.full((), 14.0)
    engine = ops.implementation("auto", rows)[1]
    pairs = ops.Pairs(rows=rows, cols=cols, mask_positives=True)
    return 2 * 16_384**2 * 512 / seconds(lambda: engine.statistics(pairs, scale, scale))


def _convolution_shares(matrix: float, bandwidth: float) -> dict[str, Any]:
    """Shares of both ceilings with which arithmetic and bytes, one after the other, come nearest to the times of four
    shapes. Convolutions that cut patches, and depthwise ones, have shares of their own."""

    def timed(images: Tensor, *weight: int, **options: int) -> tuple[float, Passes]:
        kernel = _random(*weight, grad=True)
        call = partial(F.conv2d, **options)
        return 2.0 * call(images, kernel).numel() * kernel[0].numel(), _passes(call, images, kernel)

    square = [
        timed(_random(256, channels, size, size, grad=True), channels, channels, side, side, padding=side // 2)
        for channels, size, side in ((64, 56, 1), (64, 56, 3), (256, 28, 3), (512, 14, 3))
    ]
    forward = [(flops / matrix, p.forward_bytes / bandwidth, p.forward) for flops, p in square]
    backward = [(2 * flops / matrix, p.backward_bytes / bandwidth, p.backward) for flops, p in square]
    patches = [timed(_random(512, 3, 224, 224), WIDTH, 3, side, side, stride=side) for side in (16, 32)]
    flops = sum(work for work, _ in patches)
    # Channels are last in memory where models use depthwise convolutions (ConvNeXt), which is several times faster.
    images = _random(128, 256, 28, 28).to(memory_format=torch.channels_last).requires_grad_()
    _, depthwise = timed(images, 256, 1, 7, 7, padding=3, groups=256)
    return {
        "convolution": _two_shares(forward),
        "convolution backward": _two_shares(backward),
        "patches": flops / sum(p.forward for _, p in patches) / matrix,
        "patches backward": flops / sum(p.backward for _, p in patches) / matrix,
        "depthwise": depthwise.forward_bytes / depthwise.forward / bandwidth,
        "depthwise backward": depthwise.backward_bytes / depthwise.backward / bandwidth,
    }


def _two_shares(timed: list[tuple[float, float, float]]) -> dict[str, float]:
    """From ideal arithmetic, ideal bytes and time of several shapes: least relative errors, no share above 1."""
    ideal = torch.tensor([[arithmetic / took, moved / took] for arithmetic, moved, took in timed], device="cpu")
    solution = torch.linalg.lstsq(ideal, torch.ones(len(timed), 1, device="cpu")).solution[:, 0].clamp_min(1.0)
    return {"arithmetic": 1 / float(solution[0]), "bytes": 1 / float(solution[1])}


def _bandwidths() -> dict[str, Any]:
    """Bytes/s of kernels that are bound by them, counted as a trace counts."""
    a, b = (_random(TOKENS, WIDTH, dtype=FP32) for _ in range(2))
    wide, narrow, packed = _random(TOKENS, 4 * WIDTH), _random(TOKENS, WIDTH), _random(64, 1024, 3, WIDTH)
    gradient = torch.randn_like(wide)
    elementwise = (
        3 * a.nbytes / seconds(lambda: a + b),
        1.5 * a.nbytes / seconds(lambda: a.bfloat16()),
        2 * wide.nbytes / seconds(lambda: F.gelu(wide)),
        3 * wide.nbytes / seconds(lambda: torch.ops.aten.gelu_backward(gradient, wide)),
        2 * packed.nbytes / seconds(lambda: packed.permute(2, 1, 0, 3).contiguous()),
    )
    gain, shift = (_random(WIDTH, dtype=FP32, grad=True) for _ in range(2))
    norm = _passes(lambda x, *affine: F.layer_norm(x, (WIDTH,), *affine), a.requires_grad_(), gain, shift)
    images = _random(256, 128, 56, 56, grad=True)
    pooling = _passes(partial(F.avg_pool2d, kernel_size=2), images)
    return {
        "elementwise": len(elementwise) / sum(1 / rate for rate in elementwise),
        "reduction": narrow.nbytes / seconds(lambda: narrow.sum(0)),
        "norm": 2 * a.nbytes / norm.forward,
        "norm backward": 3 * a.nbytes / norm.backward,
        "pooling": 1.25 * images.nbytes / pooling.forward,
        "pooling backward": 2.25 * images.nbytes / pooling.backward,
        "optimizer": _optimizer_bandwidth(),
        **_batch_norm_bandwidths(),
        **_short_attention_bandwidths(),
        **_fused_bandwidths(),
    }


def _optimizer_bandwidth() -> float:
    weights = [_random(2048, 2048, dtype=FP32, grad=True) for _ in range(24)]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    adam = torch.optim.AdamW(weights, fused=True)
    adam.step()
    return 4 * sum(weight.nbytes for weight in weights) / seconds(adam.step)


def _batch_norm_bandwidths() -> dict[str, dict[str, float]]:
    """By channels, each of which one block of threads sums."""
    forward, backward = {}, {}
    for channels, size in ((32, 56), (64, 56), (256, 28), (1024, 14), (2048, 7)):
        images = _random(256, channels, size, size, grad=True)
        gains = [_random(channels, dtype=FP32, grad=True) for _ in range(2)]
        timed = _passes(lambda x, *affine: F.batch_norm(x, None, None, *affine, training=True), images, *gains)
        forward[str(channels)] = 2 * images.nbytes / timed.forward
        backward[str(channels)] = 3 * images.nbytes / timed.backward
    return {"batch norm": forward, "batch norm backward": backward}


def _between_products(
    x: Tensor, y: Tensor, wide: Tensor, bias: Tensor, gain: Tensor, shift: Tensor
) -> tuple[Tensor, ...]:
    """What a transformer block computes between its products."""
    x = x + (y + bias)
    return x, F.layer_norm(x, gain.shape, gain, shift).to(y.dtype), F.gelu(wide)


def _fused_bandwidths() -> dict[str, float]:
    """Of compiled code, its bytes counted as a trace counts them."""

    def inputs() -> list[Tensor]:
        shapes = ((TOKENS, WIDTH), FP32), ((TOKENS, WIDTH), BF16), ((TOKENS, 4 * WIDTH), BF16)
        vectors = (((WIDTH,), dtype) for dtype in (BF16, FP32, FP32))
        return [_random(*shape, dtype=dtype, grad=True) for shape, dtype in (*shapes, *vectors)]

    timed = _passes(torch.compile(_between_products), *inputs())
    with torch.device("cpu"), tracing() as trace:
        tensors = inputs()
        trace.start_again()
        outputs = traced_compile(_between_products)(*tensors)
        trace.phase = "backward"
        torch.autograd.grad(outputs, tensors, [torch.empty_like(output) for output in outputs])
    moved: Counter[tuple[str, str]] = Counter()
    for kernel, count in trace.kernels.items():
        moved[kernel.kind, kernel.phase] += count * kernel.bytes
    fused = moved["fused", "other"] / timed.forward
    sums = max(timed.backward - moved["fused", "backward"] / fused, 0.1 * timed.backward)
    return {"fused": fused, "fused sums": moved["fused sums", "backward"] / sums}


def _host() -> Host:
    """Launch times of the host, by a network whose kernels are too small to matter, compiled and not."""
    layers, x = _small_network()
    optimizer = torch.optim.AdamW(layers.parameters(), fused=True)

    def step(run: Callable[[nn.Module, Tensor], Tensor]) -> list[float]:
        torch.cuda.synchronize()
        marks = [time.perf_counter()]
        with torch.autocast("cuda", BF16):
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

    def median_step(run: Callable[[nn.Module, Tensor], Tensor]) -> list[float]:
        return [sorted(times)[4] for times in zip(*(step(run) for _ in range(8)), strict=True)]

    eager, compiled = median_step(_run), median_step(torch.compile(_run))
    counts, compiled_counts = _launches(_run), _launches(traced_compile(_run))
    parameters = sum(1 for _ in layers.parameters())
    return Host(
        forward=eager[0] / counts["other"],
        backward=eager[1] / counts["backward"],
        compiled=sum(compiled[:2]) / compiled_counts.total(),
        norm=eager[2] / parameters,
        optimizer=eager[3] / parameters,
    )


def _launches(run: Callable[[nn.Module, Tensor], Tensor]) -> Counter[str]:
    """Kernels of both passes as a trace counts them."""
    with torch.device("cpu"), tracing() as trace:
        layers, x = _small_network()
        trace.start_again()
        with torch.autocast("cpu", BF16):
            loss = _through(layers, x, run)
        trace.phase = "backward"
        loss.backward()
    return launches(trace.kernels)


def _small_network() -> tuple[nn.ModuleList, Tensor]:
    options: dict[str, Any] = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
    return nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 256, **options) for _ in range(12)), torch.randn(4, 16, 64)


def _through(layers: nn.ModuleList, x: Tensor, run: Callable[[nn.Module, Tensor], Tensor]) -> Tensor:
    for layer in layers:
        x = run(layer, x)
    return x.sum()


def _run(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)

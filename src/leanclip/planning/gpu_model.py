"""How long kernels take on a GPU: a roofline with measured efficiencies.

A kernel takes the longer of its arithmetic over the matrix rate and its bytes over the bandwidth, each times the
share of that ceiling which such a kernel reaches. The shares in h200.json were measured on an H200 by timing bare
operations, no model among them, and stand for all GPUs. Both rates are measured on the GPU of this machine
(`measured_gpu`); of other GPUs they are the nominal ones, scaled by what an H200 reaches of its own.
"""

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from leanclip.errors import UserError
from leanclip.planning.step_prediction import Predicted
from leanclip.planning.step_trace import Kernel, launches

LAUNCH = 2.5e-6  # seconds between two kernels, at least
REFERENCE = Path(__file__).parent / "h200.json"
BOUND_BY_ARITHMETIC = ("attention", "attention backward", "loss", "patches", "patches backward")


class Nominal(NamedTuple):
    """A data sheet's figures, for dense 16-bit products."""

    memory: float  # GB as sold
    tflops: float
    bandwidth: float  # TB/s
    capability: tuple[int, int]
    processors: int
    nvlink: bool = True  # between all GPUs of a host


GPUS = {
    "H200": Nominal(141, 989, 4.8, (9, 0), 132),
    "H100": Nominal(80, 989, 3.35, (9, 0), 132),
    "H100-PCIe": Nominal(80, 756, 2.0, (9, 0), 114, nvlink=False),
    "A100-80GB": Nominal(80, 312, 2.04, (8, 0), 108),
    "A100-40GB": Nominal(40, 312, 1.56, (8, 0), 108),
    "A40": Nominal(48, 150, 0.70, (8, 6), 84, nvlink=False),
    "A10": Nominal(24, 125, 0.60, (8, 6), 72, nvlink=False),
    "L40S": Nominal(48, 362, 0.86, (8, 9), 142, nvlink=False),
    "L4": Nominal(24, 121, 0.30, (8, 9), 58, nvlink=False),
    "RTX4090": Nominal(24, 165, 1.01, (8, 9), 128, nvlink=False),
    "RTX3090": Nominal(24, 71, 0.94, (8, 6), 82, nvlink=False),
}


@dataclass(frozen=True, kw_only=True)
class Host:
    """Seconds that the host takes to launch."""

    forward: float  # one kernel
    backward: float
    compiled: float  # one kernel of a compiled block, in either pass
    norm: float  # the gradient norm, per parameter
    optimizer: float  # per parameter, while the device waits: a step reads whether its loss is finite


@dataclass(frozen=True, kw_only=True)
class GpuModel:
    name: str
    memory: int  # bytes
    capability: tuple[int, int]
    processors: int
    matrix_rate: float  # FLOP/s of a large bf16 product
    bandwidth: float  # bytes/s of a large copy, read and written
    host: Host
    shares: Mapping[str, Any]
    """What each kind of kernel reaches of the matrix rate (products, BOUND_BY_ARITHMETIC) or the bandwidth (others).

    A number; or a table by the two smaller sides of a product, the length of attention or the channels
    of a batch norm; convolutions have both shares. "float32" is the share of the matrix rate of float32 products.
    """
    measured: bool

    def seconds(self, kernel: Kernel) -> float:
        """Of one kernel on the device."""
        kind, share = kernel.kind, self.shares[kernel.kind]
        precision = 1.0 if kernel.itemsize <= 2 else self.shares["float32"]
        arithmetic, moved = kernel.flops / self.matrix_rate / precision, kernel.bytes / self.bandwidth
        if kind == "matrix":
            share = _product_share(share, kernel.shape) if kernel.itemsize <= 2 else 1.0
            return LAUNCH + max(arithmetic / share, moved / self.shares["elementwise"])
        if kind.startswith("convolution"):
            return LAUNCH + arithmetic / share["arithmetic"] + moved / share["bytes"]
        if kind.startswith("short attention"):
            moved = tile_bytes(kernel) / self.bandwidth
        if not isinstance(share, float):
            share = _interpolated(share, kernel.shape[0 if kind.startswith("batch norm") else 2])
        return LAUNCH + (arithmetic if kind in BOUND_BY_ARITHMETIC else moved) / share

    def times(self, kernels: Counter[Kernel]) -> dict[str, float]:
        """Seconds on the device by phase."""
        seconds = dict.fromkeys((kernel.phase for kernel in kernels), 0.0)
        for kernel, count in kernels.items():
            seconds[kernel.phase] += count * self.seconds(kernel)
        return seconds

    def launching(self, step: Predicted) -> float:
        """Seconds in which the host launches everything up to the optimizer. A CUDA graph takes none."""
        phases = launches(step.kernels)
        host, forward, backward = self.host, phases["image tower"] + phases["text tower"], phases["backward"]
        others = phases.total() - forward - backward - phases["optimizer"]
        seconds = host.norm * step.parameters + host.forward * others
        if step.cuda_graph:
            return seconds - host.forward * phases["loss"]  # which the graph contains
        if step.compiled:
            return seconds + host.compiled * (forward + backward)
        return seconds + host.forward * forward + host.backward * backward

    def step(self, step: Predicted) -> float:
        """Seconds of a step: those of the device, or of the host if it launches more slowly, and the wait between."""
        device = sum(self.times(step.kernels).values())
        return max(device, self.launching(step)) + self.host.optimizer * step.parameters

    @property
    def source(self) -> str:
        return (
            "rates measured on this GPU"
            if self.measured
            else "nominal figures, at the share an H200 reaches of its own"
        )


def tile_bytes(kernel: Kernel) -> int:
    """What our attention moves if all tiles are full: queries, keys, values and outputs, or all gradients."""
    passes = 4 if kernel.kind == "short attention" else 7
    return passes * math.prod(kernel.shape) * kernel.itemsize


def _product_share(table: Mapping[str, Mapping[str, float]], shape: tuple[int, ...]) -> float:
    """By the two smaller sides, linearly between the logarithms of those measured."""
    small, middle = sorted(shape[1:])[:2]
    return _interpolated({side: _interpolated(row, small) for side, row in table.items()}, middle)


def _interpolated(table: Mapping[str, float], value: int) -> float:
    """Linearly between the logarithms of the two nearest entries; beyond them the last."""
    known = sorted(map(int, table))
    value = min(max(value, known[0]), known[-1])
    high = next(entry for entry in known if entry >= value)
    low = max(entry for entry in known if entry <= value)
    share = 0.0 if low == high else math.log(value / low) / math.log(high / low)
    return (1 - share) * table[str(low)] + share * table[str(high)]


def read_gpu(path: Path) -> GpuModel:
    stored = json.loads(path.read_text())
    return GpuModel(**stored | {"capability": tuple(stored["capability"]), "host": Host(**stored["host"])})


def gpu_named(name: str) -> GpuModel:
    """A known GPU, by its nominal figures."""
    known = {key.lower(): key for key in GPUS}.get(name.lower())
    if known is None:
        raise UserError(f"unknown --gpu {name!r}; choose from {', '.join(GPUS)}", code="plan.unknown_gpu")
    nominal, reference, base = GPUS[known], read_gpu(REFERENCE), GPUS["H200"]
    return replace(
        reference,
        name=known,
        memory=int(nominal.memory * 1e9),
        capability=nominal.capability,
        processors=nominal.processors,
        matrix_rate=reference.matrix_rate * nominal.tflops / base.tflops,
        bandwidth=reference.bandwidth * nominal.bandwidth / base.bandwidth,
        measured=False,
    )


def measured_gpu(device: torch.device) -> GpuModel:
    """Takes about a second and 2 GiB."""
    properties: Any = torch.cuda.get_device_properties(device)
    gpu = replace(
        read_gpu(REFERENCE),
        name=properties.name,
        memory=properties.total_memory,
        capability=(properties.major, properties.minor),
        processors=properties.multi_processor_count,
        matrix_rate=matrix_rate(device, torch.bfloat16),
        bandwidth=copy_rate(device),
    )
    torch.cuda.empty_cache()
    return gpu


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large product on this machine."""
    side = 1024 if device.type == "cpu" else 8192 if dtype.itemsize == 2 else 4096
    square = torch.randn(side, side, device=device).to(dtype)
    return 2 * side**3 / seconds(lambda: square @ square)


def copy_rate(device: torch.device) -> float:
    """Bytes/s of a large copy, read and written."""
    source = torch.zeros(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source))


def seconds(call: Callable[[], object]) -> float:
    """The shortest of several runs."""
    times = []
    for _ in range(8):  # the first one warms up
        began = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return min(times)

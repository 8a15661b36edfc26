"""How long kernels take on a GPU: a roofline whose two ceilings and efficiencies were measured, here or on an H200.

A kernel takes the longer of its arithmetic over the matrix rate and its bytes over the bandwidth, each times the
share of the ceiling that such a kernel reaches. The shares come from `measure.py`, which times bare operations and no
model; what this machine's GPU gave is kept in the cache directory. Cards that are not here take their nominal
ceilings, the share of them that an H200 reaches, and its shares.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from leanclip.errors import UserError
from leanclip.filesystem import cache_directory
from leanclip.planning.step_trace import Kernel

LAUNCH = 2.5e-6  # seconds between two kernels, at the least


REFERENCE = Path(__file__).parent / "h200.json"


class Nominal(NamedTuple):
    """A data sheet's figures, for dense 16-bit products."""

    memory: float  # GB as sold
    tflops: float
    bandwidth: float  # TB/s
    capability: tuple[int, int]
    processors: int


CARDS = {
    "H200": Nominal(141, 989, 4.8, (9, 0), 132),
    "H100": Nominal(80, 989, 3.35, (9, 0), 132),
    "H100-PCIe": Nominal(80, 756, 2.0, (9, 0), 114),
    "A100-80GB": Nominal(80, 312, 2.04, (8, 0), 108),
    "A100-40GB": Nominal(40, 312, 1.56, (8, 0), 108),
    "A40": Nominal(48, 150, 0.70, (8, 6), 84),
    "A10": Nominal(24, 125, 0.60, (8, 6), 72),
    "L40S": Nominal(48, 362, 0.86, (8, 9), 142),
    "L4": Nominal(24, 121, 0.30, (8, 9), 58),
    "RTX4090": Nominal(24, 165, 1.01, (8, 9), 128),
    "RTX3090": Nominal(24, 71, 0.94, (8, 6), 82),
}


@dataclass(frozen=True, kw_only=True)
class Shares:
    """What kinds of kernels reach of the two ceilings."""

    products: Mapping[str, float]  # of the matrix rate, by the two smaller sides of a 16-bit product: "512x2048"
    wide: float  # of the matrix rate, by float32 products
    attention: Mapping[str, float]  # of the matrix rate, by length
    attention_backward: Mapping[str, float]
    short_attention: Mapping[str, float]  # of the bandwidth, if all tiles were full, by their length
    short_attention_backward: Mapping[str, float]
    loss: float  # of the matrix rate, by the loss's fused similarities
    convolution: Mapping[str, float]  # of the matrix rate ("arithmetic") and of the bandwidth ("bytes"), in turn
    convolution_backward: Mapping[str, float]
    patches: float  # of the matrix rate, by convolutions that cut an image into patches
    patches_backward: float
    elementwise: float  # of the bandwidth, as all below
    fused: float  # what the compiler makes of several
    fused_sums: float  # and of sums over rows
    reduction: float
    norm: float
    norm_backward: float
    depthwise: float  # convolutions of single channels
    depthwise_backward: float
    pooling: float
    pooling_backward: float
    batch_norm: Mapping[str, float]  # by channels
    batch_norm_backward: Mapping[str, float]
    optimizer: float


@dataclass(frozen=True, kw_only=True)
class Host:
    """Seconds that the host takes to launch."""

    forward: float  # each kernel
    backward: float
    compiled: float  # of blocks that are compiled, in both passes
    norm: float  # for each parameter, of the gradients' norm
    optimizer: float  # for each parameter, while the device waits: a step reads whether its loss is finite


class Step(Protocol):
    """What of a traced step decides its time."""

    @property
    def kernels(self) -> Counter[Kernel]: ...
    @property
    def parameters(self) -> int: ...  # trained tensors
    @property
    def compiled(self) -> bool: ...  # the towers' blocks
    @property
    def recorded(self) -> bool: ...  # as a CUDA graph, up to the gradients


@dataclass(frozen=True, kw_only=True)
class Card:
    name: str
    memory: int  # bytes
    capability: tuple[int, int]
    processors: int
    matrix: float  # FLOP/s of a large bf16 product
    bandwidth: float  # bytes/s of a large copy, read and written
    host: Host
    shares: Shares
    measured: bool

    def seconds(self, kernel: Kernel) -> float:
        """Of one kernel on the device."""
        share, kind = self.shares, kernel.kind
        moved = kernel.bytes / self.bandwidth
        if kind == "matrix":
            reached = share.wide if kernel.itemsize > 2 else _product_share(share.products, kernel.shape)
            time = max(kernel.flops / (self.matrix * reached), moved / share.elementwise)
        elif kind in ("attention", "attention backward"):
            table = share.attention if kind == "attention" else share.attention_backward
            reached = _between(table, kernel.shape[2]) * (1 if kernel.itemsize <= 2 else share.wide)
            time = kernel.flops / (self.matrix * reached)
        elif kind in ("short attention", "short attention backward"):
            table = share.short_attention if kind == "short attention" else share.short_attention_backward
            time = tile_bytes(kernel) / (self.bandwidth * _between(table, kernel.shape[2]))
        elif kind in ("loss", "patches", "patches backward"):
            reached = getattr(share, kind.replace(" ", "_")) if kernel.itemsize <= 2 else share.wide
            time = kernel.flops / (self.matrix * reached)
        elif kind in ("convolution", "convolution backward"):
            table = share.convolution if kind == "convolution" else share.convolution_backward
            reached = table["arithmetic"] * (1 if kernel.itemsize <= 2 else share.wide)
            time = kernel.flops / (self.matrix * reached) + moved / table["bytes"]
        elif kind in ("batch norm", "batch norm backward"):
            table = share.batch_norm if kind == "batch norm" else share.batch_norm_backward
            time = moved / _between(table, kernel.shape[0])
        else:
            time = moved / getattr(share, kind.replace(" ", "_"))
        return LAUNCH + time

    def times(self, kernels: Counter[Kernel]) -> dict[str, float]:
        """Seconds on the device by phase."""
        found: Counter[str] = Counter()
        for kernel, count in kernels.items():
            found[kernel.phase] += count * self.seconds(kernel)  # pyright: ignore[reportArgumentType]
        return dict(found)

    def launching(self, step: Step) -> float:
        """Seconds in which the host launches all up to the optimizer. What is recorded takes none."""
        phases: Counter[str] = Counter()
        for kernel, count in step.kernels.items():
            phases[kernel.phase] += count
        towers = {phase: phases.pop(phase, 0) for phase in ("image tower", "text tower", "backward")}
        if step.recorded:
            phases.pop("loss", 0)
        took = self.host.norm * step.parameters
        took += self.host.forward * sum(count for phase, count in phases.items() if phase != "optimizer")
        if step.recorded:
            return took
        if step.compiled:
            return took + self.host.compiled * sum(towers.values())
        ahead = towers["image tower"] + towers["text tower"]
        return took + self.host.forward * ahead + self.host.backward * towers["backward"]

    def step(self, step: Step) -> float:
        """Seconds of a step: the device's, or the host's where it cannot launch as fast, and the wait between."""
        device = sum(self.times(step.kernels).values())
        return max(device, self.launching(step)) + self.host.optimizer * step.parameters

    @property
    def source(self) -> str:
        return "measured on this GPU" if self.measured else "nominal figures, at the share an H200 reaches of its own"


def tile_bytes(kernel: Kernel) -> int:
    """What our attention would move if no tile had room left: queries, keys, values and outputs, or all gradients."""
    passes = 4 if kernel.kind == "short attention" else 7
    return passes * math.prod(kernel.shape) * kernel.itemsize


def _product_share(table: Mapping[str, float], shape: tuple[int, ...]) -> float:
    """By the two smaller sides, linearly between the logarithms of those measured."""
    small, middle = sorted(shape[1:])[:2]
    sides = sorted({int(key.split("x")[0]) for key in table})

    def at(low: int, high: int) -> float:
        return table[f"{min(low, high)}x{max(low, high)}"]

    (a, b, x), (c, d, y) = _neighbours(sides, small), _neighbours(sides, middle)
    return (1 - x) * ((1 - y) * at(a, c) + y * at(a, d)) + x * ((1 - y) * at(b, c) + y * at(b, d))


def _between(table: Mapping[str, float], value: int) -> float:
    low, high, share = _neighbours(sorted(map(int, table)), value)
    return (1 - share) * table[str(low)] + share * table[str(high)]


def _neighbours(known: list[int], value: int) -> tuple[int, int, float]:
    """The two known values around this one, and how far it is from the first, in logarithms; beyond them the last."""
    value = min(max(value, known[0]), known[-1])
    high = next(entry for entry in known if entry >= value)
    low = max(entry for entry in known if entry <= value)
    return low, high, 0.0 if low == high else math.log(value / low) / math.log(high / low)


def read_card(path: Path) -> Card:
    stored = json.loads(path.read_text())
    shares, host = Shares(**stored.pop("shares")), Host(**stored.pop("host"))
    return Card(**stored | {"capability": tuple(stored["capability"])}, shares=shares, host=host)


def write_card(card: Card, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(card), indent=1) + "\n")


def card_named(name: str) -> Card:
    """A known card, by its nominal figures."""
    found = {known.lower(): known for known in CARDS}.get(name.lower())
    if found is None:
        raise UserError(f"unknown --gpu {name!r}; choose from {', '.join(CARDS)}")
    nominal, reference, base = CARDS[found], read_card(REFERENCE), CARDS["H200"]
    return replace(
        reference,
        name=found,
        memory=int(nominal.memory * 1e9),
        capability=nominal.capability,
        processors=nominal.processors,
        matrix=reference.matrix * nominal.tflops / base.tflops,
        bandwidth=reference.bandwidth * nominal.bandwidth / base.bandwidth,
        measured=False,
    )


def calibrated(device: torch.device, *, again: bool = False) -> Card:
    """The GPU that is here, measured in a few seconds the first time and remembered."""
    from leanclip.planning.gpu_measurement import measure

    properties: Any = torch.cuda.get_device_properties(device)
    version = torch.__version__.split("+")[0]
    path = cache_directory() / "cards" / f"{properties.name.replace(' ', '-')}-torch{version}.json"
    if path.is_file() and not again:
        return read_card(path)
    card = measure(device)
    write_card(card, path)
    return card

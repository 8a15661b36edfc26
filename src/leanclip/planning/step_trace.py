"""What a step would do on a GPU, without one: its real code on fake tensors, every allocation and kernel counted.

A fake tensor has shape and dtype but no data. Under a `Trace` the code runs unchanged, with autograd and autocast.
Each operation is counted as a kernel with its arithmetic and its bytes, and every storage from its allocation until
it is freed, by the part of the step that it belongs to. Values that the code reads from the device are 1 or True.
"""

import contextlib
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    in_kernel_invocation_manager,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from leanclip.ops.attention import short_attention, short_attention_backward
from leanclip.planning.cuda_autocast import cuda_autocast

aten = torch.ops.aten
leanclip_ops = torch.ops.leanclip
assert short_attention and short_attention_backward  # importing them registers the operators
UNTRACED = (
    UnsupportedOperatorException,
    DataDependentOutputException,
    DynamicOutputShapeException,
    NotImplementedError,
)
CPU = torch.device("cpu")  # of all fake tensors
ROUND = 512  # bytes: PyTorch's allocator gives no less
M = TypeVar("M", bound=nn.Module)
P = ParamSpec("P")
R = TypeVar("R")

# Their results are known without asking the fake tensors, which takes most of the time of a trace.
IN_PLACE = (aten.copy_.default, aten.zero_.default, aten.fill_.Scalar, aten.mul_.Scalar)
OPTIMIZER_STEPS = (aten._fused_adamw_.default, aten._fused_adamw_.tensor_lr, aten._fused_adam_.default)
CREATION = (aten.lift_fresh.default,)  # how torch.tensor(...) makes a fake one
FREE = (  # that launch nothing
    aten._unsafe_view, aten._reshape_alias, aten.detach, aten.alias, aten.lift_fresh,
    aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten._assert_async,
)  # fmt: skip
KINDS = {
    packet: kind
    for kind, packets in {
        "matrix": (aten.mm, aten.addmm, aten.bmm, aten.baddbmm),
        "attention": (
            aten._scaled_dot_product_flash_attention,
            aten._scaled_dot_product_efficient_attention,
            aten._scaled_dot_product_cudnn_attention,
        ),
        "attention backward": (
            aten._scaled_dot_product_flash_attention_backward,
            aten._scaled_dot_product_efficient_attention_backward,
            aten._scaled_dot_product_cudnn_attention_backward,
        ),
        "short attention": (leanclip_ops.short_attention,),
        "short attention backward": (leanclip_ops.short_attention_backward,),
        "convolution": (aten.convolution,),
        "convolution backward": (aten.convolution_backward,),
        "norm": (aten.native_layer_norm, aten.native_group_norm),
        "norm backward": (aten.native_layer_norm_backward, aten.native_group_norm_backward),
        "batch norm": (aten.native_batch_norm, aten._native_batch_norm_legit, aten._batch_norm_with_update),
        "batch norm backward": (aten.native_batch_norm_backward, aten.batch_norm_backward),
        "pooling": (aten.avg_pool2d,),
        "pooling backward": (aten.avg_pool2d_backward,),
        "optimizer": (aten._fused_adamw_, aten._fused_adam_),
        "reduction": (aten.sum, aten.mean, aten.linalg_vector_norm, aten._foreach_norm),
    }.items()
    for packet in packets
}


class Kernel(NamedTuple):
    """One launch. `shape` is (batch, m, n, k) of a product, (batch, heads, length, size) of attention, the same of
    tiles and their length of our leanclip_ops attention, (channels,) of batch normalisation, else empty."""

    kind: str
    phase: str
    flops: int
    bytes: int
    itemsize: int  # of its first operand: which unit multiplies
    shape: tuple[int, ...] = ()


class Trace(TorchDispatchMode):
    """The kernels, the bytes held by part, and the parts at the highest total."""

    current: "Trace"  # of the innermost `tracing`

    def __init__(self, capability: tuple[int, int]) -> None:
        super().__init__()
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.capability = capability
        self.kernels: Counter[Kernel] = Counter()
        self.launched: Kernel | None = None  # the last one
        self.held: Counter[str] = Counter()
        self.peak = 0
        self.at_peak: Counter[str] = Counter()
        self.part, self.phase = "activations", "other"
        self.times = 1  # that each kernel counts: a traced micro-batch may stand for several
        self._tags: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the guard around every operation takes time

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # called very often
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            dtype = args[0].dtype
            if args[0].constant is not None:
                return args[0].constant.item()
            return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if inputs and func not in CREATION and not any(isinstance(tensor, FakeTensor) for tensor in inputs):
            with unset_fake_temporarily():  # host data such as ids and tokens stay real
                return func(*args, **kwargs)
        if func in IN_PLACE:
            out = args[0]
        elif func in OPTIMIZER_STEPS:
            out = None
        elif func is aten.zeros_like.default and args[0].is_contiguous() and not kwargs.get("dtype"):
            out = self.empty(args[0].shape, args[0].dtype)
        else:
            out = func(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        for tensor in outputs:
            self.hold(tensor)
        if not func.is_view and (kernel := self._kernel(func, args, kwargs, inputs, outputs, out)) is not None:
            self.launch(kernel)
        return out

    def empty(self, shape: Sequence[int], dtype: torch.dtype, stride: Sequence[int] | None = None) -> Tensor:
        """Equals `torch.empty` or `torch.empty_strided`, whose way through the dispatcher takes much of the time."""
        with in_kernel_invocation_manager(self.mode):
            meta = torch.empty(shape, dtype=dtype, device="meta")
            meta = meta if stride is None else torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        tensor = FakeTensor(self.mode, meta, CPU)
        self.hold(tensor)
        return tensor

    def view(self, tensor: Tensor, shape: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
        """Equals `tensor.as_strided`, without the dispatcher too."""
        with in_kernel_invocation_manager(self.mode):
            meta = tensor.as_strided(shape, stride, offset)
        return FakeTensor(self.mode, meta, CPU)

    def launch(self, kernel: Kernel) -> None:
        self.launched = kernel
        self.kernels[kernel] += self.times

    def hold(self, tensor: Tensor, part: str | None = None) -> None:
        """Count a storage until it is freed; with a `part`, move it there."""
        storage = tensor.untyped_storage()
        tag = self._tags.get(storage)
        if tag is None:
            size = -(-storage.nbytes() // ROUND) * ROUND
            tag = [part or self.part, size]
            self._tags[storage] = tag
            weakref.finalize(storage, self._release, tag)
            self.held[tag[0]] += size
            self._update_peak()
        elif part is not None and part != tag[0]:
            self.held[tag[0]] -= tag[1]
            self.held[part] += tag[1]
            tag[0] = part

    def enter(self, phase: str, part: str = "activations") -> None:
        """Kernels belong to this phase from now on, new storages to this part."""
        self.phase, self.part = phase, part

    @property
    def total(self) -> int:
        return sum(self.held.values())

    def start_again(self) -> None:
        """Reset kernels and peak, keep the storages."""
        self.kernels.clear()
        self.peak, self.at_peak = 0, Counter()
        self._update_peak()

    def _release(self, tag: list[Any]) -> None:
        self.held[tag[0]] -= tag[1]

    def _update_peak(self, above: int = 0) -> None:
        total = self.total + above
        if total > self.peak:
            self.peak, self.at_peak = total, Counter(self.held)
            self.at_peak[self.part] += above

    def _kernel(
        self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], outputs: list[Tensor], out: Any
    ) -> Kernel | None:
        packet = func.overloadpacket
        if packet in FREE or func.namespace == "c10d" or not (inputs or outputs):
            return None
        flops = flop_registry[packet](*args, **kwargs, out_val=out) if packet in flop_registry else 0
        kind = KINDS.get(packet, "elementwise")
        if kind.startswith("convolution"):
            weight, stride = (args[1], args[3]) if kind == "convolution" else (args[2], args[4])
            per_output = 2 * weight[0].numel()
            results = out.numel() if kind == "convolution" else args[0].numel() * sum(args[10][:2])
            flops = per_output * results
            if weight.shape[1] == 1 and weight.shape[0] > 1:
                kind = kind.replace("convolution", "depthwise")
            elif weight.shape[1] == 3 and stride[-1] == weight.shape[-1]:  # an image cut into patches
                kind = kind.replace("convolution", "patches")
        first = next((tensor for tensor in inputs if tensor.is_floating_point()), None)
        if packet is aten._scaled_dot_product_flash_attention_backward:
            self._update_peak(_flash_scratch(*args[1].shape))
        return Kernel(
            kind, self.phase, int(flops), sum(map(bytes_of, inputs)) + sum(map(bytes_of, outputs)),
            4 if first is None else first.itemsize, _shape(kind, packet, args),
        )  # fmt: skip


def launches(kernels: Counter[Kernel]) -> Counter[str]:
    """Kernels by phase."""
    counts: Counter[str] = Counter()
    for kernel, count in kernels.items():
        counts[kernel.phase] += count
    return counts


def bytes_of(tensor: Tensor) -> int:
    """Read or written by a kernel: the elements of an expanded tensor count once."""
    size = tensor.itemsize
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        size *= length if stride else 1
    return size


def _shape(kind: str, packet: Any, args: Any) -> tuple[int, ...]:
    if kind == "matrix":
        left, right = (args[1], args[2]) if packet in (aten.addmm, aten.baddbmm) else args[:2]
        batch = left.shape[0] if left.ndim == 3 else 1
        return batch, left.shape[-2], right.shape[-1], left.shape[-1]
    if kind == "attention":
        return tuple(args[0].shape)
    if kind == "attention backward":
        return tuple(args[1].shape)
    if kind.startswith("short attention"):
        (tokens, _, heads, size), (tiles, _, length, block) = args[0].shape, args[-4:]
        return tokens // length if length else len(tiles) - 1, heads, block, size
    if kind.startswith("batch norm"):
        return (args[0].shape[1],)
    return ()


def _flash_scratch(batch: int, heads: int, length: int, size: int) -> int:
    """Flash attention adds up the queries' gradients in float32, in rows padded to whole blocks of 128."""
    padded = -(-length // 128) * 128
    return batch * heads * padded * (-(-size // 32) * 32 + 1) * 4


@contextlib.contextmanager
def tracing(capability: tuple[int, int] = (9, 0)) -> Iterator[Trace]:
    """Inside, new tensors are fake and all operations on them are counted, as on a GPU of that capability."""
    trace = Trace(capability)
    one_thread = torch.autograd.set_multithreading_enabled(False)  # so that the backward pass is traced too
    with cuda_autocast(capability), trace.mode, trace, one_thread:
        Trace.current = trace
        yield trace


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Without the search for reference cycles, which finds nothing in a trace and takes a fifth of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def with_room(function: Callable[P, R]) -> Callable[P, R]:
    """The function below a frame that takes 2 MiB of Python's stack, in whose piece of memory all deeper calls fit.

    Python maps and unmaps a new piece of 16 KiB in every call that crosses the end of one. A trace crosses one so
    often, 120,000 times for RN101, that it took a tenth of the time.
    """

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_stacksize=1 << 18)
    return call


def faked(module: M, trace: Trace, part: str, dtype: torch.dtype | None = None) -> M:
    """The module with fake parameters and buffers; the real ones may be on the meta device.

    With a `dtype`, floating-point ones get it.
    """
    known: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in known:
            kind = dtype if dtype and tensor.is_floating_point() else tensor.dtype
            empty = trace.empty(tensor.shape, kind)
            trace.hold(empty, part)
            trained = isinstance(tensor, nn.Parameter)
            known[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if trained else empty
        return known[id(tensor)]

    for inner in module.modules():
        for held in (inner._parameters, inner._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    held[name] = fake(tensor)  # pyright: ignore[reportArgumentType]
    return module

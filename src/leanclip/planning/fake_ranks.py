"""One process as the first of many: its share of the batch, its tables, and collectives that only allocate."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

from leanclip import ops
from leanclip.distributed import TRAFFIC_COUNTER, PendingGather, Ranks
from leanclip.models import blocks
from leanclip.models import transformer_towers as towers
from leanclip.ops import attention
from leanclip.planning.compiled_cost import traced_compile
from leanclip.planning.loss_kernels import TracedEngine
from leanclip.planning.step_trace import Trace

T = TypeVar("T")


@dataclass(frozen=True)
class PretendedRanks(Ranks):
    """Gathers give memory of the right size; what is summed stays as it is."""

    trace: Trace | None = None

    def start_gather(self, local: Tensor, batch: int, *, purpose: str) -> PendingGather:
        if self.size == 1:
            return PendingGather(lambda: local)
        assert self.trace is not None
        width = self.largest_share(batch)
        with self.trace.during(self.trace.phase, "communication"):
            everyone = local.new_empty(self.size * width, *local.shape[1:])
        TRAFFIC_COUNTER.record(purpose, everyone.nbytes)
        return PendingGather(lambda: everyone if batch == len(everyone) else everyone[:batch].clone())

    def sum(self, local: Tensor, *, purpose: str) -> Tensor:
        if self.size > 1:
            TRAFFIC_COUNTER.record(purpose, local.nbytes)
        return local

    def all_gather_objects(self, value: T) -> list[T]:
        return [value] * self.size

    def broadcast_from_first(self, call: Callable[[], T]) -> T:
        return call()


@contextlib.contextmanager
def pretending(trace: Trace, *, ranks: int, processors: int) -> Iterator[PretendedRanks]:
    """Inside, `Ranks.current()` is the first of so many, 16-bit losses run on the fused kernels' stand-in, 16-bit
    attention as on a GPU, and what the towers compile is compiled for the trace."""
    first, engine, real = PretendedRanks(0, ranks, None, trace), TracedEngine(trace, processors), ops.implementation

    def implementation(name: str, rows: Tensor) -> tuple[str, ops.Implementation]:
        if name in ("auto", "triton") and rows.dtype in (torch.float16, torch.bfloat16):
            return "triton", engine
        return real("tiled" if name == "auto" else name, rows)

    def in_short_kernel(qkv: Tensor) -> bool:
        return qkv.dtype in (torch.bfloat16, torch.float16) and qkv.shape[-1] in attention.HEADS

    with contextlib.ExitStack() as stack:
        for module in (blocks, towers):
            stack.enter_context(_exchanged(module, "compiled", traced_compile))
        stack.enter_context(_exchanged(attention, "_kernel", in_short_kernel))
        stack.enter_context(_exchanged(Ranks, "current", staticmethod(lambda: first)))
        stack.enter_context(_exchanged(ops, "implementation", implementation))
        # On a GPU, clipping takes all gradients at once.
        stack.enter_context(_exchanged(clip_grad, "_has_foreach_support", lambda tensors, device: True))
        stack.enter_context(_exchanged(clip_grad, "_device_has_foreach_support", lambda device: True))
        yield first


@contextlib.contextmanager
def _exchanged(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)

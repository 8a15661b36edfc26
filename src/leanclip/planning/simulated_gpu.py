"""One process as the first of several GPUs: a process group that sends nothing, and what only a GPU runs."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grad

from leanclip import ops
from leanclip.distributed import Ranks
from leanclip.models import transformer_towers as towers
from leanclip.ops import attention, tiled
from leanclip.planning.compiled_cost import traced_compile
from leanclip.planning.loss_kernels import TracedEngine
from leanclip.planning.step_trace import Trace

HALF = (torch.float16, torch.bfloat16)


@contextlib.contextmanager
def simulated(trace: Trace, *, ranks: int, processors: int) -> Iterator[Ranks]:
    """Inside, this process is rank 0 of `ranks`. In 16 bits the loss runs on the stand-in of its fused kernels and
    attention as on a GPU; what the towers compile is compiled for the trace."""
    engine, real = TracedEngine(trace, processors), ops.implementation

    def implementation(name: str, rows: Tensor) -> tuple[str, ops.Implementation]:
        if name in ("auto", "triton") and rows.dtype in HALF:
            return "triton", engine
        return real("tiled" if name == "auto" else name, rows)

    replacements = [
        (towers, "compiled", traced_compile),
        (attention, "uses_kernel", lambda qkv: qkv.dtype in HALF and qkv.shape[-1] in attention.HEAD_SIZES),
        (ops, "implementation", implementation),
        (tiled, "CPU_TILE_BYTES", tiled.GPU_TILE_BYTES),  # fake tensors are on the CPU
        # On a GPU, clipping takes all gradients at once.
        (clip_grad, "_has_foreach_support", lambda tensors, device: True),
        (clip_grad, "_device_has_foreach_support", lambda device: True),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, value in replacements:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        if ranks > 1:
            from torch.testing._internal.distributed.fake_pg import FakeStore

            store: Any = FakeStore()
            dist.init_process_group("fake", store=store, rank=0, world_size=ranks)
            stack.callback(dist.destroy_process_group)
        yield Ranks.current()

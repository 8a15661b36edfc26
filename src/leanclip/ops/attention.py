"""Self-attention of many short sequences: rows of one length, or packed causal ones.

Both have a form in plain PyTorch for any device and precision, and a kernel for 16-bit precision on CUDA, where the
tiles of general kernels would be mostly padding.
"""

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from leanclip.ops.selection import available

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None

CAUSAL: dict[str, Any] = {}  # the arguments by which this torch's varlen_attn is causal
if varlen_attn is not None:
    _has_window = "window_size" in inspect.signature(varlen_attn).parameters
    CAUSAL = {"window_size": (-1, 0)} if _has_window else {"is_causal": True}
LARGEST_TILE = 128  # tokens, which a program holds in registers
SHORT_LENGTH = 32  # tokens: texts up to this length share a small tile
HEAD_SIZES = (16, 32, 64)  # larger ones would not fit beside a tile


class Packing(NamedTuple):
    """The layout of causal sequences that are stored one after the other."""

    offsets: Tensor  # (B + 1,) int32: where each sequence begins, and the last one ends
    rows: Tensor  # (T,) the sequence of each token
    positions: Tensor  # (T,) of each token in its sequence
    longest: int  # at least the length of the longest
    tiles: Tensor  # (n + 1,) int32: where groups of whole sequences begin that fit into a tile; empty if none could


def tile_size(longest: int) -> int:
    """Tokens of a tile for packed sequences up to this length; 0 if they are too long for one."""
    return 64 if longest <= SHORT_LENGTH else LARGEST_TILE if longest <= LARGEST_TILE else 0


def tile_begins(offsets: Tensor, *, tokens: int, longest: int) -> Tensor:
    """Group i has the sequences that begin in the i-th stretch of as many tokens as leave room for one more."""
    if not (size := tile_size(longest)):
        return offsets[:0]
    stretch = size + 1 - longest
    grid = stretch * torch.arange(-(-tokens // stretch) + 1, device=offsets.device, dtype=offsets.dtype)
    return offsets[torch.searchsorted(offsets[:-1].contiguous(), grid)]


KernelArguments = tuple[Tensor, Tensor | None, Tensor | None, int, int]  # to short_attention


def row_arguments(qkv: Tensor) -> KernelArguments | None:
    """The kernel's arguments for sequences of one length; none where it cannot run them."""
    length = qkv.shape[1]
    if length > LARGEST_TILE or not uses_kernel(qkv):
        return None
    return qkv.flatten(0, 1), None, None, length, max(16, 1 << (length - 1).bit_length())


def packed_arguments(qkv: Tensor, packing: Packing) -> KernelArguments | None:
    """Likewise for packed causal sequences."""
    if not (packing.tiles.numel() and uses_kernel(qkv)):
        return None
    return qkv, packing.tiles, packing.rows, 0, tile_size(packing.longest)


def row_attention(qkv: Tensor, *, causal: bool = False) -> Tensor:
    """(B, L, 3, H, d) -> (B, L, H, d)"""
    if not causal and (arguments := row_arguments(qkv)) is not None:
        return short_attention(*arguments).unflatten(0, qkv.shape[:2])
    q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


def packed_attention(qkv: Tensor, packing: Packing) -> Tensor:
    """(T, 3, H, d) -> (T, H, d)"""
    if (arguments := packed_arguments(qkv, packing)) is not None:
        return short_attention(*arguments)
    if varlen_attn is not None and _is_narrow(qkv) and qkv.shape[-1] % 8 == 0 and qkv.shape[-1] <= 256:
        q, k, v = qkv.unbind(1)
        offsets, longest = packing.offsets, packing.longest
        mixed = varlen_attn(q, k, v, offsets, offsets, longest, longest, **CAUSAL)
        assert isinstance(mixed, Tensor)
        return mixed
    padded = qkv.new_zeros(len(packing.offsets) - 1, packing.longest, *qkv.shape[1:])
    positions = (packing.rows, packing.positions)
    return row_attention(padded.index_put(positions, qkv), causal=True)[positions]


def uses_kernel(qkv: Tensor) -> bool:
    return _is_narrow(qkv) and qkv.shape[-1] in HEAD_SIZES and _triton()


def _is_narrow(qkv: Tensor) -> bool:
    return qkv.is_cuda and qkv.dtype in (torch.bfloat16, torch.float16)


@torch.compiler.assume_constant_result
def _triton() -> bool:
    return "triton" in available(torch.empty(0, device="cuda", dtype=torch.bfloat16))


@torch.library.custom_op("leanclip::short_attention", mutates_args=())
def short_attention(qkv: Tensor, tiles: Tensor | None, rows: Tensor | None, length: int, block: int) -> Tensor:
    """Of packed causal sequences in `tiles`, or of sequences of one `length` without a mask."""
    from leanclip.ops.triton import attention

    return attention.forward(qkv, tiles, rows, length, block)


@torch.library.custom_op("leanclip::short_attention_backward", mutates_args=())
def short_attention_backward(
    qkv: Tensor, gradient: Tensor, tiles: Tensor | None, rows: Tensor | None, length: int, block: int
) -> Tensor:
    from leanclip.ops.triton import attention

    return attention.backward(qkv, gradient, tiles, rows, length, block)


@short_attention.register_fake
def _(qkv: Tensor, tiles: Tensor | None, rows: Tensor | None, length: int, block: int) -> Tensor:
    return qkv.new_empty(qkv.shape[0], *qkv.shape[2:])


@short_attention_backward.register_fake
def _(qkv: Tensor, gradient: Tensor, tiles: Tensor | None, rows: Tensor | None, length: int, block: int) -> Tensor:
    return torch.empty_like(qkv)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    qkv, tiles, rows, ctx.length, ctx.block = inputs
    ctx.save_for_backward(qkv, tiles, rows)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    qkv, tiles, rows = ctx.saved_tensors
    return short_attention_backward(qkv, gradient, tiles, rows, ctx.length, ctx.block), None, None, None, None


short_attention.register_autograd(_backward, setup_context=_save_inputs)

"""Attention of short sequences: one program takes a tile of whole sequences and one head, all in its registers.

General kernels work on tiles of 128 by 128 for each sequence, most of it padding where those have 16 or 50 tokens.
Nothing is kept for the backward pass but the inputs: the weights are computed again.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# pyright: reportGeneralTypeIssues=false


@triton.jit
def _load(qkv, token, inside, head, part, HEADS: tl.constexpr, DIM: tl.constexpr):
    place = ((token * 3 + part) * HEADS + head)[:, None] * DIM + tl.arange(0, DIM)[None, :]
    return tl.load(qkv + place, mask=inside[:, None], other=0.0)


@triton.jit
def _store(qkv, value, token, inside, head, part, HEADS: tl.constexpr, DIM: tl.constexpr):
    place = ((token * 3 + part) * HEADS + head)[:, None] * DIM + tl.arange(0, DIM)[None, :]
    tl.store(qkv + place, value.to(qkv.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _inputs(qkv, tiles, HEADS: tl.constexpr, DIM: tl.constexpr, LENGTH: tl.constexpr, BLOCK: tl.constexpr):
    """This program's head, its tokens and which of them exist, their queries, keys and values."""
    head = tl.program_id(1)
    token, inside = _tile(tiles, LENGTH, BLOCK)
    q = _load(qkv, token, inside, head, 0, HEADS, DIM)
    k = _load(qkv, token, inside, head, 1, HEADS, DIM)
    v = _load(qkv, token, inside, head, 2, HEADS, DIM)
    return head, token, inside, q, k, v


@triton.jit
def _tile(tiles, LENGTH: tl.constexpr, BLOCK: tl.constexpr):
    """The tokens of this program, and which of them exist."""
    number = tl.program_id(0).to(tl.int64)
    if LENGTH > 0:
        begin = number * LENGTH
        end = begin + LENGTH
    else:
        begin = tl.load(tiles + number).to(tl.int64)
        end = tl.load(tiles + number + 1).to(tl.int64)
    token = begin + tl.arange(0, BLOCK)
    return token, token < end


@triton.jit
def _weights(q, k, token, inside, rows, scale, LENGTH: tl.constexpr):
    """The softmax of each query over the keys that it may see; 0 for others, and for queries that do not exist."""
    seen = inside[:, None] & inside[None, :]
    if LENGTH == 0:
        row = tl.load(rows + token, mask=inside, other=-1)
        seen = seen & (row[:, None] == row[None, :]) & (token[:, None] >= token[None, :])
    logit = tl.where(seen, tl.dot(q, tl.trans(k)) * (scale * 1.4426950408889634), -1e30)
    weight = tl.where(seen, tl.exp2(logit - tl.max(logit, 1)[:, None]), 0.0)
    total = tl.sum(weight, 1)
    return weight / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit
def _forward(
    qkv, out, tiles, rows, scale,
    HEADS: tl.constexpr, DIM: tl.constexpr, LENGTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head, token, inside, q, k, v = _inputs(qkv, tiles, HEADS, DIM, LENGTH, BLOCK)
    weight = _weights(q, k, token, inside, rows, scale, LENGTH)
    mixed = tl.dot(weight.to(v.dtype), v)
    place = (token * HEADS + head)[:, None] * DIM + tl.arange(0, DIM)[None, :]
    tl.store(out + place, mixed.to(out.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _backward(
    qkv, gradient, result, tiles, rows, scale,
    HEADS: tl.constexpr, DIM: tl.constexpr, LENGTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head, token, inside, q, k, v = _inputs(qkv, tiles, HEADS, DIM, LENGTH, BLOCK)
    place = (token * HEADS + head)[:, None] * DIM + tl.arange(0, DIM)[None, :]
    pull = tl.load(gradient + place, mask=inside[:, None], other=0.0)
    weight = _weights(q, k, token, inside, rows, scale, LENGTH)
    _store(result, tl.dot(tl.trans(weight.to(pull.dtype)), pull), token, inside, head, 2, HEADS, DIM)
    slope = tl.dot(pull, tl.trans(v))
    slope = weight * (slope - tl.sum(weight * slope, 1)[:, None]) * scale
    slope = slope.to(q.dtype)
    _store(result, tl.dot(slope, k), token, inside, head, 0, HEADS, DIM)
    _store(result, tl.dot(tl.trans(slope), q), token, inside, head, 1, HEADS, DIM)


def forward(qkv: Tensor, tiles: Tensor | None, rows: Tensor | None, length: int, block: int) -> Tensor:
    """(T, 3, H, d) -> (T, H, d): sequences of one length without a mask, or packed causal ones."""
    tokens, _, heads, dim = qkv.shape
    out = qkv.new_empty(tokens, heads, dim)
    _launch(_forward, (qkv, out), tiles, rows, qkv, length, block)
    return out


def backward(
    qkv: Tensor, gradient: Tensor, tiles: Tensor | None, rows: Tensor | None, length: int, block: int
) -> Tensor:
    """The gradient of `forward` towards its input."""
    result = torch.empty_like(qkv)
    _launch(_backward, (qkv, gradient.contiguous(), result), tiles, rows, qkv, length, block)
    return result


def _launch(
    kernel: Any, tensors: tuple[Tensor, ...], tiles: Tensor | None, rows: Tensor | None, qkv: Tensor,
    length: int, block: int,
) -> None:  # fmt: skip
    tokens, _, heads, dim = qkv.shape
    count = tokens // length if tiles is None else len(tiles) - 1
    if count == 0:
        return
    with torch.cuda.device_of(qkv):
        kernel[(count, heads)](
            *tensors, qkv if tiles is None else tiles, qkv if rows is None else rows, dim**-0.5,
            HEADS=heads, DIM=dim, LENGTH=0 if tiles is not None else length, BLOCK=block,
            num_warps=8 if block > 64 else 4, num_stages=1,
        )  # fmt: skip

"""Run by `test_ops_triton.py` in a process of its own, where TRITON_INTERPRET=1 was set before Triton was imported.

float32 only: the interpreter's bfloat16 product is wrong in Triton 3.7.
"""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from leanclip.ops.attention import Packing, packed_attention, row_attention, tile_begins, tile_size
from leanclip.ops.triton import attention


def qkv_of(tokens: int, heads: int, dim: int) -> Tensor:
    return torch.randn(tokens, 3, heads, dim, generator=torch.Generator().manual_seed(tokens), requires_grad=True)


def packing_of(lengths: Tensor, longest: int) -> Packing:
    device = lengths.device
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    rows = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)
    positions = torch.arange(len(rows), device=device) - offsets[rows]
    return Packing(offsets, rows, positions, longest, tile_begins(offsets, tokens=len(rows), longest=longest))


def check(qkv: Tensor, expected: Tensor, *arguments: Any) -> None:
    """The kernel's result and gradient against autograd's."""
    pull = torch.randn_like(expected)
    expected.backward(pull)
    assert qkv.grad is not None
    assert torch.allclose(attention.forward(qkv.detach(), *arguments), expected, atol=1e-5)
    assert torch.allclose(attention.backward(qkv.detach(), pull, *arguments), qkv.grad, atol=1e-5)


@pytest.mark.parametrize(("lengths", "longest"), [([3], 32), ([1, 32, 7, 2, 31, 16, 16], 32), ([77, 1, 1, 5, 9], 77)])
def test_packed_sequences(lengths: list[int], longest: int):
    packing = packing_of(torch.tensor(lengths), longest)
    begins = packing.tiles.tolist()
    assert begins[0] == 0 and begins[-1] == sum(lengths)
    assert max(end - begin for begin, end in itertools.pairwise(begins)) <= tile_size(longest)
    qkv = qkv_of(sum(lengths), 2, 16)
    check(qkv, packed_attention(qkv, packing), packing.tiles, packing.rows, 0, tile_size(longest))


@pytest.mark.parametrize(("rows", "length"), [(3, 1), (2, 50), (1, 65)])
def test_rows_of_one_length(rows: int, length: int):
    qkv = qkv_of(rows * length, 2, 16)
    expected = row_attention(qkv.unflatten(0, (rows, length))).flatten(0, 1)
    check(qkv, expected, None, None, length, max(16, 1 << (length - 1).bit_length()))

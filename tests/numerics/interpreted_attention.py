"""Run by `test_ops_triton.py` in a process of its own, where TRITON_INTERPRET=1 was set before Triton was imported.

float32 only: the interpreter's bfloat16 product is wrong in Triton 3.7.
"""

import itertools

import pytest
import torch
from torch import Tensor

from leanclip.ops.attention import Packing, packed_attention, row_attention, tile_begins, tile_size
from leanclip.ops.triton import attention


def qkv_of(tokens: int, heads: int, dim: int) -> Tensor:
    return torch.randn(tokens, 3, heads, dim, generator=torch.Generator().manual_seed(tokens), requires_grad=True)


def packing_of(lengths: Tensor, longest: int) -> Packing:
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    rows = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    positions = torch.arange(len(rows)) - offsets[rows]
    return Packing(
        offsets, rows, positions, longest, tile_begins(offsets, tokens=int(lengths.sum()), longest=longest)
    )


@pytest.mark.parametrize(("lengths", "longest"), [([3], 32), ([1, 32, 7, 2, 31, 16, 16], 32), ([77, 1, 1, 5, 9], 77)])
def test_packed_sequences(lengths: list[int], longest: int):
    packing = packing_of(torch.tensor(lengths), longest)
    begins = packing.tiles.tolist()
    assert begins[0] == 0 and begins[-1] == sum(lengths)
    assert max(end - begin for begin, end in itertools.pairwise(begins)) <= tile_size(longest)
    qkv = qkv_of(sum(lengths), 2, 16)
    right = packed_attention(qkv, packing)
    pull = torch.randn_like(right)
    right.backward(pull)
    assert qkv.grad is not None
    given = (packing.tiles, packing.rows, 0, tile_size(longest))
    assert torch.allclose(attention.forward(qkv.detach(), *given), right, atol=1e-5)
    assert torch.allclose(attention.backward(qkv.detach(), pull, *given), qkv.grad, atol=1e-5)


@pytest.mark.parametrize(("rows", "length"), [(3, 1), (2, 50), (1, 65)])
def test_rows_of_one_length(rows: int, length: int):
    qkv = qkv_of(rows * length, 2, 16)
    right = row_attention(qkv.unflatten(0, (rows, length))).flatten(0, 1)
    pull = torch.randn_like(right)
    right.backward(pull)
    assert qkv.grad is not None
    given = (None, None, length, max(16, 1 << (length - 1).bit_length()))
    assert torch.allclose(attention.forward(qkv.detach(), *given), right, atol=1e-5)
    assert torch.allclose(attention.backward(qkv.detach(), pull, *given), qkv.grad, atol=1e-5)

"""The kernel for short sequences against attention in float64, with the general kernels' error as the measure."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from leanclip.ops import attention
from leanclip.ops.attention import Packing, packed_attention, row_attention, tile_begins

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def both(compute, qkv: Tensor, pull: Tensor) -> list[Tensor]:
    qkv = qkv.detach().requires_grad_()
    found = compute(qkv)
    found.backward(pull.to(found.dtype))
    assert qkv.grad is not None
    return [found.detach().double(), qkv.grad.double()]


def compare(compute, qkv: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    assert attention._kernel(qkv)
    pull = torch.randn(*compute(qkv).shape, device="cuda").to(qkv.dtype)
    found = both(compute, qkv, pull)
    monkeypatch.setattr(attention, "_kernel", lambda qkv: False)
    general = both(compute, qkv, pull)
    monkeypatch.setattr(attention, "varlen_attn", None)
    truth = both(compute, qkv.double(), pull.double())
    for mine, theirs, right in zip(found, general, truth, strict=True):
        assert torch.isfinite(mine).all()
        assert (mine - right).norm() <= 1.5 * (theirs - right).norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("longest", "width"), [(23, 32), (77, 77), (128, 128)])
@pytest.mark.parametrize("dim", [16, 32, 64])
def test_packed_sequences(dtype, longest, width, dim, monkeypatch):
    lengths = torch.randint(1, longest + 1, (301,))
    lengths[17] = longest
    offsets = F.pad(lengths.cumsum(0), (1, 0)).int().cuda()
    rows = torch.repeat_interleave(torch.arange(301), lengths).cuda()
    positions = torch.arange(len(rows), device="cuda") - offsets[rows]
    tiles = tile_begins(offsets, tokens=len(rows), longest=width)
    packing = Packing(offsets, rows, positions, width, tiles)
    qkv = torch.randn(len(rows), 3, 3, dim, device="cuda").to(dtype)
    compare(lambda qkv: packed_attention(qkv, packing), qkv, monkeypatch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [1, 17, 50, 64, 65, 101, 128])
def test_rows_of_one_length(dtype, length, monkeypatch):
    qkv = torch.randn(123, length, 3, 5, 64, device="cuda").to(dtype)
    compare(row_attention, qkv, monkeypatch)

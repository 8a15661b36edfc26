"""The kernel for short sequences against attention in float64, with the general kernels' error as the measure."""

import pytest
import torch
from torch import Tensor

from leanclip.ops import attention
from leanclip.ops.attention import packed_attention, row_attention
from numerics.interpreted_attention import packing_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def both(compute, qkv: Tensor, pull: Tensor) -> list[Tensor]:
    qkv = qkv.detach().requires_grad_()
    result = compute(qkv)
    result.backward(pull.to(result.dtype))
    assert qkv.grad is not None
    return [result.detach().double(), qkv.grad.double()]


def compare(compute, qkv: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    assert attention.uses_kernel(qkv)
    pull = torch.randn(*compute(qkv).shape, device="cuda").to(qkv.dtype)
    kernel = both(compute, qkv, pull)
    monkeypatch.setattr(attention, "uses_kernel", lambda qkv: False)
    general = both(compute, qkv, pull)
    monkeypatch.setattr(attention, "varlen_attn", None)
    truth = both(compute, qkv.double(), pull.double())
    for value, baseline, expected in zip(kernel, general, truth, strict=True):
        assert torch.isfinite(value).all()
        assert (value - expected).norm() <= 1.5 * (baseline - expected).norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("longest", "width"), [(23, 32), (77, 77), (128, 128)])
@pytest.mark.parametrize("dim", [16, 32, 64])
def test_packed_sequences(dtype, longest, width, dim, monkeypatch):
    lengths = torch.randint(1, longest + 1, (301,))
    lengths[17] = longest
    packing = packing_of(lengths.cuda(), width)
    qkv = torch.randn(len(packing.rows), 3, 3, dim, device="cuda").to(dtype)
    compare(lambda qkv: packed_attention(qkv, packing), qkv, monkeypatch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [1, 17, 50, 64, 65, 101, 128])
def test_rows_of_one_length(dtype, length, monkeypatch):
    qkv = torch.randn(123, length, 3, 5, 64, device="cuda").to(dtype)
    compare(row_attention, qkv, monkeypatch)

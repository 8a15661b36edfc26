"""Run by `test_ops_triton.py` in a process of its own, where TRITON_INTERPRET=1 was set before Triton was there."""

import pytest
from torch import device
from torch.testing import assert_close

from leanclip.ops.resize import has_kernel, resize_crops
from numerics.resize_cases import SIZES, filters, ragged, torchs


@pytest.mark.parametrize("size", [(33, 47), (40, 32)])
def test_the_kernel_has_torchs_pixels(size: tuple[int, int]):
    assert has_kernel(device("cpu"))
    crops, data, layout, out = ragged(SIZES, size)
    resize_crops(data, layout, *filters(size), out)
    assert_close(out, torchs(crops, size), rtol=0, atol=0)

"""16-bit embeddings lose nothing beyond their own rounding: `tiled` on a CPU computes them as float32 does."""

import pytest
import torch
from torch.nn.functional import normalize

from leanclip.ops import Pairs, Terms, tiled


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_inputs_give_float32_results(dtype):
    draw = torch.Generator().manual_seed(0)
    rows, cols = (normalize(torch.randn(size, 48, generator=draw), dim=1).to(dtype) for size in (127, 90))
    scale, pairs = torch.tensor(50.0), Pairs(offset=3, mask_positives=True)
    terms = Terms(scale, -torch.rand(127, generator=draw)), Terms(scale, -torch.rand(90, generator=draw))
    diagonal = torch.rand(127, generator=draw)
    bias, weight = torch.tensor(-3.0), torch.tensor(0.5)

    def everything(rows, cols):
        by_rows, by_cols = tiled.statistics(rows, cols, scale, scale, pairs=pairs)
        assert by_cols is not None
        gradients = tiled.gradients(rows, cols, *terms, diagonal, pairs=pairs)
        found = tiled.pairwise(rows, cols, scale, bias, weight, diagonal, pairs=pairs)
        return [*by_rows, *by_cols, *gradients, *found[:3], *found.gradients]

    half, full = everything(rows, cols), everything(rows.float(), cols.float())
    assert len(half) == 11
    for one, two in zip(half, full, strict=True):
        assert one.dtype == torch.float32
        assert (one - two).abs().max() <= 1e-6 * two.abs().max()

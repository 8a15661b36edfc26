"""The tables of the filter and the form in plain PyTorch, against torch's own filter for 8-bit images."""

import pytest
import torch
from torch import device

from leanclip.ops.resize import MOST_TAPS, bicubic, longest_side, resize_crops
from numerics.resize_cases import SIZES, filters, ragged, torchs

CPU = device("cpu")


def check(sizes: list[tuple[int, int]], size: tuple[int, int]) -> None:
    crops, data, layout, out = ragged(sizes, size)
    resize_crops(data, layout, *filters(size), out)
    assert torch.equal(out, torchs(crops, size))


@pytest.mark.parametrize("size", [(33, 47), (40, 32), (32, 32)])
def test_crops_of_many_sizes_have_torchs_pixels(size):
    check(SIZES, size)


@pytest.mark.parametrize("size", [24, 37])
def test_every_length_has_torchs_pixels(size):
    longest = longest_side(size)
    check([(length, longest + 1 - length) for length in range(1, longest + 1)], (size, size))


@pytest.mark.parametrize("size", [96, 224, 336])
def test_the_longest_side_of_a_real_model_has_torchs_pixels(size):
    longest = longest_side(size)
    assert 3.7 * size < longest and bicubic(size, CPU).taps.max() <= MOST_TAPS
    check([(longest, 3), (3, longest), (longest - 1, 2)], (size, size))

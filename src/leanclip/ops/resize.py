"""Crops of many sizes to one size, with the arithmetic of torch's antialiased filter for 8-bit images on a CPU.

Weights are integers, so both forms give the pixels of
`F.interpolate(crop[None], size, mode="bicubic", antialias=True)`, on any device: first along the rows, then along the
columns, and 8 bits between.
"""

import functools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from leanclip.ops.selection import available

MOST_TAPS = 16  # source pixels of one target pixel
LARGEST_SCALE = (MOST_TAPS - 1) / 4  # source over target: the filter covers 2 * 2 target pixels, and one more pixel
FILTER_BYTES = 4 + 2 * MOST_TAPS  # for each length and target pixel
WEIGHT_BITS = 15
MOST_SHIFT = 22


class Filter(NamedTuple):
    """How every length up to the longest, the first dimension, is resized to one."""

    starts: Tensor  # (n, size) the first source pixel of each target pixel
    weights: Tensor  # (n, MOST_TAPS, size) int16 of the pixels from there on
    taps: Tensor  # (n,) how many of them there are
    shifts: Tensor  # (n,) bits of a weight's fraction


def longest_side(size: int) -> int:
    """The longest side that can be resized to `size`."""
    return int(LARGEST_SCALE * size)


@functools.cache
def bicubic(size: int, device: torch.device) -> Filter:
    rows = [_bicubic_row(max(1, length), size) for length in range(longest_side(size) + 1)]
    return Filter(*(torch.from_numpy(np.array(column)).to(device) for column in zip(*rows, strict=True)))


def _bicubic_row(length: int, size: int) -> tuple[np.ndarray, np.ndarray, int, int]:
    """torch's table for one length: the weights of each target pixel add up to 1 before they are rounded."""
    scale = length / size
    stretch = max(1.0, scale)
    centre = scale * (np.arange(size) + 0.5)
    starts = np.maximum((centre - 2 * stretch + 0.5).astype(np.int64), 0)
    stops = np.minimum((centre + 2 * stretch + 0.5).astype(np.int64), length)
    tap = np.arange(MOST_TAPS)[:, None]
    x = np.abs((tap + starts - centre + 0.5) * (1 / stretch))
    weights = np.where(x < 1, (1.5 * x - 2.5) * x * x + 1, np.where(x < 2, ((x - 5) * x + 8) * x * -0.5 + 2, 0.0))
    weights = np.where(tap < stops - starts, weights, 0.0)
    weights /= weights.sum(0)
    shift = 0
    while shift < MOST_SHIFT and int(0.5 + weights.max() * (1 << shift + 1)) < 1 << WEIGHT_BITS:
        shift += 1
    rounded = np.trunc(weights * (1 << shift) + np.copysign(0.5, weights)).astype(np.int16)
    return starts.astype(np.int32), rounded, int((stops - starts).max()), shift


def resize_crops(data: Tensor, layout: Tensor, rows: Filter, columns: Filter, out: Tensor) -> None:
    """Fill `out` (B, 3, H, W) with resized crops. `data` holds their bytes, channels last; `layout` (B, 3), on the
    host, is where each begins, its height and its width. `rows` resizes to H, `columns` to W."""
    if has_kernel(data.device):
        from leanclip.ops.triton import resize

        resize.resize_crops(data, layout, rows, columns, out)
        return
    for (begin, height, width), target in zip(layout.tolist(), out, strict=True):
        crop = data[begin : begin + 3 * height * width].view(height, width, 3).permute(2, 0, 1)
        target.copy_(_resampled(_resampled(crop, columns, width).mT, rows, height).mT)


def _resampled(lines: Tensor, resize: Filter, length: int) -> Tensor:
    """(..., length) -> (..., size)"""
    starts, weights, shift = resize.starts[length], resize.weights[length].int(), int(resize.shifts[length])
    lines = lines.int()
    total = torch.tensor(1 << shift - 1, device=lines.device)
    for tap in range(int(resize.taps[length])):
        total = total + lines[..., (starts + tap).clamp(max=length - 1)] * weights[tap]
    return (total >> shift).clamp(0, 255).byte()


def has_kernel(device: torch.device) -> bool:
    return "triton" in available(torch.empty(0, device=device, dtype=torch.bfloat16))

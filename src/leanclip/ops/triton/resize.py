"""Crops of many sizes to one size, first along the rows, then along the columns; `ops.resize` has the arithmetic."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# pyright: reportGeneralTypeIssues=false

LINES, PIXELS = 32, 32  # of a program's tile
Filter = tuple[Tensor, Tensor, Tensor, Tensor]  # starts, weights, taps, shifts: see `ops.resize.Filter`


@triton.jit(do_not_specialize=["most_height"])
def _resample(
    source, target, layout, starts, weights, taps, shifts, most_height, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    MOST_TAPS: tl.constexpr, COLUMNS: tl.constexpr, LINES: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """Along the width, from crops to (B, 3, most_height, WIDTH); or, with COLUMNS, from there to the result."""
    sample = tl.program_id(0)
    height = tl.load(layout + 3 * sample + 1)
    line = tl.program_id(1) * LINES + tl.arange(0, LINES)[:, None]
    pixel = tl.program_id(2) * PIXELS + tl.arange(0, PIXELS)[None, :]
    between = (sample.to(tl.int64) * 3) * most_height * WIDTH
    if COLUMNS:  # a line is a row of the result, of which each pixel has its column's source
        length, size = height, HEIGHT
        channel, row = line // HEIGHT, line % HEIGHT
        inside = (line < 3 * HEIGHT) & (pixel < WIDTH)
        index, step = row, WIDTH
        begin = between + channel * most_height * WIDTH + pixel
        place = (sample.to(tl.int64) * 3 * HEIGHT + line) * WIDTH + pixel
    else:
        length, size = tl.load(layout + 3 * sample + 2), WIDTH
        channel, row = line // height, line % height
        inside = (line < 3 * height) & (pixel < WIDTH)
        index, step = pixel, 3
        begin = tl.load(layout + 3 * sample) + row * length * 3 + channel
        place = between + (channel * most_height + row) * WIDTH + pixel
    shift = tl.load(shifts + length)
    start = tl.load(starts + length * size + index, mask=index < size, other=0)
    total = tl.zeros((LINES, PIXELS), tl.int32) + (1 << (shift - 1))
    for tap in range(tl.load(taps + length)):
        weight = tl.load(weights + (length * MOST_TAPS + tap) * size + index, mask=index < size, other=0)
        valid = inside & (start + tap < length)
        total += tl.load(source + begin + (start + tap) * step, mask=valid, other=0).to(tl.int32) * weight.to(
            tl.int32
        )
    rounded = tl.minimum(tl.maximum(total >> shift, 0), 255)
    tl.store(target + place, rounded.to(tl.uint8), mask=inside)


def resize_crops(data: Tensor, layout: Tensor, rows: Filter, columns: Filter, out: Tensor) -> None:
    """The same as `ops.resize.resize_crops`."""
    count, channels, height, width = out.shape
    most = int(layout[:, 1].max())
    between = torch.empty(count, channels, most, width, dtype=torch.uint8, device=data.device)
    kernel: Any = _resample
    on_device = layout.to(data.device, non_blocking=True)

    def launch(source: Tensor, target: Tensor, resize: Filter, lines: int, **options: Any) -> None:
        grid = (count, triton.cdiv(channels * lines, LINES), triton.cdiv(width, PIXELS))
        kernel[grid](
            source, target, on_device, *resize, most,
            HEIGHT=height, WIDTH=width, MOST_TAPS=resize[1].shape[1], LINES=LINES, PIXELS=PIXELS, **options,
        )  # fmt: skip

    with torch.cuda.device_of(data):
        launch(data, between, columns, most, COLUMNS=False)
        launch(between, out, rows, height, COLUMNS=True)

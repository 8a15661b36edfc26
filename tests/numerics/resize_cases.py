"""Crops of many sizes, random and of extreme contrast, and what torch makes of them."""

import torch
from torch import Tensor
from torch.nn import functional as F

from leanclip.ops.resize import Filter, bicubic

SIZES = [(60, 70), (33, 47), (20, 30), (119, 5), (1, 1), (47, 33), (100, 120), (7, 119)]  # height, width


def ragged(sizes: list[tuple[int, int]], size: tuple[int, int]) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """Crops (3, h, w), their bytes, where they are, and where they go. There are bytes before, between and behind."""
    torch.manual_seed(len(sizes))
    crops, layout, pieces, end = [], [], [], 0
    for number, (height, width) in enumerate(sizes):
        crop = torch.randint(256, (height, width, 3), dtype=torch.uint8)
        crop = crop // 128 * 255 if number % 2 else crop
        pieces += [torch.full((5,), 77, dtype=torch.uint8), crop.flatten()]
        layout.append((end + 5, height, width))
        end += 5 + crop.numel()
        crops.append(crop.permute(2, 0, 1))
    data = torch.cat([*pieces, torch.full((5,), 77, dtype=torch.uint8)])
    return crops, data, torch.tensor(layout), torch.zeros(len(sizes), 3, *size, dtype=torch.uint8)


def filters(size: tuple[int, int], device: str = "cpu") -> tuple[Filter, Filter]:
    return bicubic(size[0], torch.device(device)), bicubic(size[1], torch.device(device))


def torchs(crops: list[Tensor], size: tuple[int, int]) -> Tensor:
    return torch.cat([F.interpolate(crop[None], size, mode="bicubic", antialias=True) for crop in crops])

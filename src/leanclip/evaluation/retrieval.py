"""Retrieval: does an image find its captions, and a caption its image?"""

from collections.abc import Mapping

import torch
from torch import Tensor

RECALL_AT = (1, 5, 10)
DIRECTIONS = ("image_to_text", "text_to_image")
RECALLS = tuple(f"{direction}_recall@{k}" for direction in DIRECTIONS for k in RECALL_AT)


def retrieval_metrics(images: Tensor, texts: Tensor, image_of_text: Tensor) -> Mapping[str, float]:
    """Recall at 1, 5, 10 in both directions; text j belongs to image `image_of_text[j]`.

    An image is found by any one of its captions. Ties count against: a wrong candidate with the same score stands
    before the right one, so that a collapsed model scores nothing.
    """
    text_ranks = torch.cat([
        _rank(texts[i] @ images.T, image_of_text[i, None] == torch.arange(len(images), device=images.device))
        for i in _tiles(len(texts), texts.device)
    ])  # fmt: skip
    image_ranks = torch.cat([
        _rank(images[i] @ texts.T, i[:, None] == image_of_text[None, :]) for i in _tiles(len(images), images.device)
    ])  # fmt: skip
    found: dict[str, float] = {}
    for direction, ranks in zip(DIRECTIONS, (image_ranks, text_ranks), strict=True):
        for k in RECALL_AT:
            found[f"{direction}_recall@{k}"] = (ranks < k).double().mean().item()
    return found | {"images": len(images), "captions": len(texts), "chance@10": min(1.0, 10 / len(images))}


def _rank(scores: Tensor, right: Tensor) -> Tensor:
    """How many wrong candidates stand before the best right one, per row."""
    best = scores.masked_fill(~right, -torch.inf).amax(1, keepdim=True)
    return (~(scores < best) & ~right).sum(1)  # a NaN stands before everything


def _tiles(count: int, device: torch.device | None = None, size: int = 4096) -> list[Tensor]:
    return list(torch.arange(count, device=device).split(size))

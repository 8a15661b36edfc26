"""Retrieval: does an image find its captions, and a caption its image?"""

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from leanclip.distributed import Ranks
from leanclip.progress import ACTIVITY

RECALL_AT = (1, 5, 10)
DIRECTIONS = ("image_to_text", "text_to_image")
RECALLS = tuple(f"{direction}_recall@{k}" for direction in DIRECTIONS for k in RECALL_AT)
# Rows and columns of the scores that exist at a time. On a CPU they should stay in the cache: with 4096 it takes four
# times as long.
TILE, TILE_ON_GPU = 1024, 8192


def retrieval_metrics(
    images: Tensor,
    texts: Tensor,
    image_of_text: Tensor,
    *,
    tile: int | None = None,
    advance: Callable[[int], None] = lambda _: None,
) -> Mapping[str, float]:
    """Recall at 1, 5, 10 and median rank in both directions; text j belongs to image `image_of_text[j]`.

    An image is found by any one of its captions. Ties count against: a wrong candidate with the same score stands
    before the right one, so that a collapsed model scores nothing. Several ranks call it together with the same
    embeddings, share the work and get the same figures. `advance` is told how many texts are done.
    """
    image_places, text_places = places(images, texts, image_of_text, tile=tile, advance=advance)
    found: dict[str, float] = {}
    for direction, before in zip(DIRECTIONS, (image_places, text_places), strict=True):
        for k in RECALL_AT:
            found[f"{direction}_recall@{k}"] = (before < k).double().mean().item()
        found[f"{direction}_median_rank"] = float(np.median(before.cpu().numpy())) + 1
    return found | {"images": len(images), "captions": len(texts), "chance@10": min(1.0, 10 / len(images))}


def places(
    images: Tensor,
    texts: Tensor,
    image_of_text: Tensor,
    *,
    tile: int | None = None,
    advance: Callable[[int], None] = lambda _: None,
) -> tuple[Tensor, Tensor]:
    """How many wrong texts stand before an image's best right one, and how many wrong images before a text's own.

    The scores are walked tile by tile, once for the right pairs (only the tiles that hold some) and once to count
    for both directions, and are never there as a whole. A rank takes its share of the texts against all images.
    """
    ranks = Ranks.current()
    tile = tile or (TILE if texts.device.type == "cpu" else TILE_ON_GPU)
    share = ranks.share(len(texts))
    own, owner = texts[share], image_of_text[share]
    right = own.new_empty(len(own))
    for rows in _slices(len(own), tile):
        for number in (owner[rows] // tile).unique().tolist():
            columns = slice(number * tile, (number + 1) * tile)
            here, column = _pairs(owner[rows], columns)
            right[rows][here] = (own[rows] @ images[columns].T)[here, column]
            ACTIVITY.still_working()
    everyones = ranks.gather(right, len(texts), purpose="evaluation")
    best = images.new_full((len(images),), -torch.inf).scatter_reduce(0, image_of_text, everyones, "amax")

    text_places = torch.zeros(len(own), dtype=torch.int64, device=texts.device)
    image_places = torch.zeros(len(images), dtype=torch.int64, device=texts.device)
    for rows in _slices(len(own), tile):
        for columns in _slices(len(images), tile):
            scores = own[rows] @ images[columns].T
            for counts, bound, dim in (
                (text_places[rows], right[rows, None], 1),
                (image_places[columns], best[None, columns], 0),
            ):
                # Counted as floats, which is several times faster than bool on a CPU and exact up to 2^24. What is
                # not less stands before: a NaN does too.
                less = torch.lt(scores, bound, out=torch.empty_like(scores)).sum(dim)
                counts += scores.shape[dim] - less.long()
            here, column = _pairs(owner[rows], columns)
            if len(here):
                pairs = scores[here, column]
                text_places[rows][here] -= (~(pairs < right[rows][here])).long()
                image_places[columns].index_add_(0, column, (~(pairs < best[columns][column])).long(), alpha=-1)
            ACTIVITY.still_working()
        advance(len(own[rows]) * ranks.size)
    return (
        ranks.sum(image_places, purpose="evaluation"),
        ranks.gather(text_places, len(texts), purpose="evaluation"),
    )


def _slices(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _pairs(owner: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """The rows whose right column lies in a tile, and which one of the tile's it is."""
    here = ((owner >= columns.start) & (owner < columns.stop)).nonzero()[:, 0]
    return here, owner[here] - columns.start

"""Retrieval: recall and median rank from images to captions and from captions to images."""

import math
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from leanclip.chance import chance_of_recall
from leanclip.distributed import Ranks
from leanclip.progress import ACTIVITY

RECALL_AT = (1, 5, 10)
DIRECTIONS = ("image_to_text", "text_to_image")
RECALLS = tuple(f"{direction}_recall@{k}" for direction in DIRECTIONS for k in RECALL_AT)
# Rows and columns of the scores that exist at a time. On a CPU a tile should fit the cache: 4096 takes four times as
# long.
TILE, TILE_ON_GPU = 1024, 8192


def retrieval_metrics(
    images: Tensor, texts: Tensor, image_of_text: Tensor, *, tile: int | None = None
) -> Mapping[str, float]:
    """Recall at 1, 5, 10 and median rank in both directions; text j belongs to image `image_of_text[j]`.

    An image counts as found by any one of its captions. A tie counts as wrong: a wrong candidate with the same score
    ranks before the right one, so that a collapsed model has recall 0. Ranks call it together with the same
    embeddings, share the work and get the same metrics.
    """
    metrics: dict[str, float] = {}
    for direction, positions in zip(DIRECTIONS, ranks_of_right(images, texts, image_of_text, tile=tile), strict=True):
        for k in RECALL_AT:
            metrics[f"{direction}_recall@{k}"] = (positions < k).double().mean().item()
        metrics[f"{direction}_median_rank"] = float(np.median(positions.cpu().numpy())) + 1
    return metrics | {"images": len(images), "captions": len(texts), "chance@10": min(1.0, 10 / len(images))}


def recall_text(metrics: Mapping[str, float], direction: str, rank: int = 10) -> str:
    """Recall in percent, and that of guessing where it is known."""
    chance = chance_of_recall(direction, rank, images=metrics["images"], captions=metrics["captions"])
    known = "" if math.isnan(chance) else f" (chance {chance:.1%})"
    return f"{metrics[f'{direction}_recall@{rank}']:.1%}{known}"


def ranks_of_right(
    images: Tensor, texts: Tensor, image_of_text: Tensor, *, tile: int | None = None
) -> tuple[Tensor, Tensor]:
    """The number of wrong texts before an image's best right one, and of wrong images before a text's right one.

    The scores are computed tile by tile, once for the right pairs (only tiles that contain some) and once to count
    for both directions, and never exist as a whole. Each rank takes its share of the texts against all images.
    """
    ranks = Ranks.current()
    tile = tile or (TILE if texts.device.type == "cpu" else TILE_ON_GPU)
    share = ranks.share(len(texts))
    local, owner = texts[share], image_of_text[share]
    right = local.new_empty(len(local))
    for rows in _slices(len(local), tile):
        for number in (owner[rows] // tile).unique().tolist():
            columns = slice(number * tile, (number + 1) * tile)
            row, column = _right_pairs(owner[rows], columns)
            right[rows][row] = (local[rows] @ images[columns].T)[row, column]
            ACTIVITY.still_working()
    gathered = ranks.gather(right, len(texts), purpose="evaluation")
    best = images.new_full((len(images),), -torch.inf).scatter_reduce(0, image_of_text, gathered, "amax")

    before_text = torch.zeros(len(local), dtype=torch.int64, device=texts.device)
    before_image = torch.zeros(len(images), dtype=torch.int64, device=texts.device)
    for rows in _slices(len(local), tile):
        for columns in _slices(len(images), tile):
            scores = local[rows] @ images[columns].T
            for counts, bound, dim in (
                (before_text[rows], right[rows, None], 1),
                (before_image[columns], best[None, columns], 0),
            ):
                # Counted as floats, which is several times faster than bool on a CPU and exact up to 2^24. Scores
                # that are not less rank before, NaN included.
                less = torch.lt(scores, bound, out=torch.empty_like(scores)).sum(dim)
                counts += scores.shape[dim] - less.long()
            row, column = _right_pairs(owner[rows], columns)
            if len(row):
                pairs = scores[row, column]
                before_text[rows][row] -= (~(pairs < right[rows][row])).long()
                before_image[columns].index_add_(0, column, (~(pairs < best[columns][column])).long(), alpha=-1)
            ACTIVITY.still_working()
    return (
        ranks.sum(before_image, purpose="evaluation"),
        ranks.gather(before_text, len(texts), purpose="evaluation"),
    )


def _slices(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _right_pairs(owner: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """The rows of a tile whose right column is in it, and that column."""
    rows = ((owner >= columns.start) & (owner < columns.stop)).nonzero()[:, 0]
    return rows, owner[rows] - columns.start

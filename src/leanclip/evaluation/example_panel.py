"""Pictures of what a model does: held-out images with the captions it finds for them, and its worst confusions."""

import base64
import io
from typing import Any

import numpy as np
import torch

from leanclip.data import Subset
from leanclip.data.decode import decode_image
from leanclip.evaluation.embed import Embedded

PANEL_PIXELS = 160
NEGATIVE_PIXELS = 96
SEARCHED = 2000  # images looked at for the hardest negatives, so that a large set costs no more than a small one
DEPTH = 32  # best captions of an image among which wrong ones are sought: more than any image has of its own
TILE = 1 << 24  # scores that exist at a time


def retrieval_panel(data: Subset, embedded: Embedded, *, images: int = 12, matches: int = 5) -> list[dict[str, Any]]:
    """Some images spread over the set, each with its best-matching captions; the right ones are marked."""
    panel = []
    owner_of = embedded.image_of_text.tolist()
    for row in _spread(len(embedded.ids), images):
        scores, order = (embedded.images[row] @ embedded.texts.T).topk(min(matches, len(embedded.captions)))
        right = [caption for caption, owner in zip(embedded.captions, owner_of, strict=True) if owner == row]
        best = [
            {"caption": embedded.captions[j], "score": score, "correct": embedded.captions[j] in right}
            for j, score in zip(order.tolist(), scores.tolist(), strict=True)
        ]
        panel.append(_picture(data, embedded.ids[row], PANEL_PIXELS) | {"caption": right[0], "matches": best})
    return panel


@torch.no_grad()
def hardest_negatives(
    data: Subset, embedded: Embedded, *, images: int = 6, negatives: int = 3, searched: int = SEARCHED
) -> list[dict[str, Any]]:
    """The images whose best wrong caption beats their best right one by most, or comes nearest to it.

    Each with those wrong captions and the images they belong to. A caption that reads like a right one is not wrong.
    """
    captions_of: dict[int, list[str]] = {}
    owner_of = embedded.image_of_text.tolist()
    for caption, owner in zip(embedded.captions, owner_of, strict=True):
        captions_of.setdefault(owner, []).append(caption)
    own = (embedded.images[embedded.image_of_text] * embedded.texts).sum(1)
    right = own.new_full((len(embedded.images),), -torch.inf)
    right = right.scatter_reduce(0, embedded.image_of_text, own, "amax").tolist()

    found: list[tuple[float, int, list[tuple[int, float]]]] = []
    rows = [row for row in _spread(len(embedded.ids), searched) if row in captions_of]
    depth = min(DEPTH, len(embedded.captions))
    width = max(1, TILE // len(embedded.captions))
    for start in range(0, len(rows), width):
        part = rows[start : start + width]
        scores, order = (embedded.images[part] @ embedded.texts.T).topk(depth)
        for row, values, texts in zip(part, scores.tolist(), order.tolist(), strict=True):
            wrong: dict[str, tuple[int, float]] = {}
            for text, value in zip(texts, values, strict=True):
                if embedded.captions[text] not in captions_of[row]:
                    wrong.setdefault(embedded.captions[text], (text, value))
            if wrong:
                hardest = list(wrong.values())[:negatives]
                found.append((hardest[0][1] - right[row], row, hardest))
    found.sort(key=lambda entry: entry[0], reverse=True)
    return [
        _picture(data, embedded.ids[row], PANEL_PIXELS)
        | {"caption": captions_of[row][0], "score": right[row]}
        | {
            "negatives": [
                _picture(data, embedded.ids[owner_of[text]], NEGATIVE_PIXELS)
                | {"caption": embedded.captions[text], "score": score}
                for text, score in wrong
            ]
        }
        for _, row, wrong in found[:images]
    ]


def _spread(count: int, wanted: int) -> list[int]:
    return np.linspace(0, count - 1, min(wanted, count)).round().astype(int).tolist()


def _picture(data: Subset, index: int, pixels: int) -> dict[str, str]:
    image = decode_image(data.source, index)
    image.thumbnail((pixels, pixels))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=88)
    return {"image": base64.b64encode(file.getvalue()).decode(), "media": "image/jpeg"}

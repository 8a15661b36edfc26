"""Examples for the report: held-out images with the captions nearest to them, and the hardest negatives."""

import base64
import io
from typing import Any

import numpy as np
import torch

from leanclip.data import Source, Subset
from leanclip.data.decode import decode_image
from leanclip.evaluation.embed import Embedded

PANEL_PIXELS = 160
NEGATIVE_PIXELS = 96
SEARCHED = 2000  # images searched for hard negatives, so that a large set costs no more than a small one
DEPTH = 32  # nearest captions of an image among which wrong ones are searched: more than any image has itself
TILE = 1 << 24  # scores that exist at a time
POINTS = 3  # of training before the last, at which the best captions are kept


def retrieval_panel(data: Subset, embedded: Embedded, *, images: int = 12, matches: int = 5) -> list[dict[str, Any]]:
    """Images spread over the set, each with its nearest captions; the right ones are marked."""
    panel, captions_of = [], _captions_of(embedded)
    for row in _spread(len(embedded.ids), images):
        scores, order = (embedded.images[row] @ embedded.texts.T).topk(min(matches, len(embedded.captions)))
        nearest = [
            {"caption": embedded.captions[j], "score": score, "correct": embedded.captions[j] in captions_of[row]}
            for j, score in zip(order.tolist(), scores.tolist(), strict=True)
        ]
        small = thumbnail(data.source, embedded.ids[row], PANEL_PIXELS)
        panel.append(small | {"caption": captions_of[row][0], "matches": nearest})
    return panel


def earlier_best(previous: dict[str, Any], step: int) -> list[dict[str, Any]]:
    """The best caption of each image of a panel at earlier points of training, the first one and others in between.

    `previous` is the panel before, of the same images; it has those of the points before it.
    """
    last = {"step": previous["step"], "best": [image["matches"][0] for image in previous["images"]]}
    points = [
        p for p in (*previous.get("earlier", ()), last) if p["step"] < step and len(p["best"]) == len(last["best"])
    ]
    while len(points) > POINTS:  # without the one whose neighbours are closest to each other
        steps = [*(point["step"] for point in points), step]
        gaps = [steps[i + 1] - steps[i - 1] for i in range(1, len(points))]
        del points[1 + gaps.index(min(gaps))]
    return points


@torch.no_grad()
def hardest_negatives(
    data: Subset, embedded: Embedded, *, images: int = 6, negatives: int = 3
) -> list[dict[str, Any]]:
    """The images whose best wrong caption scores highest relative to their best right one.

    Each with those wrong captions and the images that these belong to. A caption equal to a right one is not wrong.
    """
    captions_of, owner_of = _captions_of(embedded), embedded.image_of_text.tolist()
    pair_scores = (embedded.images[embedded.image_of_text] * embedded.texts).sum(1)
    right = pair_scores.new_full((len(embedded.images),), -torch.inf)
    right = right.scatter_reduce(0, embedded.image_of_text, pair_scores, "amax").tolist()

    hardest: list[tuple[float, int, list[tuple[int, float]]]] = []
    rows = _spread(len(embedded.ids), SEARCHED)
    width = max(1, TILE // len(embedded.captions))
    for start in range(0, len(rows), width):
        part = rows[start : start + width]
        scores, order = (embedded.images[part] @ embedded.texts.T).topk(min(DEPTH, len(embedded.captions)))
        for row, values, texts in zip(part, scores.tolist(), order.tolist(), strict=True):
            wrong: dict[str, tuple[int, float]] = {}
            for text, value in zip(texts, values, strict=True):
                if embedded.captions[text] not in captions_of[row]:
                    wrong.setdefault(embedded.captions[text], (text, value))
            if wrong:
                worst = list(wrong.values())[:negatives]
                hardest.append((worst[0][1] - right[row], row, worst))
    hardest.sort(key=lambda entry: entry[0], reverse=True)
    return [
        thumbnail(data.source, embedded.ids[row], PANEL_PIXELS)
        | {"caption": captions_of[row][0], "score": right[row]}
        | {
            "negatives": [
                thumbnail(data.source, embedded.ids[owner_of[text]], NEGATIVE_PIXELS)
                | {"caption": embedded.captions[text], "score": score}
                for text, score in worst
            ]
        }
        for _, row, worst in hardest[:images]
    ]


def _captions_of(embedded: Embedded) -> dict[int, list[str]]:
    captions: dict[int, list[str]] = {}
    for caption, row in zip(embedded.captions, embedded.image_of_text.tolist(), strict=True):
        captions.setdefault(row, []).append(caption)
    return captions


def _spread(count: int, number: int) -> list[int]:
    return np.linspace(0, count - 1, min(number, count)).round().astype(int).tolist()


def thumbnail(source: Source, index: int, pixels: int) -> dict[str, str]:
    image = decode_image(source, index)
    image.thumbnail((pixels, pixels))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=88)
    return {"image": base64.b64encode(file.getvalue()).decode(), "media": "image/jpeg"}

"""Pictures of what a model does: held-out images with the captions it finds for them."""

import base64
import io
from typing import Any

import numpy as np

from leanclip.data import Subset
from leanclip.data.decode import decode_image
from leanclip.evaluation.embed import Embedded

PANEL_PIXELS = 160


def retrieval_panel(data: Subset, embedded: Embedded, *, images: int = 12, matches: int = 5) -> list[dict[str, Any]]:
    """Some images spread over the set, each with its best-matching captions; the right ones are marked."""
    panel = []
    owner_of = embedded.image_of_text.tolist()
    for row in np.linspace(0, len(embedded.ids) - 1, min(images, len(embedded.ids))).round().astype(int).tolist():
        scores, order = (embedded.images[row] @ embedded.texts.T).topk(min(matches, len(embedded.captions)))
        right = [caption for caption, owner in zip(embedded.captions, owner_of, strict=True) if owner == row]
        best = [
            {"caption": embedded.captions[j], "score": score, "correct": embedded.captions[j] in right}
            for j, score in zip(order.tolist(), scores.tolist(), strict=True)
        ]
        picture = base64.b64encode(_thumbnail(data, embedded.ids[row])).decode()
        panel.append({"image": picture, "media": "image/jpeg", "caption": right[0], "matches": best})
    return panel


def _thumbnail(data: Subset, index: int) -> bytes:
    image = decode_image(data.source, index)
    image.thumbnail((PANEL_PIXELS, PANEL_PIXELS))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=88)
    return file.getvalue()

"""The page of suspects: images with their captions, and the caption that the model would have chosen instead."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from leanclip.data import BrokenSample, Source
from leanclip.data.order import Permutation
from leanclip.errors import UserError
from leanclip.evaluation import EvaluationSettings
from leanclip.evaluation.embed import embed_texts, embedded_batches, inference
from leanclip.evaluation.example_panel import thumbnail
from leanclip.filesystem import write_atomically, writing
from leanclip.models import TwoTower
from leanclip.reporting.report import render
from leanclip.suspects.table import Suspect, utf8

PIXELS = 200
CANDIDATES = 2000  # captions of other samples, among which the model chooses
CANDIDATES_KEY = 0xCA9


def page_entries(
    model: TwoTower, source: Source, rows: list[Suspect], settings: EvaluationSettings
) -> list[dict[str, Any]]:
    """What the page shows of each pair: plain values."""
    instead = _instead(model, source, rows, settings)
    entries = []
    for row in rows:
        try:
            picture = thumbnail(source, row.id, PIXELS)
        except (BrokenSample, UserError) as error:
            picture = {"unreadable": str(error)}
        entries.append(row._asdict() | picture | {"instead": instead.get(row.id)})
    return entries


def _instead(model: TwoTower, source: Source, rows: list[Suspect], settings: EvaluationSettings) -> dict[int, str]:
    """By sample: the caption nearest to its image, of a sample of captions."""
    drawn = Permutation(len(source), CANDIDATES_KEY)(np.arange(min(CANDIDATES, len(source)))).tolist()
    captions = []
    for index in drawn:
        try:
            captions.append(source.captions(index)[0])
        except BrokenSample:
            continue
    if not captions or not rows:
        return {}
    found = {}
    with inference(model, settings):
        texts = embed_texts(model, captions, settings, title="captions")
        ids = np.array([row.id for row in rows])
        for batch, images in embedded_batches(model, source, ids, settings, "images"):
            nearest = torch.argmax(images @ texts.T, 1).tolist()
            found |= {index: utf8(captions[number]) for index, number in zip(batch.ids, nearest, strict=True)}
    return found


def write_page(path: Path, entries: list[dict[str, Any]], **facts: Any) -> None:
    page = render("suspects.html.j2", facts | {"entries": entries})
    with writing(path, code="suspects.cannot_write"):
        write_atomically(path, page.encode("utf-8", errors="replace"))

"""Suspects of a run: from its directory to the table and the page."""

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from leanclip.config import load_toml, override
from leanclip.data import BrokenSample, DataConfig, Manifest, Source, load_manifest, split_source
from leanclip.data.datasets import exchanged, train_source, train_visits
from leanclip.data.order import NO_IDS, Permutation
from leanclip.device import autocast_of, device_of
from leanclip.errors import UserError
from leanclip.evaluation import EvaluationSettings
from leanclip.evaluation.embed import embed_texts, embedded_batches, inference
from leanclip.evaluation.example_panel import thumbnail
from leanclip.filesystem import check_target, write_atomically, writing
from leanclip.inference import find_model
from leanclip.models import TwoTower
from leanclip.reporting.report import render
from leanclip.runs import RunDirectory, TrainConfig
from leanclip.suspects.scores import Scores, model_scores, stored_scores
from leanclip.suspects.table import Suspect, check_output, suspects, utf8, worst_first, write_table

LEAST_ROWS = 1000  # of the table, where few pairs look wrong


class Exchanged(Source):
    """Samples whose captions --exchange-captions gave to others."""

    def __init__(self, source: Source, captions_of: np.ndarray) -> None:
        self.source, self.captions_of = source, captions_of
        self.key, self.file, self.name, self.prefetch = source.key, source.file, source.name, source.prefetch

    def __len__(self) -> int:
        return len(self.source)

    def image_bytes(self, index: int) -> bytes:
        return self.source.image_bytes(index)

    def captions(self, index: int) -> list[str]:
        return self.source.captions(int(self.captions_of[index]))


@dataclass(frozen=True, kw_only=True)
class Search:
    """What to find and where to write it."""

    run: Path
    output: Path | None = None
    page: Path | None = None
    shown: int = 48  # on the page; 0 for no page
    rows: int | None = None  # of the table
    train_data: str | None = None  # if the data of the run have moved
    device: str | None = None
    batch: int = 256
    progress: bool = False


@dataclass(frozen=True, kw_only=True)
class Found:
    """For the summary."""

    samples: int
    scored: int  # samples, or captions where each has a score
    by_caption: bool
    share: float  # of wrong pairs
    can_tell: bool  # whether the model tells right from wrong; otherwise the share says nothing
    rows: int
    table: Path
    page: Path | None
    from_table: bool  # of the run; otherwise its model scored the data

    @property
    def pairs_scored(self) -> str:
        what = "captions of {:,} samples" if self.by_caption else "of {:,} pairs"
        return f"{self.scored:,} {what.format(self.samples)}"


def find_suspects(search: Search) -> Found:
    run = RunDirectory.containing(search.run)
    if run is None:
        raise UserError(
            f"{search.run} is not a run; give the folder that leanclip train wrote", code="suspects.no_run"
        )
    output, page = search.output or run.path / "suspects.csv", search.page or run.path / "suspects.html"
    check_output(output)
    if search.shown:
        with writing(page, code="suspects.cannot_write"):
            check_target(page)
    config = override(TrainConfig(), load_toml(run.config), str(run.config))
    data = config.data if search.train_data is None else replace(config.data, train_data=search.train_data)
    manifest = load_manifest(run.manifest)
    opened = train_source(data, manifest)
    source = _as_seen(opened, data, manifest, config.run.seed)
    saved = find_model(str(search.run))
    scores = None if saved.directory is None else stored_scores(saved.directory)
    from_table, model = scores is not None, None
    device = device_of(search.device)
    settings = EvaluationSettings(
        device=device,
        autocast=autocast_of("fp32", device),
        batch=search.batch,
        workers=min(4, os.cpu_count() or 1),
        progress=search.progress,
    )
    if scores is None or search.shown:
        model = saved.load().to(device).eval()
    if scores is None:
        assert model is not None
        visits = train_visits(data, opened, seed=config.run.seed, manifest=manifest).visits
        scores = model_scores(model, source, visits.ids(), settings, data.captions_per_sample)
    _check_fits(scores, source, search.run)
    ids = worst_first(scores, least=max(LEAST_ROWS, search.shown), rows=search.rows)
    written = write_table(output, suspects(source, scores, ids))
    found = Found(
        samples=len(source),
        scored=int(scores.scored.sum()),
        by_caption=scores.captions > 1,
        share=scores.share,
        can_tell=scores.can_tell,
        rows=written,
        table=output,
        page=page if search.shown else None,
        from_table=from_table,
    )
    if model is not None and search.shown:
        shown = worst_first(scores, least=0, rows=search.shown)
        entries = page_entries(model, source, list(suspects(source, scores, shown)), settings)
        _write_pages(run, page, entries, found)
    return found


def _as_seen(source: Source, data: DataConfig, manifest: Manifest | None, seed: int) -> Source:
    """The training data with the captions that the run saw."""
    if not data.exchange_captions:
        return source
    held_out = split_source(source, data.val_split, seed, manifest).held_out if data.val_split else NO_IDS
    captions_of = exchanged(data, source, held_out, seed=seed)
    return source if captions_of is None else Exchanged(source, captions_of)


def _check_fits(scores: Scores, source: Source, run: Path) -> None:
    if (samples := len(scores.score) // scores.captions) > len(source):
        raise UserError(
            f"{run} has scores of {samples:,} samples and the data hold {len(source):,}; give --train-data,"
            " the data that it was trained on",
            code="suspects.other_data",
        )


def _write_pages(run: RunDirectory, page: Path, entries: list[dict[str, Any]], found: Found) -> None:
    """The page, and for the report of the run what the page shows."""
    wrong = f"{found.share:.1%}, about {round(found.share * found.scored):,}" if found.can_tell else "unknown"
    facts = {
        "scored": found.pairs_scored,
        "look wrong": wrong,
        "shown": f"{len(entries)}",
    }
    write_page(page, entries, name=run.path.resolve().name, facts=facts, can_tell=found.can_tell)
    content = json.dumps({"wrong_pairs": found.share if found.can_tell else None, "pairs": entries})
    with writing(run.suspects, code="suspects.cannot_write"):
        write_atomically(run.suspects, content)


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

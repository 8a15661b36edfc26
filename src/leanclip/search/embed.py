"""Fills an embedding store: blocks of consecutive samples, shared by the ranks, each computed and written as a whole.

A block always holds the same samples, so that a run that was killed and continued, or one on other numbers of
processes, writes the same bytes as one that was not.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from leanclip.data import BrokenSample, DataConfig, EvaluationTransform, Source
from leanclip.data.decode import Transform, pixels_of_sample
from leanclip.data.feature_table import BROKEN
from leanclip.data.loader import in_parts, read_each
from leanclip.distributed import Ranks
from leanclip.errors import UserError
from leanclip.evaluation.embed import MANY_SAMPLES, EvaluationSettings, inference
from leanclip.features.locked_towers import by_length, count_captions, model_digest
from leanclip.filesystem import writing
from leanclip.inference import find_model, find_weights_directory
from leanclip.models import TwoTower
from leanclip.progress import ACTIVITY, progress_bar
from leanclip.search.data import absolute, identity_of, open_data, shards_of
from leanclip.search.store import COLUMNS, FACTS, FORMAT, SIDES, EmbeddingStore, plain, width_of
from leanclip.version import __version__

BLOCK = 256  # samples; fixed, because the size of a batch changes the last bit of a result
SAMPLED_KEYS = 256

Of = Literal["both", "images", "captions"]


def embed_data(
    name: str,
    data: str,
    out: Path,
    *,
    of: Of,
    config: DataConfig,
    precision: str,
    settings: EvaluationSettings,
    notify: Callable[[str], object],
) -> EmbeddingStore:
    """The complete store: what another run has already written is kept. All ranks call it together."""
    ranks = Ranks.current()
    place = ranks.broadcast_from_first(lambda: place_of(name))  # a run that trains on has another checkpoint soon
    model = find_model(place).load().to(settings.device).eval()
    source = open_data(data, config)
    facts = facts_of(model, place, source, absolute(data), config, precision)
    with writing(out, code="embed.not_writable"):
        missing = ranks.broadcast_from_first(lambda: _prepare(out, facts, source, of, notify))
    store = EmbeddingStore(out, writable=True)
    blocks = np.unique(missing // BLOCK)
    left = len(missing)
    if left < store.samples:
        notify(f"{store.samples - left:,} of {store.samples:,} samples are embedded already")
    local = blocks[ranks.share(len(blocks))]
    with inference(model, settings), progress_bar("embedding", left, shown=settings.progress) as advance:
        for done in _fill(store, model, source, local, settings):
            ACTIVITY.still_working()
            advance(done * ranks.size)
    ranks.all_gather_objects(None)  # until all have written
    store = EmbeddingStore(out)
    if len(store.missing()):
        raise RuntimeError(f"{out} lacks the embeddings of {len(store.missing()):,} samples")
    if ranks.first:
        with writing(out, code="embed.not_writable"):
            store.write_parquet()
    return store


def facts_of(
    model: TwoTower, place: str, source: Source, location: str, config: DataConfig, precision: str
) -> dict[str, Any]:
    """What embeddings.json records: two stores with the same `identity` hold the same vectors."""
    return {
        "format": FORMAT,
        "leanclip": __version__,
        "model": {
            "place": place,
            "digest": model_digest(model),
            "dim": int(model.config["embed_dim"]),
            "preprocess": asdict(model.preprocess),
            "precision": precision,
        },
        "data": {
            "location": location,
            "samples": len(source),
            "identity": identity_of(source),
            "columns": {name: getattr(config, name) for name in COLUMNS},
        },
        "shards": [list(shard) for shard in shards_of(source, location)],
    }


def refuse_other(store: EmbeddingStore, facts: dict[str, Any]) -> None:
    """An error if the store was made by another model or from other data; it says which."""
    old, new = store.facts["model"], facts["model"]
    if old["digest"] != new["digest"]:
        raise UserError(
            f"{store.directory} was embedded with {described(old)}, not with {described(new)}; give that model, or"
            " another directory",
            code="search.other_model",
        )
    changed = [name for name in ("preprocess", "precision") if plain(old[name]) != plain(new[name])]
    if changed:
        raise UserError(
            f"{store.directory} was embedded with {changed[0]} {old[changed[0]]}, not {new[changed[0]]}; give the"
            " same, or another directory",
            code="search.other_model",
        )
    old, new = store.facts["data"], facts["data"]
    if plain(old["identity"]) != plain(new["identity"]) or old["columns"] != new["columns"]:
        raise UserError(
            f"{store.directory} holds {old['samples']:,} samples of {old['location']}, not these {new['samples']:,}"
            f" of {new['location']}, or they have changed since; give another directory",
            code="search.other_data",
        )


def _prepare(out: Path, facts: dict[str, Any], source: Source, of: Of, notify: Callable[[str], object]) -> np.ndarray:
    """Make the tables that are not there yet; the ids that some table lacks. Only the first rank calls it."""
    wanted = SIDES if of == "both" else (of,)
    store = None
    if (out / FACTS).is_file():
        store = EmbeddingStore(out, writable=True)
        refuse_other(store, facts)
    firsts: dict[str, np.ndarray] = {}
    for side in wanted:
        if store is None or side not in store.tables:
            firsts[side] = np.arange(len(source) + 1) if side == "images" else count_captions(source)[0]
    if "captions" in firsts and not firsts["captions"][-1]:
        if of == "captions":
            raise UserError(f"{facts['data']['location']} has no captions", code="embed.no_captions")
        notify("the data have no captions: images only")
        del firsts["captions"]
    if store is None:
        spread = np.linspace(0, len(source) - 1, min(SAMPLED_KEYS, len(source))).astype(int)
        width = width_of([source.key(index) for index in spread.tolist()])
        return EmbeddingStore.create(out, facts, firsts, key_bytes=width).missing()
    for side, first in firsts.items():
        store.add_side(side, first)
    return store.missing()


@dataclass
class _Block:
    """Samples as they were read. What is broken lacks in `images` or `captions`."""

    ids: list[int]
    keys: list[str]
    images: Tensor | None = None  # (b, 3, H, W) uint8
    image_ids: list[int] = field(default_factory=list)
    captions: dict[int, list[str]] = field(default_factory=dict)
    broken: dict[str, dict[int, BrokenSample]] = field(default_factory=dict)  # by side

    def pin_memory(self) -> "_Block":
        if self.images is not None:
            self.images = self.images.pin_memory()
        return self


def _read_block(source: Source, transform: Transform, lacking: dict[str, set[int]], numbers: list[int]) -> _Block:
    (number,) = numbers
    ids = range(BLOCK * number, min(BLOCK * (number + 1), len(source)))
    with_images = number in lacking.get("images", ())
    if with_images:
        source.prefetch(ids)
    block = _Block([*ids], [source.key(index) for index in ids])
    if with_images:
        pixels, block.broken["images"] = read_each(partial(pixels_of_sample, source, transform=transform), ids)
        block.image_ids, block.images = list(pixels), torch.stack(list(pixels.values())) if pixels else None
    if number in lacking.get("captions", ()):
        block.captions, block.broken["captions"] = read_each(source.captions, ids)
    for error in (error for broken in block.broken.values() for error in broken.values()):
        if error.kind == "vanished":  # a disk that is away comes back: the sample is not broken
            raise UserError(f"{error}; run the command again to continue", code="embed.vanished")
    return block


def _fill(
    store: EmbeddingStore, model: TwoTower, source: Source, blocks: np.ndarray, settings: EvaluationSettings
) -> Iterator[int]:
    """Compute and write blocks. While the device computes one, the one before is written."""
    lacking = {side: set(np.unique(table.missing() // BLOCK).tolist()) for side, table in store.tables.items()}
    read = partial(_read_block, source, EvaluationTransform(model.preprocess), lacking)
    workers = settings.workers if store.samples > MANY_SAMPLES else 0
    waiting: tuple[_Block, dict[str, Tensor]] | None = None
    for block in in_parts(read, blocks, 1, workers=workers, pin_memory=settings.device.type == "cuda"):
        embeddings = _embed(model, block, settings)
        if waiting is not None:
            yield _write(store, *waiting)
        waiting = block, embeddings
    if waiting is not None:
        yield _write(store, *waiting)


def _embed(model: TwoTower, block: _Block, settings: EvaluationSettings) -> dict[str, Tensor]:
    embeddings = {}
    if block.images is not None:
        pixels = block.images.to(settings.device, non_blocking=True)
        parts = [model.encode_image(part) for part in pixels.split(settings.batch)]
        embeddings["images"] = torch.cat(parts).half()
    captions = [caption for texts in block.captions.values() for caption in texts]
    if captions:
        rows = by_length(captions, settings.batch, lambda texts: model.encode_text(model.tokenizer(texts)))
        embeddings["captions"] = rows.half()
    return embeddings


def _write(store: EmbeddingStore, block: _Block, embeddings: dict[str, Tensor]) -> int:
    store.write_keys(block.ids, block.keys)  # before the marks: a sample that is marked has its key
    ids_of = {"images": block.image_ids, "captions": list(block.captions)}
    for side, table in store.tables.items():
        if side in embeddings:
            rows = embeddings[side].cpu().numpy()
            if not np.isfinite(rows).all():
                raise UserError(
                    f"the model's embeddings of {side} are not finite: its weights are damaged, or it needs"
                    " --precision fp32",
                    code="embed.not_finite",
                )
            expected = sum(int(table.first[index + 1] - table.first[index]) for index in ids_of[side])
            if expected != len(rows):
                raise UserError(
                    f"captions of samples {block.keys[0]} to {block.keys[-1]} have changed since they were counted;"
                    " embed into another directory",
                    code="data.changed",
                )
            table.write(ids_of[side], rows)
        for index, error in block.broken.get(side, {}).items():
            if table.done[index] != BROKEN:
                table.mark_broken(index, error.kind, str(error))
    return len(block.ids)


def config_of(facts: dict[str, Any]) -> DataConfig:
    """How the data of a store are read."""
    return DataConfig(**{name: facts["data"]["columns"][name] for name in COLUMNS})


def described(model: dict[str, Any]) -> str:
    """A model as `facts_of` records it, for a message."""
    step = re.fullmatch(r"step_([0-9]+)", Path(model["place"]).name)
    return f"{model['place']} ({f'step {int(step[1]):,}, ' if step else ''}weights {model['digest'][:12]})"


def place_of(model: str) -> str:
    """A model by a name that does not depend on the working directory, nor on the steps that a run trains on."""
    name, colon, weights = model.partition(":")
    if Path(model).is_dir():
        return str(find_weights_directory(Path(model)).resolve())
    if Path(model).exists():
        return str(Path(model).absolute())
    return f"{name}:{Path(weights).absolute()}" if colon and Path(weights).exists() else model

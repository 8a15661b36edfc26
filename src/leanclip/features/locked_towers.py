"""Locked towers run once: features of every sample, in tables that training reads instead of pixels or captions."""

import hashlib
import json
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from leanclip.data import BrokenSample, Source
from leanclip.data.decode import Transform, view_of_sample
from leanclip.data.feature_table import Features, FeatureTable, copy_to_gpu
from leanclip.data.loader import in_parts, read_each, stacked
from leanclip.data.order import sample_seed
from leanclip.data.shards import Shards
from leanclip.data.source import Packable
from leanclip.distributed import Ranks
from leanclip.errors import UserError
from leanclip.filesystem import cache_directory, parse_json
from leanclip.models import TwoTower
from leanclip.models.towers.projection import Projection
from leanclip.progress import ACTIVITY, progress_bar

FORMAT = 2
CHOICES = ("held_out", "excluded")  # of ids, in a manifest
VIEW_SEED = 0  # of the augmented views: runs that differ in their seed share the tables
IMAGES_PER_PASS, SAMPLES_PER_PASS = 256, 1024  # the latter: whose captions are sorted by length


@dataclass(frozen=True, kw_only=True)
class LockedTowers:
    """What the tables are computed from, and how. All ranks share the work."""

    model: TwoTower
    source: Source
    data_name: str  # in messages
    transform: Transform
    views: int
    autocast: torch.autocast
    workers: int
    ranks: Ranks
    notify: Callable[[str], object]
    ids: np.ndarray | None = None  # of the samples; by default all
    device: torch.device | None = None  # where training reads them; those of held-out data stay mapped

    def features(self, *, images: bool, texts: bool) -> Features:
        """The tables of the towers that are locked, read from the cache or computed."""
        with self._inference():
            tables = self._table("image") if images else None, self._table("text") if texts else None
        image_size, text_size = (None if table is None else table.dim for table in tables)
        self.model.feature_sizes = image_size, text_size
        if tables[1] is not None:
            tables[1].leave_out(self.source.left_out)
        if self.device is not None and self.device.type == "cuda":
            copy_to_gpu(tables, self.device)
        return Features(*tables)

    def expected(self, *, images: bool, texts: bool) -> str:
        """How much room the tables will take."""
        with self._inference():
            widths = self._dim("image") if images else None, self._dim("text") if texts else None
        self.model.feature_sizes = widths  # so that a step is measured as it will run
        size = table_sizes(*widths, samples=len(self.source), views=self.views)
        return f"features of the locked towers will take {size} in {cache_directory() / 'features'}"

    @contextmanager
    def _inference(self) -> Iterator[None]:
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad(), self.autocast:
                yield
        finally:
            self.model.train(was_training)

    def _table(self, side: str) -> FeatureTable:
        facts = self._facts(side)
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        directory = cache_directory() / "features" / f"{side}-{digest[:16]}"
        missing = self.ranks.broadcast_from_first(lambda: self._missing(self._prepare(side, directory, facts)))
        if not (directory / "table.json").is_file():
            raise UserError(
                f"{directory} is not shared by all processes; set LEANCLIP_CACHE to a directory that is",
                code="features.not_shared",
            )
        table, begin = FeatureTable(directory, writable=True), time.perf_counter()
        if len(missing):
            local = missing[self.ranks.share(len(missing))]
            fill = self._fill_images if side == "image" else self._fill_texts
            title = f"features of the {side} tower, {self.data_name}"
            with progress_bar(title, len(missing), shown=self.ranks.first) as advance:
                for done in fill(table, local):
                    ACTIVITY.still_working()
                    advance(done * self.ranks.size)
        self.ranks.all_gather_objects(None)  # until all have written
        table = FeatureTable(directory)
        if len(left := self._missing(table)):
            raise RuntimeError(f"{directory} lacks the features of {len(left):,} samples")
        table.seconds = time.perf_counter() - begin if len(missing) else None
        how = "read from the cache" if table.seconds is None else f"computed in {table.seconds:,.0f} s"
        rows = len(table.features) if self.ids is None else int(np.diff(table.first)[self.ids].sum())
        self.notify(
            f"features of the {side} tower, {self.data_name}: {how}, {rows:,} rows of {table.dim},"
            f" {2 * rows * table.dim / 2**20:,.1f} MiB in {directory}"
        )
        return table

    def _missing(self, table: FeatureTable) -> np.ndarray:
        """The ids whose features are still to be computed."""
        missing = table.missing()
        return missing if self.ids is None else np.intersect1d(missing, self.ids)

    def _facts(self, side: str) -> dict[str, Any]:
        tower = self.model.clip.visual if side == "image" else _text_modules(self.model)
        facts: dict[str, Any] = {
            "format": FORMAT,
            "weights": digest_of(tower, without=self.model.projection(side == "text")),
            "tower": self.model.architecture("image" if side == "image" else "text"),
            "data": _data_identity(self.source, side),
            "precision": str(self.autocast.fast_dtype) if self.autocast._enabled else "full",
        }
        if side == "image":
            facts |= {"transform": repr(self.transform), "views": self.views, "seed": VIEW_SEED}
            facts["preprocess"] = asdict(self.model.preprocess)
        return json.loads(json.dumps(facts))  # as the table's file has them

    def _prepare(self, side: str, directory: Path, facts: Mapping[str, Any]) -> FeatureTable:
        """Make an empty table, unless there is a sound one. Only the first rank does, and says which ids are missing:
        a rank that looked later would not see those that another has written by then."""
        with_table = directory / "table.json"
        try:
            if with_table.is_file() and parse_json(with_table.read_bytes()) == facts:
                table = FeatureTable(directory)
                table.check()
                return table
        except (OSError, ValueError):
            self.notify(f"{directory} is damaged and is computed again")
        shutil.rmtree(directory, ignore_errors=True)
        try:
            if side == "image":
                first, weights = np.arange(len(self.source) + 1) * self.views, None
            else:
                first, weights = count_captions(self.source)
            directory.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(dir=directory.parent, ignore_cleanup_errors=True) as folder:
                empty = Path(folder) / "table"
                FeatureTable.create(empty, first, self._dim(side), dict(facts), weights)
                try:
                    empty.rename(directory)
                except OSError:  # another run has made it meanwhile: both fill that one
                    if not directory.is_dir():
                        raise
            return FeatureTable(directory)
        except OSError as error:
            raise UserError(
                f"cannot write {directory} ({error.strerror}); set LEANCLIP_CACHE to another directory",
                code="features.not_writable",
            ) from error

    def _dim(self, side: str) -> int:
        if side == "text":
            features = self.model.text_features(self.model.tokenizer([""]))
        else:
            pixels = torch.zeros(1, 3, *self.model.image_size, dtype=torch.uint8, device=self.model.image_mean.device)
            features = self.model.image_features(pixels)
        if features.ndim != 2:
            raise UserError(
                f"the {side} tower of {self.model.name} is not pooled before its projection, so its features cannot"
                " be kept; leave out --cache-locked",
                code="model.no_features",
            )
        return features.shape[1]

    def _fill_images(self, table: FeatureTable, ids: np.ndarray) -> Iterator[int]:
        batches = view_batches(
            self.source, ids, self.transform, views=self.views, seed=VIEW_SEED,
            batch=max(1, IMAGES_PER_PASS // self.views), workers=self.workers,
        )  # fmt: skip
        with channels_last(self.model.clip.visual):
            for batch in batches:
                if batch.ids:
                    pixels = batch.images.to(self.model.image_mean.device, memory_format=torch.channels_last)
                    table.write(batch.ids, _stored(self.model.image_features(pixels)))
                for index, error in batch.broken.items():
                    table.mark_broken(index, error.kind, str(error))
                yield len(batch.ids) + len(batch.broken)

    def _fill_texts(self, table: FeatureTable, ids: np.ndarray) -> Iterator[int]:
        model = self.model
        for start in range(0, len(ids), SAMPLES_PER_PASS):
            captions, broken = read_each(self.source.captions, ids[start : start + SAMPLES_PER_PASS].tolist())
            if captions:
                texts = [text for several in captions.values() for text in several]
                rows = by_length(texts, IMAGES_PER_PASS, lambda part: model.text_features(model.tokenizer(part)))
                table.write(list(captions), _stored(rows))
            for index, error in broken.items():
                table.mark_broken(index, error.kind, str(error))
            yield len(captions) + len(broken)


def by_length(texts: list[str], batch: int, encode: Callable[[list[str]], Tensor]) -> Tensor:
    """A row for each text. Texts of similar length go together, so that little padding is computed."""
    order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
    parts = [encode([texts[number] for number in order[at : at + batch]]) for at in range(0, len(order), batch)]
    rows = torch.cat(parts)
    return rows[torch.tensor(order).argsort().to(rows.device)]


class ViewBatch(NamedTuple):
    """Samples with several views each, one sample after the other, and those that could not be read."""

    ids: list[int]
    images: Tensor  # (views * b, 3, H, W) uint8
    broken: dict[int, BrokenSample]


def view_batches(
    source: Source, ids: np.ndarray, transform: Transform, *, views: int, seed: int, batch: int, workers: int
) -> Iterator[ViewBatch]:
    """Each sample's augmented images of the first `views` epochs of a run with this seed."""
    return in_parts(partial(_view_batch, source, transform, views, seed), ids, batch, workers=workers)


def _view_batch(source: Source, transform: Transform, views: int, seed: int, ids: list[int]) -> ViewBatch:
    def read(index: int) -> list[Tensor]:
        seeds = [sample_seed(seed, view, index) for view in range(views)]
        return [view_of_sample(source, index, transform, seed=number) for number in seeds]

    samples, broken = read_each(read, ids)
    return ViewBatch(list(samples), stacked(image for images in samples.values() for image in images), broken)


def table_sizes(image: int | None, text: int | None, *, samples: int, views: int) -> str:
    """How much room tables of features of these widths take."""
    sizes = []
    if image is not None:
        sizes.append(f"{2 * samples * views * image / 2**20:,.1f} MiB for {views} views of each image")
    if text is not None:
        sizes.append(f"{2 * text / 2**10:,.1f} KiB for each caption")
    return " and ".join(sizes)


@contextmanager
def channels_last(tower: nn.Module) -> Iterator[None]:
    """The memory layout in which convolutions are fastest, by half on a CPU; a checkpoint needs the usual one."""
    tower.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    try:
        yield
    finally:
        tower.to(memory_format=torch.contiguous_format)  # pyright: ignore[reportCallIssue]


def count_captions(source: Source) -> tuple[np.ndarray, np.ndarray | None]:
    """The first row of each sample in a table of all captions, and their weights if a sample has any."""
    first, weights, weighted = [0], [], False
    with progress_bar("counting captions", len(source)) as advance:
        for index in range(len(source)):
            try:
                captions, shares = source.weighted_captions(index)
            except BrokenSample:
                captions, shares = [], None
            weighted = weighted or shares is not None
            weights += [1.0] * len(captions) if shares is None else shares
            first.append(first[-1] + len(captions))
            if index % 1000 == 999:
                ACTIVITY.still_working()
                advance(1000)
    return np.asarray(first), np.asarray(weights) if weighted else None


def digest_of(module: nn.Module, *, without: Projection | None = None) -> str:
    """Of the weights of a model, or of a tower with its projection left out."""
    digest = hashlib.sha256()
    with nullcontext() if without is None else without.left_out():
        for name, tensor in sorted(module.state_dict().items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def model_digest(model: TwoTower) -> str:
    """Of all that decides the embeddings of a model but the preprocessing."""
    facts = [digest_of(model.clip), model.architecture("image"), model.architecture("text")]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _text_modules(model: TwoTower) -> nn.Module:
    """The text tower. In open_clip's CLIP its parts lie beside the image tower, in the model itself."""
    if hasattr(model.clip, "text"):
        return model.clip.text
    parts = {name: part for name, part in model.clip.named_children() if name != "visual"}
    tower = nn.ModuleDict(parts)
    tower.register_parameter("positional_embedding", model.clip.positional_embedding)
    return tower


def _data_identity(source: Source, side: str) -> Any:
    """The files that fix the ids, and what is read of them; which ids are trained on changes no features."""
    manifest = source.manifest()
    if manifest is None:
        return [len(source), type(source).__name__]
    read: list[Any] = []
    if isinstance(source, Packable):  # a table, whose images lie in files of their own
        sizes = source.image_sizes()
        read = [source.identity(), None if sizes is None else zlib.crc32(sizes.tobytes())]
    elif isinstance(source, Shards) and side == "text":
        read = [source.caption_key, source.weights_key]
    return [*({name: value for name, value in entry.items() if name not in CHOICES} for entry in manifest), read]


def _stored(features: Tensor) -> np.ndarray:
    rows = features.to(torch.float16)
    if not bool(rows.isfinite().all()):
        raise UserError(
            "features of a locked tower do not fit into float16; leave out --cache-locked", code="features.not_finite"
        )
    return rows.cpu().numpy()

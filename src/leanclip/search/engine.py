"""What the page and `--query` ask for: the nearest images of a sentence or an image, with captions and thumbnails."""

import io
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from leanclip.data import BrokenSample, EvaluationTransform, Source
from leanclip.data.decode import decoding, open_image
from leanclip.device import device_of
from leanclip.errors import UserError
from leanclip.features.locked_towers import model_digest
from leanclip.inference import find_model
from leanclip.models import TEMPLATES, TwoTower
from leanclip.search.data import identity_of, open_data
from leanclip.search.duplicates import PairSearch
from leanclip.search.embed import config_of, described, place_of
from leanclip.search.index import LARGEST_EXACT, ExactIndex, LargeIndex, open_index
from leanclip.search.store import EmbeddingStore, plain

LONGEST_TEXT, MOST_HITS, MOST_CLASSES, LONGEST_CAPTION = 2000, 1000, 1000, 2000
MOST_PROMPTS = 8000  # classes times templates: some minutes of a CPU
THUMBNAILS_KEPT, QUERIES_KEPT, SORTED_KEPT = 2000, 256, 4
DECODED_AT_ONCE = 2  # images; a large one takes some hundred MB
ROWS_AT_ONCE = 1 << 15  # images that are sorted


class RequestError(Exception):
    """A request that cannot be answered: the message is for the person who asked."""


class Hit(NamedTuple):
    id: int
    key: str
    shard: str
    score: float
    caption: str


@dataclass(frozen=True)
class Sorted:
    classes: tuple[str, ...]
    ids: np.ndarray  # (n,) of the images, by class and within a class the doubtful ones first
    assigned: np.ndarray  # (n,) the class of each
    second: np.ndarray  # (n,) the class that comes next
    probability: np.ndarray  # (n,) of the class against the others
    bounds: np.ndarray  # (C + 1,) the first image of each class

    @property
    def counts(self) -> list[int]:
        return np.diff(self.bounds).tolist()

    def rows_of(self, number: int) -> range:
        return range(int(self.bounds[number]), int(self.bounds[number + 1]))


class Engine:
    """Threads may call everything. The model and the index compute for one of them at a time."""

    def __init__(
        self, store: EmbeddingStore, source: Source, model: TwoTower, index: ExactIndex | LargeIndex
    ) -> None:
        self.store, self.source, self.model, self.index = store, source, model, index
        self.device = next(model.parameters()).device
        self.usable = store.usable("images")
        self._computing, self._reading = threading.Lock(), threading.Lock()
        self._decoding = threading.BoundedSemaphore(DECODED_AT_ONCE)
        self._text_vector = lru_cache(QUERIES_KEPT)(lambda text: self._texts([text])[0])
        self._thumbnail = lru_cache(THUMBNAILS_KEPT)(self._make_thumbnail)
        self.sorted: dict[str, Sorted] = {}  # by the name of the classes
        self._pairs: PairSearch | None = None

    # ---- queries

    def of_text(self, text: str) -> np.ndarray:
        text = " ".join(text.split())
        if not text:
            raise RequestError("type a sentence")
        if len(text) > LONGEST_TEXT:
            raise RequestError(f"the sentence has {len(text):,} characters; at most {LONGEST_TEXT:,} are read")
        return self._text_vector(text)

    def of_image(self, content: bytes) -> np.ndarray:
        try:
            with self._decoding:
                pixels = EvaluationTransform(self.model.preprocess)(content)
        except BrokenSample as error:
            raise RequestError(f"the image cannot be read: {error}") from error
        with self._computing, torch.no_grad():
            return self.model.encode_image(pixels[None].to(self.device)).float().cpu().numpy()[0]

    def of_sample(self, index: int) -> np.ndarray:
        if not self.usable[self.checked(index)]:
            raise RequestError("this sample has no vector")
        return np.asarray(self.store.tables["images"].features[index], np.float32)

    def _texts(self, texts: list[str]) -> np.ndarray:
        parts = []
        for start in range(0, len(texts), 256):
            with self._computing, torch.no_grad():  # others compute between two parts
                parts.append(self.model.encode_text(self.model.tokenizer(texts[start : start + 256])))
        return torch.cat(parts).float().cpu().numpy()

    def nearest(self, query: np.ndarray, *, count: int = 10, offset: int = 0, shard: int | None = None) -> list[Hit]:
        """The hits from `offset` on, and none beyond the first MOST_HITS."""
        offset = max(offset, 0)
        stop, span = min(offset + max(count, 0), MOST_HITS), self._span(shard)
        if stop <= offset:
            return []
        with self._computing:
            found = self.index.nearest(query, stop, span)
        ids, scores = found.ids[offset:].tolist(), found.scores[offset:].tolist()
        return [self.hit(index, score) for index, score in zip(ids, scores, strict=True)]

    def hit(self, index: int, score: float) -> Hit:
        return Hit(index, self.store.key(index), self.shard_of(index), round(score, 4), self.caption(index))

    def _span(self, shard: int | None) -> tuple[int, int] | None:
        if shard is None:
            return None
        if not 0 <= shard < len(self.store.shards):
            raise RequestError("there is no such shard")
        return self.store.ids_of_shard(shard)

    # ---- samples

    def checked(self, index: int) -> int:
        if not 0 <= index < self.store.samples:
            raise RequestError(f"there is no sample {index}")
        return index

    def shard_of(self, index: int) -> str:
        return self.store.shards[int(self.store.shard_number(index))].name

    def caption(self, index: int) -> str:
        """The captions of a sample, or nothing if it has none."""
        try:
            with self._reading:
                return " / ".join(self.source.captions(index))[:LONGEST_CAPTION]
        except BrokenSample:
            return ""

    def thumbnail(self, index: int, pixels: int) -> bytes:
        """A JPEG whose longer side has this many pixels at most."""
        return self._thumbnail(self.checked(index), pixels)

    def _make_thumbnail(self, index: int, pixels: int) -> bytes:
        try:
            with self._reading:
                content = self.source.image_bytes(index)
            with self._decoding:
                image = open_image(content)
                with decoding():
                    image.draft("RGB", (pixels, pixels))
                    image = image.convert("RGBA" if image.mode in ("P", "LA", "PA", "RGBA") else "RGB")
                    image.thumbnail((pixels, pixels))
                    if image.mode == "RGBA":
                        white = Image.new("RGB", image.size, "white")
                        white.paste(image, mask=image.getchannel("A"))
                        image = white
        except BrokenSample as error:
            shard = self.store.shards[int(self.store.shard_number(index))]
            raise RequestError(f"{error} (it was read from {shard.path})") from error
        file = io.BytesIO()
        image.save(file, "JPEG", quality=88)
        return file.getvalue()

    # ---- the whole set

    def sort(self, classes: list[str], templates: str) -> tuple[str, Sorted]:
        """The images sorted into classes, and a name under which they can be asked for again."""
        names = tuple(dict.fromkeys(" ".join(name.split()) for name in classes if name.strip()))
        if len(names) < 2:
            raise RequestError("type at least two classes, one per line")
        if len(names) > MOST_CLASSES or max(map(len, names)) > LONGEST_TEXT:
            raise RequestError(f"at most {MOST_CLASSES:,} classes of {LONGEST_TEXT:,} characters are sorted into")
        if templates not in ("plain", *TEMPLATES):
            raise RequestError(f"the prompts are plain, {', '.join(TEMPLATES)}")
        each = 1 if templates == "plain" else len(TEMPLATES[templates])
        if len(names) * each > MOST_PROMPTS:
            raise RequestError(
                f"{len(names):,} classes with {each} prompts each are {len(names) * each:,} sentences; at most"
                f" {MOST_PROMPTS:,} are embedded: type fewer classes, or choose other prompts"
            )
        name = f"{hash((names, templates)) & 0xFFFF_FFFF_FFFF:012x}"
        result = self.sorted.get(name)
        if result is None:
            result = self.sorted[name] = self._sort(names, templates)
            for oldest in list(self.sorted)[:-SORTED_KEPT]:
                self.sorted.pop(oldest, None)  # perhaps by another thread
        return name, result

    def _sort(self, names: tuple[str, ...], templates: str) -> Sorted:
        chosen = ("{}",) if templates == "plain" else TEMPLATES[templates]
        prompts = [template.replace("{}", name).replace("{c}", name) for name in names for template in chosen]
        vectors = self._texts(prompts).reshape(len(names), len(chosen), -1).mean(1)
        classifier = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        features, ids = self.store.tables["images"].features, np.flatnonzero(self.usable)
        with self._computing:
            return sort_into(names, classifier, features, ids, scale=1 / self.model.temperature())

    def pairs(self, threshold: float) -> PairSearch:
        """Near-duplicates, searched in a thread. The pairs of a lower threshold include those of a higher one: only a
        lower one starts again, so that two pages do not end each other's search."""
        if not 0.5 <= threshold <= 1:
            raise RequestError("the threshold is a score from 0.5 to 1")
        with self._reading:
            search = self._pairs
            if search is None or search.threshold > threshold:
                if search is not None:
                    search.stop.set()
                search = self._pairs = PairSearch(threshold, asking=self._computing)
                threading.Thread(target=search.run, args=(self.index, self.usable), daemon=True).start()
            elif search.finished and search.error is not None:
                self._pairs = None  # it is reported now; the next request tries again
            return search


def sort_into(
    classes: tuple[str, ...], classifier: np.ndarray, features: np.ndarray, ids: np.ndarray, *, scale: float
) -> Sorted:
    """`classifier` has a unit vector for each class; `scale` is that of the model's logits."""
    weights = torch.from_numpy(classifier.astype(np.float32)).T
    parts = []
    for start in range(0, len(ids), ROWS_AT_ONCE):
        rows = np.asarray(features[ids[start : start + ROWS_AT_ONCE]])
        probabilities = (scale * (torch.from_numpy(rows).float() @ weights)).softmax(1)
        top = probabilities.topk(min(2, len(classes)), dim=1)
        parts.append((top.indices[:, 0].numpy(), top.indices[:, -1].numpy(), top.values[:, 0].numpy()))
    assigned, second, probability = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.lexsort((ids, probability, assigned))
    bounds = np.searchsorted(assigned[order], np.arange(len(classes) + 1))
    return Sorted(classes, ids[order], assigned[order], second[order], probability[order], bounds)


def open_engine(
    directory: str,
    *,
    model: str | None = None,
    data: str | None = None,
    device: str | None = None,
    largest_exact: int = LARGEST_EXACT,
    notify: Callable[[str], object] = print,
) -> Engine:
    """Open embeddings with the model and the data that they were made from; `model` and `data` say where these are
    now."""
    store = EmbeddingStore(Path(directory))
    if "images" not in store.tables:
        raise UserError(
            f"{directory} holds captions only; add the images: leanclip embed MODEL DATA {quote(str(directory))}"
            " --of images",
            code="search.no_images",
        )
    if missing := len(store.missing()):
        notify(f"{missing:,} of {store.samples:,} samples are not embedded yet; give leanclip embed again")
    source = _open_source(store, data)
    trained = _open_model(store, model).to(device_of(device)).eval()
    return Engine(store, source, trained, open_index(store, largest_exact=largest_exact, notify=notify))


def _open_model(store: EmbeddingStore, name: str | None) -> TwoTower:
    recorded = store.facts["model"]
    try:
        place = place_of(name or recorded["place"])
        model = find_model(place).load()
    except UserError as error:
        if name is not None:
            raise
        raise UserError(
            f"the embeddings were made with {described(recorded)}, which cannot be loaded ({error}); say where it is"
            " now with --model, or embed into another directory",
            code="search.model_moved",
        ) from error
    digest = model_digest(model)
    if digest != recorded["digest"]:
        raise UserError(
            f"{store.directory} was embedded with {described(recorded)}, not with"
            f" {described({'place': place, 'digest': digest})}; give that model with --model, or embed into another"
            " directory",
            code="search.other_model",
        )
    return model


def _open_source(store: EmbeddingStore, location: str | None) -> Source:
    recorded = store.facts["data"]
    try:
        source = open_data(location or recorded["location"], config_of(store.facts))
    except UserError as error:
        if location is not None:
            raise
        raise _moved(store, str(error)) from error
    if plain(identity_of(source)) != plain(recorded["identity"]):
        raise _moved(store, _difference(store, identity_of(source)))
    return source


def _difference(store: EmbeddingStore, identity: Any) -> str:
    """The first file of the data that is not there any more, or not as it was."""
    recorded = store.facts["data"]["identity"]
    if isinstance(identity, list) and isinstance(recorded, list):
        now = {entry["name"]: entry for entry in identity if isinstance(entry, dict)}
        for entry, shard in zip(recorded, store.shards, strict=False):
            name = str(entry["name"]) if isinstance(entry, dict) and "name" in entry else None
            if name is not None and plain(now.get(name)) != entry:
                return f"{shard.path} {'has changed' if name in now else 'is missing'}"
    return "they have changed"


def _moved(store: EmbeddingStore, reason: str) -> UserError:
    return UserError(
        f"the data were at {store.facts['data']['location']} when they were embedded ({reason}); restore them, or say"
        " where they are now with --data",
        code="search.data_moved",
    )

"""The interface between a data set and the loader, broken samples, and what sources of the user's own files share."""

import contextlib
import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np

from leanclip.data.files import MAX_IMAGE_BYTES, read_regular
from leanclip.errors import UserError, first_line, one_line

Manifest = list[dict[str, str | int]]  # the files that fix the sample ids of a run, in the order of the ids
# Version 1 has one sample for each row of a table, and --val-split may hold out one of two equal images. Runs keep
# the version that they began with.
MANIFEST_VERSION = 2
MIN_COUNTED_SAMPLES = 1000  # the broken share is taken of at least this many, so that one early sample stops nothing
MAX_FIELDS, MAX_FIELD_CHARACTERS = 64, 1000  # of metadata that packed data keep
LARGEST_WEIGHT = 1e6  # of a pair; a sum over the largest batch stays exact enough
LOOKED_AT = 20  # samples, to see whether data have several captions per image
MAX_EXAMPLES = 3  # messages kept for each count of broken samples


def manifest_version(manifest: Manifest | None) -> int:
    return int(manifest[0].get("version", 1)) if manifest else MANIFEST_VERSION


class BrokenSample(Exception):  # noqa: N818 - the loader handles it, it is not an error of the run
    """One sample cannot be used. The loader replaces it and counts its kind."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(kind, message)  # both arguments, so that pickling keeps them
        self.kind, self.message = kind, one_line(message)

    def __str__(self) -> str:
        return self.message


class BrokenCount:
    """How many samples were read and how many of them were broken, by kind; a resumed run gives its counts."""

    def __init__(self, max_share: float, *, seen: int = 0, kinds: Mapping[str, int] | None = None) -> None:
        self.max_share, self.seen = max_share, seen
        self.kinds: Counter[str] = Counter(kinds or {})
        self.examples: list[str] = []

    def add(self, good: int, broken: Mapping[str, int], examples: Iterable[str] = ()) -> None:
        """Count, and raise a UserError when the broken share exceeds `max_share`."""
        self.kinds.update(broken)
        self.seen += good + sum(broken.values())
        self.examples += list(examples)[: MAX_EXAMPLES - len(self.examples)]
        if self.kinds.total() > self.max_share * max(self.seen, MIN_COUNTED_SAMPLES):
            examples = f", for example: {'; '.join(self.examples)}" if self.examples else ""
            raise UserError(
                f"{self}, more than --max-broken {self.max_share:g}{examples}; leanclip data check lists them",
                code="data.too_many_broken",
            )

    def __str__(self) -> str:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in self.kinds.most_common())
        return f"{self.kinds.total():,} of {self.seen:,} samples read so far were broken ({kinds})"

    def metrics(self) -> dict[str, int]:
        return {f"broken_{kind.replace(' ', '_')}": count for kind, count in self.kinds.items()}


class Part(NamedTuple):
    """Consecutive ids that an epoch visits `factor` times each."""

    start: int
    stop: int
    factor: float


class Source(Protocol):
    """Samples with the ids 0 to len - 1. Inherit from it to get the default methods.

    `image_bytes` is the encoded image, `captions` all captions (at least one, none empty), `name` the name of the
    sample in messages, which never raises. A sample that cannot be read raises BrokenSample; an error that must end
    the run raises UserError. `broken` counts by kind the samples that were left out when the source was opened; they
    have no ids. A source is pickled into the workers, without its open files.
    """

    broken: Mapping[str, int] = MappingProxyType({})
    notes: tuple[str, ...] = ()  # for the log, and for the summary of `leanclip data pack`
    version: int = MANIFEST_VERSION  # of the manifest
    held_out: int | None = None  # a checksum of the ids that --val-split holds out, for the manifest
    excluded: int | None = None  # of those that --exclude leaves out
    left_out: Mapping[int, frozenset[int]] = MappingProxyType({})  # captions that --exclude leaves out, by sample

    def __len__(self) -> int: ...

    def image_bytes(self, index: int) -> bytes: ...

    def captions(self, index: int) -> list[str]: ...

    def name(self, index: int) -> str: ...

    def empty_captions(self, index: int) -> int:
        """How many empty captions of the sample `captions` leaves out."""
        return 0

    def key(self, index: int) -> str:
        """What identifies the sample for others: its key in a shard, or the path of its image. Never raises."""
        return self.name(index)

    def file(self, index: int) -> str:
        """The file that holds or lists the sample. Never raises."""
        return ""

    def weighted_captions(self, index: int) -> tuple[list[str], list[float] | None]:
        """All captions, and how often each is drawn; None for equally often."""
        return self.captions(index), None

    def caption(self, index: int, draw: float) -> tuple[str, int]:
        """The caption of a visit, by a draw from [0, 1), and its number among the captions of the sample."""
        captions, weights = self.weighted_captions(index)
        if index in self.left_out:
            weights = [
                0.0 if n in self.left_out[index] else w for n, w in enumerate(weights or [1.0] * len(captions))
            ]
        number = pick(len(captions), weights, draw)
        return captions[number], number

    def field(self, index: int, key: str) -> object:
        """A value of the sample's metadata; None if it has none of this name."""
        return None

    def prefetch(self, indices: Sequence[int]) -> None:
        """Request these samples from the storage before they are read."""

    @property
    def parts(self) -> Sequence[Part]:
        return [Part(0, len(self), 1.0)]

    def image_sizes(self) -> np.ndarray | None:
        """The bytes of every image, without reading it, 0 if it is missing; None if no two images are equal."""
        return None

    def manifest(self) -> Manifest | None:
        """The files that fix the ids; None for a source without files."""
        return None

    def manifest_head(self) -> dict[str, str | int]:
        """What the first entry of the manifest adds."""
        values = {"version": self.version, "held_out": self.held_out, "excluded": self.excluded}
        return {name: value for name, value in values.items() if value is not None}


def group_of(source: Source, index: int, key: str) -> int:
    """A number for the sample's group, the same on every machine."""
    value = source.field(index, key)
    if not isinstance(value, str | int | float) or value == "":
        raise BrokenSample("field", f"{key!r} of sample {source.name(index)} is {value!r}, not a name or a number")
    return int.from_bytes(hashlib.blake2b(str(value).encode(), digest_size=8).digest(), "big", signed=True)


def weight_of(source: Source, index: int, key: str) -> float:
    value = source.field(index, key)
    try:
        weight = float(value)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError, OverflowError):
        weight = math.nan
    if not 0 <= weight <= LARGEST_WEIGHT:
        raise BrokenSample("field", f"{key!r} of sample {source.name(index)} is {value!r}, not a weight of 0 or more")
    return weight


def pick(count: int, weights: Sequence[float] | None, draw: float) -> int:
    """A number below `count` by weight, as the draw in [0, 1) says."""
    if weights is None:
        return int(draw * count)
    rest = draw * sum(weights)
    for number, weight in enumerate(weights):
        rest -= weight
        if rest < 0:
            return number
    return count - 1


def most_captions(source: Source) -> int:
    """Of the first samples that can be read."""
    counts = [1]
    for index in range(min(LOOKED_AT, len(source))):
        with contextlib.suppress(BrokenSample):
            counts.append(len(source.captions(index)))
    return max(counts)


class Packable(Source):
    """A source that `leanclip data pack` can read. Its files belong to the user and may change between two runs."""

    def identity(self) -> str:
        """Changes when the files that list the samples change, or the columns that are read."""
        raise NotImplementedError

    def raw_captions(self, index: int) -> Sequence[object]:
        """The captions as the files have them, with empty ones and nulls."""
        raise NotImplementedError

    def captions(self, index: int) -> list[str]:
        return clean_captions(self.raw_captions(index), self.name(index))

    def empty_captions(self, index: int) -> int:
        return sum(isinstance(caption, str) and not caption.strip() for caption in self.raw_captions(index))

    def fields(self, index: int) -> dict[str, Any]:
        """The metadata of a sample beside image and captions, of the first row if it has several."""
        return {}


def kept_fields(values: Mapping[str, Any], *, without: Iterable[str]) -> dict[str, Any]:
    """Metadata that packed data keep: numbers, booleans and short strings. Nulls, long texts and the rest are not."""
    left_out = {*without, "captions"}
    kept = {
        name: value
        for name, value in values.items()
        if name not in left_out and len(name) <= MAX_FIELD_CHARACTERS and _is_kept(value)
    }
    return dict(islice(kept.items(), MAX_FIELDS))


def _is_kept(value: object) -> bool:
    if isinstance(value, str):
        return 0 < len(value) <= MAX_FIELD_CHARACTERS
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and value.bit_length() <= 64


def file_identity(path: Path) -> str:
    try:
        status = path.stat()
    except OSError:
        return f"{path.name} is missing"  # a link to nowhere
    return f"{path.name} {status.st_size} {status.st_mtime_ns}"


def read_image(folder: Path, path: str, name: str, *, anywhere: bool = False) -> bytes:
    """The bytes of an image file. Lists are often downloaded: only one that may name files `anywhere` can leave
    `folder`, from which relative paths count."""
    if not path.strip():
        raise BrokenSample("no image", f"{name} names no image")
    if not anywhere and (PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts):
        raise BrokenSample("escaping path", f"{name}: {path} is refused; only relative paths without .. may be named")
    try:
        content = read_regular(folder / path, MAX_IMAGE_BYTES)
    except (OSError, ValueError) as error:
        raise BrokenSample("no image", f"{name}: cannot read {folder / path} ({first_line(error)})") from error
    if not content:
        raise BrokenSample("empty", f"{name}: {folder / path} has no bytes")
    return content


def clean_captions(captions: Sequence[object], name: str) -> list[str]:
    """The captions, stripped, without empty ones and nulls; at least one."""
    stripped = [caption.strip() for caption in captions if isinstance(caption, str)]
    if other := next((caption for caption in captions if not isinstance(caption, str | None)), None):
        raise BrokenSample("caption", f"the caption of {name} is no text but of type {type(other).__name__}")
    if not stripped:
        raise BrokenSample("no caption", f"{name} has no caption")
    if not any(stripped):
        raise BrokenSample("empty", f"the caption of {name} is empty")
    return [caption for caption in stripped if caption]

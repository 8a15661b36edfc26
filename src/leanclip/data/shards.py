"""WebDataset tar shards: every sample has a stable id and is read by position."""

import bisect
import functools
import json
import zlib
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

import numpy as np

from leanclip.data.files import MAX_OPEN_FILES, FileStat, OpenFiles, expand, is_remote, stat_all
from leanclip.data.index import SCAN_THREADS, IndexedShard, open_index
from leanclip.data.source import (
    MANIFEST_VERSION,
    BrokenSample,
    Manifest,
    Part,
    Source,
    clean_captions,
    manifest_version,
)
from leanclip.data.tar import BLOCK, IMAGE, IMAGE_ENDINGS, JSON, TXT, name_before, open_tar
from leanclip.errors import UserError, first_line
from leanclip.filesystem import read_json

REQUIRED_KEYS = ("size", "count", "base", "stamp")
MANIFEST_KEYS = (*REQUIRED_KEYS, "version", "sample", "held_out", "excluded")  # those of older runs lack the others
SAMPLE_BLOCKS, SAMPLE_BYTES = 8, 1 << 14  # of each shard that are compared on resume
MAX_REMOTE_SAMPLED = 64  # shards


def load_manifest(path: Path) -> Manifest | None:
    """The manifest of a run; None if it has none."""
    return check_manifest(read_json(path), str(path)) if path.exists() else None


def check_manifest(content: Any, origin: str) -> Manifest:
    """The parsed content of a manifest; a UserError that names `origin` if it is damaged."""
    try:
        manifest: list[dict[str, Any]] = [
            {"name": str(entry["name"])} | {key: int(entry[key]) for key in MANIFEST_KEYS if key in entry}
            for entry in content
        ]
        counts = [entry["count"] for entry in manifest]
        numbers = [entry[key] for entry in manifest for key in (*REQUIRED_KEYS, *entry) if key != "name"]
        if not all(0 <= number < 1 << 64 for number in numbers):
            raise ValueError("a negative or huge number")
        if not manifest or [entry["base"] for entry in manifest] != list(accumulate(counts, initial=0))[:-1]:
            raise ValueError("no files, or ids with gaps")
        if manifest_version(manifest) > MANIFEST_VERSION:
            raise ValueError("written by a newer leanclip")
        return manifest
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise UserError(
            f"{origin} holds no valid manifest ({first_line(error)}); restore it, or start a new run",
            code="data.bad_manifest",
        ) from error


class Shards(Source):
    """The samples of tar files. An id is the base of the shard plus the position in it.

    `data` is a pattern, or several separated by `::`, each of which an epoch visits `factors` times. The shards of a
    manifest keep their bases; other shards come after them.
    """

    def __init__(
        self,
        data: str,
        *,
        factors: Sequence[float] | None = None,
        caption_key: str = "captions",
        weights_key: str | None = None,
        manifest: Manifest | None = None,
    ) -> None:
        patterns = [pattern for pattern in data.split("::") if pattern]
        if factors is not None and len(factors) != len(patterns):
            raise UserError(
                f"{len(patterns)} sources and {len(factors)} factors; give one factor for each source",
                code="data.factor_count",
            )
        self.caption_key, self.weights_key = caption_key, weights_key
        files = [stat_all(expand(pattern), pattern) for pattern in patterns]
        shards = open_index([file for group in files for file in group])
        groups = [number for number, group in enumerate(files) for _ in group]
        self.version = manifest_version(manifest)
        if manifest is not None:
            order = _order_of(manifest, shards)
            shards, groups = [shards[i] for i in order], [groups[i] for i in order]
        self.files = [shard.file for shard in shards]
        duplicate = next((path for path, uses in Counter(file.path for file in self.files).items() if uses > 1), None)
        if duplicate is not None:
            raise UserError(
                f"{duplicate} is a duplicate in the sources; to visit it more often, give it a factor",
                code="data.duplicate_source",
            )
        self.rows = [shard.rows for shard in shards]
        self._stamps = [shard.stamp for shard in shards]
        self.broken = sum((shard.broken for shard in shards), Counter())
        self.bases = list(accumulate(map(len, self.rows), initial=0))
        if not len(self):
            left_out = ", ".join(f"{count} {kind}" for kind, count in self.broken.items())
            raise UserError(
                f"no samples in {data}: a sample is an image ({', '.join(IMAGE_ENDINGS)}) and a caption"
                " (txt, or json with captions) of the same name" + (f" (left out: {left_out})" if left_out else ""),
                code="data.no_samples",
            )
        self._factors = [1.0 if factors is None else factors[group] for group in groups]
        self._open = OpenFiles()

    def __len__(self) -> int:
        return self.bases[-1]

    @property
    def parts(self) -> Sequence[Part]:
        """Neighbours of the same factor are one part."""
        runs = groupby(range(len(self.files)), key=self._factors.__getitem__)
        numbers = [(factor, list(shards)) for factor, shards in runs]
        return [Part(self.bases[shards[0]], self.bases[shards[-1] + 1], factor) for factor, shards in numbers]

    def manifest(self) -> Manifest:
        manifest: Manifest = [
            {"name": file.name, "size": file.size, "count": len(rows), "base": base, "stamp": stamp}
            for file, rows, base, stamp in zip(self.files, self.rows, self.bases, self._stamps, strict=False)
        ]
        for number, sample in self._samples.items():
            manifest[number]["sample"] = sample
        manifest[0] |= self.manifest_head()
        return manifest

    @functools.cached_property
    def _samples(self) -> dict[int, int]:
        """Content samples by shard: of all local ones, and of some remote ones, where each takes several requests."""
        local = [number for number, file in enumerate(self.files) if not is_remote(file.path)]
        remote = [number for number, file in enumerate(self.files) if is_remote(file.path)]
        numbers = local + remote[:: -(-len(remote) // MAX_REMOTE_SAMPLED) or 1]
        return dict(zip(numbers, _content_samples([self.files[number] for number in numbers]), strict=True))

    def image_sizes(self) -> np.ndarray:
        return np.concatenate([rows.table[rows.start : rows.stop, IMAGE + 1] for rows in self.rows])

    def image_bytes(self, index: int) -> bytes:
        content = self._read(index, IMAGE)
        if not content:
            raise BrokenSample("empty", f"the image of sample {self.name(index)} has no bytes")
        return content

    def captions(self, index: int) -> list[str]:
        return self.weighted_captions(index)[0]

    def weighted_captions(self, index: int) -> tuple[list[str], list[float] | None]:
        """Those in the .json under the caption key, else the .txt."""
        row = self._locate(index)[1]
        if row[JSON] and (captions := self._json_captions(index)):
            return captions
        if not row[TXT]:
            raise BrokenSample("no caption", f"sample {self.name(index)} has no .txt, and no captions in its .json")
        try:
            return clean_captions([self._read(index, TXT).decode("utf-8")], f"sample {self.name(index)}"), None
        except UnicodeDecodeError as error:
            raise BrokenSample("encoding", f"the caption of sample {self.name(index)} is not UTF-8") from error

    def empty_captions(self, index: int) -> int:
        captions = self.field(index, self.caption_key)
        listed = captions if isinstance(captions, list) else []
        return sum(isinstance(caption, str) and not caption.strip() for caption in listed)

    def field(self, index: int, key: str) -> object:
        return self._json(index).get(key) if self._locate(index)[1][JSON] else None

    def prefetch(self, indices: Sequence[int]) -> None:
        if len(self.files) > MAX_OPEN_FILES:  # opening every file twice would take longer than it saves
            return
        for index in indices:
            file, row = self._locate(index)
            self._open.prefetch(file, row[IMAGE] * BLOCK, row[IMAGE + 1])

    def key(self, index: int) -> str:
        file, row = self._locate(index)
        try:
            return name_before(lambda offset, length: self._open.read(file, offset, length), row[IMAGE])
        except (OSError, IndexError):
            return f"number {index - self.bases[bisect.bisect_right(self.bases, index) - 1]}"

    def file(self, index: int) -> str:
        return self._locate(index)[0].path

    def name(self, index: int) -> str:
        return f"{self.key(index)} of {self._locate(index)[0].path}"

    def _json(self, index: int) -> dict[str, Any]:
        try:
            content: Any = json.loads(self._read(index, JSON))
        except UnicodeDecodeError as error:
            raise BrokenSample("encoding", f"the .json of sample {self.name(index)} is not UTF-8") from error
        except (ValueError, RecursionError) as error:
            raise BrokenSample("caption", f"the .json of sample {self.name(index)} does not parse") from error
        return content if isinstance(content, dict) else {}

    def _json_captions(self, index: int) -> tuple[list[str], list[float] | None] | None:
        """The captions of a .json that has the caption key, without empty ones."""
        content = self._json(index)
        if content.get(self.caption_key) is None:
            return None
        captions = content[self.caption_key]
        captions = [captions] if isinstance(captions, str) else captions
        if not isinstance(captions, list) or not all(isinstance(caption, str) for caption in captions):
            raise BrokenSample(
                "caption", f"{self.caption_key!r} of sample {self.name(index)} is not a list of strings"
            )
        weights = None if self.weights_key is None else content.get(self.weights_key)
        if weights is not None and not _are_weights(weights, len(captions)):
            raise BrokenSample(
                "caption", f"{self.weights_key!r} of sample {self.name(index)} is not a list of weights"
            )
        kept = [i for i, caption in enumerate(captions) if caption.strip()]
        if not kept:
            raise BrokenSample("empty", f"the captions of sample {self.name(index)} are empty")
        kept_weights = [weights[i] for i in kept] if weights is not None else []
        return [captions[i].strip() for i in kept], kept_weights if sum(kept_weights) else None

    def _locate(self, index: int) -> tuple[FileStat, list[int]]:
        shard = bisect.bisect_right(self.bases, index) - 1
        return self.files[shard], self.rows[shard][index - self.bases[shard]]

    def _read(self, index: int, column: int) -> bytes:
        file, row = self._locate(index)
        block, size = row[column], row[column + 1]
        try:
            content = self._open.read(file, block * BLOCK, size)
        except OSError as error:
            raise BrokenSample("vanished", f"cannot read {file.path} ({first_line(error)})") from error
        if len(content) < size:
            raise BrokenSample("truncated", f"sample {self.name(index)} is cut short")
        return content


def _changed(file: FileStat) -> UserError:
    return UserError(
        f"{file.path} has changed since the run began; restore it, or start a new run", code="data.changed"
    )


def _content_samples(files: list[FileStat]) -> list[int]:
    """A checksum of some blocks of each file: all of a small one. It detects other contents behind equal headers."""

    def sample(file: FileStat) -> int:
        positions = np.linspace(0, max(0, file.size - SAMPLE_BYTES), SAMPLE_BLOCKS).astype(int).tolist()
        with open_tar(file) as tar:
            return zlib.crc32(b"".join(tar.read(position, SAMPLE_BYTES) for position in positions))

    with ThreadPoolExecutor(SCAN_THREADS) as pool:
        return list(pool.map(sample, files))


def _are_weights(weights: Any, count: int) -> bool:
    return (
        isinstance(weights, list)
        and len(weights) == count
        and all(isinstance(weight, int | float) and 0 <= weight < float("inf") for weight in weights)
    )


def _order_of(manifest: Manifest, shards: list[IndexedShard]) -> list[int]:
    """The shards of the manifest first, in its order, then the new ones. A changed or missing shard is an error."""
    numbers: dict[str, list[int]] = {}
    for number, shard in enumerate(shards):
        numbers.setdefault(shard.file.name, []).append(number)
    order = []
    for entry in manifest:
        same_name = numbers.get(str(entry["name"]), [])
        expected = (entry["size"], entry["count"], entry["stamp"])
        state = {i: (shards[i].file.size, len(shards[i].rows), shards[i].stamp) for i in same_name}
        match = next((i for i in same_name if state[i] == expected), None)
        if match is None and same_name:
            raise _changed(shards[same_name[0]].file)
        if match is None:
            raise UserError(
                f"the run was trained on {entry['name']}, which is not in the data; restore it",
                code="data.missing_shard",
            )
        same_name.remove(match)
        order.append(match)
    sampled = [
        (shards[i].file, entry["sample"]) for i, entry in zip(order, manifest, strict=True) if "sample" in entry
    ]
    for (file, expected), sample in zip(sampled, _content_samples([file for file, _ in sampled]), strict=True):
        if sample != expected:
            raise _changed(file)
    return order + sorted(number for same_name in numbers.values() for number in same_name)

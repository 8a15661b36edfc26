"""WebDataset tar shards, indexed: every sample has a stable id and is read by position, without a scan."""

import bisect
import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from leanclip.data.files import OPEN_FILES, FileStat, OpenFiles, expand, stat_all
from leanclip.data.index import Indexed, open_index
from leanclip.data.source import BrokenSample, Part, Source, pick
from leanclip.data.tar import BLOCK, IMAGE, IMAGE_ENDINGS, JSON, TXT, name_before
from leanclip.errors import UserError

Manifest = list[dict[str, str | int]]


def load_manifest(path: Path) -> Manifest | None:
    """The manifest of a run, if it has one."""
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text())
    except ValueError:
        found = None
    return check_manifest(found, str(path))


def check_manifest(found: Any, where: str) -> Manifest:
    """What a file says is a manifest, if it is one."""
    try:
        return [
            {"name": str(entry["name"])} | {key: int(entry[key]) for key in ("size", "count", "base", "stamp")}
            for entry in found
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{where} is no manifest of a run; restore it, or start a new run") from error


class _Found(NamedTuple):
    captions: list[str]
    weights: list[float] | None


class Shards(Source):
    """The samples of some tar files. An id is the base of the shard plus the position in it.

    `data` is a pattern, or several with `::` between them, each of which an epoch visits `factors` times. A manifest
    of an earlier run keeps its shards' bases; shards that it does not know come after them.
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
            raise UserError(f"{len(patterns)} sources and {len(factors)} factors: give one factor for each source")
        self.caption_key, self.weights_key = caption_key, weights_key
        files = [stat_all(expand(pattern), pattern) for pattern in patterns]
        shards = open_index([file for group in files for file in group])
        groups = [number for number, group in enumerate(files) for _ in group]
        if manifest is not None:
            order = _in_order_of(manifest, shards)
            shards, groups = [shards[i] for i in order], [groups[i] for i in order]
        if len({shard.file.path for shard in shards}) < len(shards):
            twice = Counter(shard.file.path for shard in shards).most_common(1)[0][0]
            raise UserError(f"{twice} is named twice; to visit it more often give its factor")
        self.files = [shard.file for shard in shards]
        self.rows = [shard.rows for shard in shards]
        self._stamps = [shard.stamp for shard in shards]
        self._broken = sum((shard.broken for shard in shards), Counter())
        self.bases = [0]
        for rows in self.rows:
            self.bases.append(self.bases[-1] + len(rows))
        if not len(self):
            raise UserError(
                f"no samples in {data}: a sample is an image ({', '.join(IMAGE_ENDINGS)}) and a caption"
                " (txt, or json with captions) of one name" + _told(self._broken)
            )
        self._parts = _joined(
            Part(self.bases[i], self.bases[i + 1], 1.0 if factors is None else factors[group])
            for i, group in enumerate(groups)
        )
        self._open = OpenFiles()

    def __len__(self) -> int:
        return self.bases[-1]

    @property
    def broken(self) -> Mapping[str, int]:
        return self._broken

    @property
    def parts(self) -> Sequence[Part]:
        return self._parts

    def manifest(self) -> Manifest:
        return [
            {"name": file.name, "size": file.size, "count": len(rows), "base": base, "stamp": stamp}
            for file, rows, base, stamp in zip(self.files, self.rows, self.bases, self._stamps, strict=False)
        ]

    def image_bytes(self, index: int) -> bytes:
        content = self._read(index, IMAGE)
        if not content:
            raise BrokenSample("empty", f"the image of sample {self.name(index)} has no bytes")
        return content

    def captions(self, index: int) -> list[str]:
        """All captions: those in the .json under the caption key if there are any, else the .txt."""
        return self._captions(index).captions

    def caption(self, index: int, draw: random.Random) -> str:
        return pick(*self._captions(index), draw)

    def expect(self, indices: Sequence[int]) -> None:
        if len(self.files) > OPEN_FILES:  # opening every file twice would cost more than it gains
            return
        for index in indices:
            file, row = self._locate(index)
            self._open.expect(file, row[IMAGE] * BLOCK, row[IMAGE + 1])

    def name(self, index: int) -> str:
        file, row = self._locate(index)
        try:
            key = name_before(lambda offset, length: self._open.read(file, offset, length), row[IMAGE])
        except (OSError, IndexError):
            key = f"number {index - self.bases[bisect.bisect_right(self.bases, index) - 1]}"
        return f"{key} of {file.path}"

    def _captions(self, index: int) -> _Found:
        row = self._locate(index)[1]
        if row[JSON] and (found := self._from_json(index, self._read(index, JSON))):
            return found
        if not row[TXT]:
            raise BrokenSample("no caption", f"sample {self.name(index)} has no .txt, and no captions in its .json")
        try:
            caption = self._read(index, TXT).decode("utf-8").strip()
        except UnicodeDecodeError as error:
            raise BrokenSample("encoding", f"the caption of sample {self.name(index)} is not UTF-8") from error
        if not caption:
            raise BrokenSample("empty", f"the caption of sample {self.name(index)} is empty")
        return _Found([caption], None)

    def _from_json(self, index: int, content: bytes) -> _Found | None:
        """The captions of a .json, if it has the key. Empty ones do not count."""
        try:
            found: Any = json.loads(content)
        except UnicodeDecodeError as error:
            raise BrokenSample("encoding", f"the .json of sample {self.name(index)} is not UTF-8") from error
        except (ValueError, RecursionError) as error:
            raise BrokenSample("caption", f"the .json of sample {self.name(index)} does not parse") from error
        if not isinstance(found, dict) or found.get(self.caption_key) is None:
            return None
        captions = found[self.caption_key]
        captions = [captions] if isinstance(captions, str) else captions
        weights = None if self.weights_key is None else found.get(self.weights_key)
        if not isinstance(captions, list) or not all(isinstance(caption, str) for caption in captions):
            raise BrokenSample("caption", f"{self.caption_key!r} of sample {self.name(index)} is no list of texts")
        if weights is not None and not _are_weights(weights, len(captions)):
            raise BrokenSample(
                "caption", f"{self.weights_key!r} of sample {self.name(index)} is no list of a weight per caption"
            )
        kept = [i for i, caption in enumerate(captions) if caption.strip()]
        if weights is not None and not sum(weights[i] for i in kept):
            weights = None
        if not kept:
            raise BrokenSample("empty", f"the captions of sample {self.name(index)} are empty")
        return _Found([captions[i].strip() for i in kept], None if weights is None else [weights[i] for i in kept])

    def _locate(self, index: int) -> tuple[FileStat, list[int]]:
        shard = bisect.bisect_right(self.bases, index) - 1
        return self.files[shard], self.rows[shard][index - self.bases[shard]]

    def _read(self, index: int, column: int) -> bytes:
        file, row = self._locate(index)
        block, size = row[column], row[column + 1]
        try:
            content = self._open.read(file, block * BLOCK, size)
        except OSError as error:
            raise BrokenSample("vanished", f"cannot read {file.path} ({error.strerror or error})") from error
        if len(content) < size:
            raise BrokenSample("truncated", f"sample {self.name(index)} is cut short")
        return content


def _joined(parts: Any) -> list[Part]:
    """Neighbours with one factor become one part."""
    joined: list[Part] = []
    for part in parts:
        if joined and joined[-1].factor == part.factor:
            joined[-1] = joined[-1]._replace(stop=part.stop)
        else:
            joined.append(part)
    return joined


def _are_weights(weights: Any, count: int) -> bool:
    return (
        isinstance(weights, list)
        and len(weights) == count
        and all(isinstance(weight, int | float) and 0 <= weight < float("inf") for weight in weights)
    )


def _in_order_of(manifest: Manifest, shards: list[Indexed]) -> list[int]:
    """The run's shards first, as it knows them, then the new ones. A shard that changed or is missing is an error."""
    waiting: dict[str, list[int]] = {}
    for number, shard in enumerate(shards):
        waiting.setdefault(shard.file.name, []).append(number)
    order = []
    for entry in manifest:
        same_name = waiting.get(str(entry["name"]), [])
        expected = (entry["size"], entry["count"], entry["stamp"])
        match = next((i for i in same_name if _state(shards[i]) == expected), None)
        if match is None and same_name:
            changed = shards[same_name[0]].file.path
            raise UserError(f"{changed} has changed since the run began: restore it, or start a new run")
        if match is None:
            raise UserError(f"the run was trained on {entry['name']}, which is not in the data: bring it back")
        same_name.remove(match)
        order.append(match)
    known = set(order)
    return order + [number for number in range(len(shards)) if number not in known]


def _state(shard: Indexed) -> tuple[int, int, int]:
    return shard.file.size, len(shard.rows), shard.stamp


def _told(broken: Mapping[str, int]) -> str:
    return f" (left out: {', '.join(f'{count} {kind}' for kind, count in broken.items())})" if broken else ""

"""Embeddings of a data set on disk: `leanclip embed` writes them, `leanclip search` and other programs read them.

embeddings.json      the model (place, digest, preprocessing), the data (place, identity) and the shards
keys.npy             (n,) bytes in UTF-8: the key of each sample, by id
keys.parquet         the same for other programs, with the shard and the rows of each sample
images/, captions/   one feature table each: unit vectors in float16
"""

import contextlib
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np

from leanclip.data.feature_table import COMPUTED, FeatureTable, mapped
from leanclip.errors import UserError, first_line
from leanclip.filesystem import atomic_path, read_json, write_atomically
from leanclip.search.data import Shard

FORMAT = 1
FACTS, KEYS, PARQUET = "embeddings.json", "keys.npy", "keys.parquet"
SIDES = ("images", "captions")
COLUMNS = ("csv_img_key", "csv_caption_key", "csv_separator", "caption_key")  # of DataConfig
TYPES = {
    "model": {"place": str, "digest": str, "dim": int, "preprocess": dict, "precision": str},
    "data": {"location": str, "samples": int, "identity": object, "columns": dict},
}  # of the facts
LONGEST_KEY, SHORTEST_KEY = 512, 16  # bytes
ROWS_AT_ONCE = 1 << 18


class EmbeddingStore:
    """The embeddings in a directory. Tables are mapped: they may be larger than memory."""

    def __init__(self, directory: Path, *, writable: bool = False) -> None:
        self.directory = directory
        if not (directory / FACTS).is_file():
            raise UserError(
                f"no embeddings in {directory}: make some with leanclip embed MODEL DATA {quote(str(directory))}",
                code="search.no_embeddings",
            )
        self.facts: dict[str, Any] = read_json(directory / FACTS)
        try:
            if self.facts["format"] != FORMAT:
                raise ValueError(f"they have format {self.facts['format']}, and this version reads {FORMAT}")
            self.keys: np.ndarray = mapped(directory / KEYS, "r+" if writable else "r")
            for part, types in TYPES.items():
                for name, kind in types.items():
                    if not isinstance(value := self.facts[part][name], kind):
                        raise ValueError(f"{name} of the {part} is {str(value)[:40]!r}")
            self.samples, self.dim = self.facts["data"]["samples"], self.facts["model"]["dim"]
            self.shards = [Shard(str(path), int(first)) for path, first in self.facts["shards"]]
            tables = [side for side in SIDES if (directory / side / "table.json").is_file()]
            self.tables = {side: FeatureTable(directory / side, writable=writable) for side in tables}
            for problem in self._problems():
                raise ValueError(problem)
        except (OSError, ValueError, OverflowError, TypeError, KeyError) as error:
            raise UserError(
                f"the embeddings in {directory} cannot be used ({first_line(error)}); remove the directory and embed"
                " again",
                code="search.bad_embeddings",
            ) from error

    def _problems(self) -> Iterator[str]:
        """Parts that do not belong together, such as a file that was replaced by another program."""
        if self.keys.shape != (self.samples,) or self.keys.dtype.kind != "S":
            yield f"{KEYS} holds {self.keys.shape} {self.keys.dtype}, not {self.samples:,} keys"
        firsts = [shard.first for shard in self.shards]
        if firsts != sorted(firsts) or firsts[:1] != [0]:
            yield f"{FACTS} has shards that begin with samples {str(firsts)[:40]}"
        columns = [self.facts["data"]["columns"][name] for name in COLUMNS]
        if not all(name is None or isinstance(name, str) for name in columns):
            yield f"{FACTS} has columns of the data that are no names"
        if not self.tables:
            yield f"neither {' nor '.join(SIDES)} are there"
        for side, table in self.tables.items():
            table.check()
            if table.dim != self.dim:
                yield f"the vectors of {side} have size {table.dim}, those of the model {self.dim}"
            if len(table.done) != self.samples:
                yield f"{side} has {len(table.done):,} samples, embeddings.json {self.samples:,}"

    @classmethod
    def create(
        cls, directory: Path, facts: Mapping[str, Any], firsts: Mapping[str, np.ndarray], *, key_bytes: int
    ) -> "EmbeddingStore":
        """An empty store with a table for each of `firsts`, the first rows of the samples."""
        foreign = [path.name for path in directory.glob("*") if path.name not in (FACTS, KEYS, PARQUET, *SIDES)]
        if foreign and not (directory / FACTS).is_file():
            raise UserError(
                f"{directory} holds other files ({foreign[0]}); give a new directory", code="embed.exists"
            )
        directory.mkdir(parents=True, exist_ok=True)
        samples, dim = facts["data"]["samples"], facts["model"]["dim"]
        np.lib.format.open_memmap(directory / KEYS, mode="w+", dtype=f"S{key_bytes}", shape=(samples,))
        for side, first in firsts.items():
            FeatureTable.create(directory / side, first, dim, {"side": side})
        write_atomically(directory / FACTS, json.dumps(facts, indent=1))  # last: embeddings without it are none
        return cls(directory, writable=True)

    def add_side(self, side: str, first: np.ndarray) -> None:
        self.tables[side] = FeatureTable.create(self.directory / side, first, self.dim, {"side": side})

    def missing(self) -> np.ndarray:
        """The ids that some table lacks."""
        marks = [table.missing() for table in self.tables.values()]
        return np.unique(np.concatenate(marks))

    def usable(self, side: str) -> np.ndarray:
        """Whether each sample has its vectors: those that are broken, or not computed yet, have none."""
        return np.asarray(self.tables[side].done) == COMPUTED

    def write_keys(self, ids: list[int], keys: list[str]) -> None:
        self.keys[np.asarray(ids, np.int64)] = [stored_key(key, self.keys.dtype.itemsize) for key in keys]

    def key(self, index: int) -> str:
        return bytes(self.keys[index]).decode("utf-8", "replace")

    def shard_number(self, ids: np.ndarray | int) -> np.ndarray:
        return np.searchsorted([shard.first for shard in self.shards], ids, side="right") - 1

    def ids_of_shard(self, number: int) -> tuple[int, int]:
        """The first id of a shard, and that of the next."""
        bounds = [shard.first for shard in self.shards] + [self.samples]
        return bounds[number], bounds[number + 1]

    def write_parquet(self) -> bool:
        """Keys, shards and rows for other programs; False without pyarrow."""
        try:
            import pyarrow as pa
            from pyarrow import parquet
        except ImportError:
            return False
        names = pa.array([shard.path for shard in self.shards])
        with contextlib.ExitStack() as stack:
            temporary = stack.enter_context(atomic_path(self.directory / PARQUET))
            writer = None
            for start in range(0, self.samples, ROWS_AT_ONCE):
                ids = np.arange(start, min(start + ROWS_AT_ONCE, self.samples))
                shard = pa.array(self.shard_number(ids).astype(np.int32))
                columns: dict[str, Any] = {
                    "id": ids,
                    "key": [self.key(index) for index in ids.tolist()],
                    "shard": pa.DictionaryArray.from_arrays(shard, names),
                }
                for side, table in self.tables.items():
                    computed = np.asarray(table.done[ids]) == COMPUTED
                    columns[f"{side}_first"] = pa.array(np.asarray(table.first[ids]), mask=~computed)
                    columns[f"{side}_rows"] = np.where(computed, np.diff(table.first[start : ids[-1] + 2]), 0)
                rows = pa.table(columns)
                writer = writer or stack.enter_context(parquet.ParquetWriter(temporary, rows.schema))
                writer.write_table(rows)
        return True


def stored_key(key: str, width: int) -> bytes:
    """The bytes of a key. One that is too long keeps its beginning and gets a checksum of the whole."""
    content = key.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace")
    return content if len(content) <= width else content[: width - 9] + b"~%08x" % zlib.crc32(content)


def width_of(keys: list[str]) -> int:
    """Bytes for each key, from a sample of the keys: twice the longest."""
    longest = max(len(key.encode("utf-8", "replace")) for key in keys)
    return min(max(2 * longest, SHORTEST_KEY), LONGEST_KEY)


def plain(value: Any) -> Any:
    """As JSON keeps it: tuples are lists."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, list | tuple) else value

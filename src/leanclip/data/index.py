"""The position of every sample of a set of shards: found by one scan, kept in a file, mapped into memory.

A directory of shards has one index file, beside the shards or, if that is not writable, in the cache directory:

    magic, the length and the checksum of a JSON text, the text, padding, then a table of (samples, COLUMNS) uint32

The JSON text gives for each shard its rows of the table, their checksum, and the size and version of the file that
was scanned. What is damaged is not used: the shards are scanned again.
"""

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import struct
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from leanclip.data.files import FileStat, is_remote
from leanclip.data.tar import BLOCK, COLUMNS, open_tar, scan
from leanclip.errors import UserError, first_line
from leanclip.filesystem import MAX_JSON_BYTES, atomic_path, cache_directory, parse_json
from leanclip.progress import ACTIVITY, progress_bar

INDEX_NAME = ".leanclip-index"
MAGIC = b"leanclip index 2\n"
HEAD = struct.Struct(f"<{len(MAGIC)}sQI")  # magic, length of the text, checksum of the text
NUMBERS = ("size", "start", "stop", "stamp", "checksum")  # of a shard in the text
TABLE_ALIGNMENT = 64  # bytes
MIN_KEPT_BYTES = 256 << 20  # fewer bytes of shards are scanned in a moment: no index file, no progress bar
SCAN_THREADS = 8  # to overlap waiting for the storage
SAVE_SECONDS = 30.0  # of scanning that a kill may lose
MAX_SAVE_SHARE = 0.05  # of the time may be spent on saving a large, incomplete index
LOCK_POLL_SECONDS = 0.5


class ShardRows:
    """The rows of one shard in a table. Pickling keeps the path of the index file, which is mapped again."""

    def __init__(self, table: np.ndarray, start: int, stop: int, path: Path | None) -> None:
        self.table, self.start, self.stop, self.path = table, start, stop, path

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, position: int) -> list[int]:
        return self.table[self.start + position].tolist()

    def __reduce__(self) -> tuple[Any, ...]:
        if self.path is None:
            return ShardRows, (self.table[self.start : self.stop].copy(), 0, len(self), None)
        return _map_rows, (self.path, len(self.table), self.start, self.stop)

    def checksum(self) -> int:
        return zlib.crc32(np.ascontiguousarray(self.table[self.start : self.stop]).data)

    def within(self, size: int) -> bool:
        """Whether all files lie in a shard of this size. A read beyond its end would allocate what the row says."""
        rows = self.table[self.start : self.stop]
        return bool((rows[:, ::2].astype(np.int64) * BLOCK + rows[:, 1::2] <= size).all())


class IndexedShard(NamedTuple):
    file: FileStat
    rows: ShardRows
    broken: Counter[str]
    stamp: int
    checksum: int  # of the rows, when they were scanned


def open_index(files: list[FileStat]) -> list[IndexedShard]:
    """The index of every shard, in the order of `files`. Shards without an index are scanned, by one process."""
    directories: dict[str, list[FileStat]] = {}
    for file in files:
        directories.setdefault(file.directory, []).append(file)
    indexes = (_directory_index(directory, members) for directory, members in directories.items())
    shards = {path: shard for index in indexes for path, shard in index.items()}
    return [shards[file.path] for file in files]


def _directory_index(directory: str, files: list[FileStat]) -> dict[str, IndexedShard]:
    paths = _index_paths(directory)
    for path in paths:
        if len(shards := _load(path, files)) == len(files):
            return shards
    path = next((path for path in paths if _writable(path)), None)
    if path is None or (sum(file.size for file in files) < MIN_KEPT_BYTES and not is_remote(directory)):
        return _scan_all(files)
    with lock(path, f"indexes {directory}"):
        indexed = _load(path, files)
        scanned = _scan_all([file for file in files if file.path not in indexed], path)
        if scanned:
            _save(path, scanned)
        return indexed | scanned | _load(path, files)


def _index_paths(directory: str) -> list[Path]:
    full = directory if is_remote(directory) else str(Path(directory).resolve())
    cached = cache_directory() / f"index-{hashlib.sha256(full.encode()).hexdigest()[:24]}"
    return [cached] if is_remote(directory) else [Path(directory) / INDEX_NAME, cached]


def _writable(path: Path) -> bool:
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)  # the cache directory
        return os.access(path.parent, os.W_OK)
    return False


@contextlib.contextmanager
def lock(path: Path, work: str) -> Iterator[None]:
    """One process works while the others wait. The system releases the lock when the process ends."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # without a lock, several processes do the same work
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(_lock_path(path), "a", opener=_open_at_once))
            _wait_for_lock(file, work)
        yield


def _open_at_once(path: str, flags: int) -> int:
    """A pipe is refused; opening it would wait for a reader."""
    return os.open(path, flags | os.O_NONBLOCK, 0o666)


def _lock_path(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def show_progress(path: Path) -> None:
    """For the processes that wait for the lock."""
    with contextlib.suppress(OSError):
        _lock_path(path).touch()


def _wait_for_lock(file: IO[str], work: str) -> None:
    """This process counts as active only while the process that holds the lock makes progress."""
    changed_at = 0
    while True:
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not changed_at:
            print(f"waiting for another process that {work}", file=sys.stderr)
        if (modified := os.fstat(file.fileno()).st_mtime_ns) != changed_at:
            changed_at = modified
            ACTIVITY.still_working()
        time.sleep(LOCK_POLL_SECONDS)


def _scan_all(files: list[FileStat], path: Path | None = None) -> dict[str, IndexedShard]:
    """Scan the files, and save what was scanned to `path` now and then."""
    scanned: dict[str, IndexedShard] = {}
    next_save = time.monotonic() + SAVE_SECONDS
    size = sum(file.size for file in files)
    shown = size >= MIN_KEPT_BYTES or any(is_remote(file.path) for file in files)
    if shown and not sys.stderr.isatty():
        print(f"indexing {len(files):,} shards ({size / 1e6:,.0f} MB), once", file=sys.stderr)
    with progress_bar(f"indexing {len(files):,} shards", size, shown=shown, unit="bytes") as progress:
        pool = ThreadPoolExecutor(SCAN_THREADS)
        try:
            for file, shard in zip(files, pool.map(_scan_shard, files), strict=True):
                scanned[file.path] = shard
                progress(file.size)
                if path is not None:
                    show_progress(path)
                if path is not None and (started := time.monotonic()) >= next_save:
                    _save(path, scanned)
                    seconds = time.monotonic() - started
                    next_save = started + seconds + max(SAVE_SECONDS, seconds / MAX_SAVE_SHARE)
        finally:
            pool.shutdown(cancel_futures=True)
    return scanned


def _scan_shard(file: FileStat) -> IndexedShard:
    with open_tar(file) as reader:
        content = scan(reader)
    if not len(content.table) and content.broken["header"]:
        raise UserError(
            f"{file.path} is not a tar file; remove it, or give a pattern of the shards", code="data.not_a_tar"
        )
    rows = ShardRows(content.table, 0, len(content.table), None)
    return IndexedShard(file, rows, content.broken, content.stamp, rows.checksum())


def _load(path: Path, files: list[FileStat]) -> dict[str, IndexedShard]:
    """The shards that the index file holds undamaged and in their present version."""
    stored, shards = _read(path), {}
    for file in files:
        shard = stored.get(file.name)
        if shard is None or file._replace(path=file.name) != shard.file:
            continue
        if shard.rows.checksum() == shard.checksum and shard.rows.within(file.size):
            shards[file.path] = shard._replace(file=file)
        else:
            _say_damaged(path, f"the rows of {file.name}")
        ACTIVITY.still_working()
    return shards


def _read(path: Path) -> dict[str, IndexedShard]:
    """The shards of an index file by name, their rows unchecked; none if it is missing or damaged."""
    try:
        return _parse(path) if path.exists() else {}
    except (OSError, ValueError, OverflowError, KeyError, TypeError, AttributeError, struct.error) as error:
        _say_damaged(path, first_line(error))
        return {}


@functools.cache  # once for each damage: a file is read several times
def _say_damaged(path: Path, reason: str) -> None:
    print(f"{path} is damaged or of another version ({reason}); its shards are scanned again", file=sys.stderr)


def _parse(path: Path) -> dict[str, IndexedShard]:
    if not path.is_file():
        raise ValueError("not a regular file")  # opening a pipe would wait
    with path.open("rb") as file:
        magic, length, checksum = HEAD.unpack(file.read(HEAD.size))
        text = file.read(min(length, MAX_JSON_BYTES))
    if magic != MAGIC or zlib.crc32(text) != checksum:
        raise ValueError("wrong checksum")
    offset, table = _table_offset(length), np.zeros((0, COLUMNS), np.uint32)
    if count := (path.stat().st_size - offset) // table.itemsize // COLUMNS:
        table = np.asarray(np.memmap(path, table.dtype, "r", offset=offset, shape=(count, COLUMNS)))
    shards = {}
    for name, entry in parse_json(text)["shards"].items():
        size, start, stop, stamp, checksum = (int(entry[key]) for key in NUMBERS)
        if not 0 <= start <= stop <= len(table):
            raise ValueError(f"rows of {name} beyond the end")
        broken = Counter({str(kind): int(number) for kind, number in entry["broken"].items()})
        file, rows = FileStat(name, size, str(entry["version"])), ShardRows(table, start, stop, path)
        shards[name] = IndexedShard(file, rows, broken, stamp, checksum)
    return shards


def _table_offset(text_length: int) -> int:
    return -(-(HEAD.size + text_length) // TABLE_ALIGNMENT) * TABLE_ALIGNMENT


def _map_rows(path: Path, table_length: int, start: int, stop: int) -> ShardRows:
    table = next((shard.rows.table for shard in _read(path).values()), None)
    if table is None or len(table) != table_length:
        raise UserError(f"{path} changed while the data were opened; start again", code="data.index_changed")
    return ShardRows(table, start, stop, path)


def _save(path: Path, scanned: dict[str, IndexedShard]) -> None:
    """Write the scanned shards and those of the present index file whose shards still exist."""
    shards = {
        name: shard for name, shard in _read(path).items() if path.name != INDEX_NAME or (path.parent / name).exists()
    } | {shard.file.name: shard for shard in scanned.values()}
    entries, start = {}, 0
    for name, (file, rows, broken, stamp, checksum) in shards.items():
        entries[name] = {
            "size": file.size, "version": file.version, "start": start, "stop": start + len(rows), "stamp": stamp,
            "broken": dict(broken), "checksum": checksum,
        }  # fmt: skip
        start += len(rows)
    text = json.dumps({"shards": entries}).encode()
    head = HEAD.pack(MAGIC, len(text), zlib.crc32(text)) + text
    # If the disk is full, the next start scans again.
    with contextlib.suppress(OSError), atomic_path(path) as temporary, temporary.open("wb") as file:
        file.write(head.ljust(_table_offset(len(text)), b"\0"))
        for shard in shards.values():
            file.write(np.ascontiguousarray(shard.rows.table[shard.rows.start : shard.rows.stop]).data)
            ACTIVITY.still_working()

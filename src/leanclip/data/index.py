"""The position of every sample of a set of shards: found by one scan, kept in a file, mapped into memory.

A directory of shards has one index file, beside the shards or, if that is not writable, in the cache directory:

    magic, the length of a JSON text, the text, padding, then a table of (samples, COLUMNS) uint32

The JSON text gives for each shard its rows of the table, and the size and version of the file that was scanned.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from leanclip.data.files import FileStat, is_remote
from leanclip.data.tar import COLUMNS, open_tar, scan
from leanclip.errors import UserError
from leanclip.filesystem import atomic_path, cache_directory
from leanclip.progress import ACTIVITY, progress_bar

INDEX_NAME = ".leanclip-index"
MAGIC = b"leanclip index 1\n"
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


class IndexedShard(NamedTuple):
    file: FileStat
    rows: ShardRows
    broken: Counter[str]
    stamp: int


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
    with _lock(path, directory):
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
def _lock(path: Path, directory: str) -> Iterator[None]:
    """One process scans while the others wait. The system releases the lock when the process ends."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # without a lock, several processes scan and write the same file
            file = stack.enter_context(_lock_path(path).open("a"))
            _wait_for_lock(file, directory)
        yield


def _lock_path(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def _show_progress(path: Path) -> None:
    """For the processes that wait for the lock."""
    with contextlib.suppress(OSError):
        _lock_path(path).touch()


def _wait_for_lock(file: IO[str], directory: str) -> None:
    """This process counts as active only while the process that holds the lock makes progress."""
    changed_at = 0
    while True:
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not changed_at:
            print(f"waiting for another process that indexes {directory}", file=sys.stderr)
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
                    _show_progress(path)
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
    return IndexedShard(file, ShardRows(content.table, 0, len(content.table), None), content.broken, content.stamp)


def _load(path: Path, files: list[FileStat]) -> dict[str, IndexedShard]:
    """The shards that the index file holds in their present version."""
    stored = _read(path)
    return {
        file.path: stored[file.name]._replace(file=file)
        for file in files
        if file.name in stored and file._replace(path=file.name) == stored[file.name].file
    }


def _read(path: Path) -> dict[str, IndexedShard]:
    """The shards of an index file by name; none if it is missing, damaged or of another version."""
    try:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                return {}
            length = int.from_bytes(file.read(8), "little")
            entries = json.loads(file.read(min(length, path.stat().st_size)))["shards"]
        table = np.zeros((0, COLUMNS), np.uint32)
        if count := sum(entry["count"] for entry in entries.values()):
            table = np.asarray(np.memmap(path, np.uint32, "r", offset=_table_offset(length), shape=(count, COLUMNS)))
        return {
            name: IndexedShard(
                FileStat(name, entry["size"], entry["version"]),
                ShardRows(table, entry["start"], entry["start"] + entry["count"], path),
                Counter(entry["broken"]),
                entry["stamp"],
            )
            for name, entry in entries.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _table_offset(text_length: int) -> int:
    return -(-(len(MAGIC) + 8 + text_length) // TABLE_ALIGNMENT) * TABLE_ALIGNMENT


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
    for name, (file, rows, broken, stamp) in shards.items():
        entries[name] = {
            "size": file.size, "version": file.version, "start": start, "count": len(rows), "stamp": stamp,
            "broken": dict(broken),
        }  # fmt: skip
        start += len(rows)
    text = json.dumps({"shards": entries}).encode()
    head = MAGIC + len(text).to_bytes(8, "little") + text
    # If the disk is full, the next start scans again.
    with contextlib.suppress(OSError), atomic_path(path) as temporary, temporary.open("wb") as file:
        file.write(head.ljust(_table_offset(len(text)), b"\0"))
        for shard in shards.values():
            file.write(np.ascontiguousarray(shard.rows.table[shard.rows.start : shard.rows.stop]).data)
            ACTIVITY.still_working()

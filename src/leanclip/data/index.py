"""Where every sample of a set of shards lies: found by one scan, kept in a file, mapped into memory.

There is one file per directory of shards, beside them or in the cache directory where they cannot be written to:

    magic, the length of a JSON text, the text, padding, then a table of (samples, COLUMNS) uint32

The text says which rows belong to which shard, and in which state the shard was when it was read.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from leanclip.data.files import FileStat, OpenFiles, is_remote
from leanclip.data.tar import COLUMNS, compression_of, scan
from leanclip.errors import UserError
from leanclip.filesystem import atomic_path, cache_directory
from leanclip.progress import ACTIVITY

FILE = ".leanclip-index"
MAGIC = b"leanclip index 1\n"
ALIGNED = 64
WORTH_KEEPING = 256 << 20  # bytes of shards in a directory; less is scanned in a moment, and leaves no file
THREADS = 8  # they overlap waiting for storage, which is all there is to overlap
REMOTE_CHUNK = 8 << 20  # a request costs more than the payload it would skip
QUIET_SECONDS = 2.0
SAVE_EVERY = 30.0  # seconds of scanning that a kill may cost
SAVE_SHARE = 0.05  # of the time at most goes into that: a large index takes long to write
LOOK = 0.5  # seconds between looks at whether another process has finished


@dataclass(frozen=True)
class Indexed:
    """One shard with its samples."""

    file: FileStat
    rows: "Rows"
    broken: Counter[str]
    stamp: int


class Rows:
    """Some rows of an index file. In a worker that was not forked they are mapped again, not copied."""

    def __init__(self, table: np.ndarray, start: int, stop: int, place: Path | None) -> None:
        self.table, self.start, self.stop, self.place = table, start, stop, place

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, position: int) -> list[int]:
        return self.table[self.start + position].tolist()

    def __reduce__(self) -> tuple[Any, ...]:
        if self.place is None:
            return Rows, (self.table[self.start : self.stop].copy(), 0, len(self), None)
        return _rows_of, (self.place, len(self.table), self.start, self.stop)


@dataclass(frozen=True)
class _Entry:
    """What the file says of a shard."""

    size: int
    version: str
    start: int
    count: int
    stamp: int
    broken: dict[str, int]

    def fits(self, file: FileStat) -> bool:
        return (self.size, self.version) == (file.size, file.version)


def open_index(files: list[FileStat]) -> list[Indexed]:
    """The index of every shard, in the order given. What no file knows yet is scanned, by one process at a time."""
    directories: dict[str, list[FileStat]] = {}
    for file in files:
        directories.setdefault(file.directory, []).append(file)
    found: dict[str, Indexed] = {}
    for directory, members in directories.items():
        found |= _directory_index(directory, members)
    return [found[file.path] for file in files]


def _directory_index(directory: str, files: list[FileStat]) -> dict[str, Indexed]:
    places = _places(directory)
    for place in places:
        if (found := _load(place, files)) is not None and len(found) == len(files):
            return found
    place = next((place for place in places if _writable(place)), None)
    if place is None or (sum(file.size for file in files) < WORTH_KEEPING and not is_remote(directory)):
        return _scan_all(files)
    with _lock(place, directory):
        known = _load(place, files) or {}
        fresh = _scan_all([file for file in files if file.path not in known], _Saving(place))
        if fresh:
            _save(place, fresh)
        return known | fresh | (_load(place, files) or {})


def _places(directory: str) -> list[Path]:
    """Where the index of a directory may be: beside the shards, else in the cache directory."""
    full = directory if is_remote(directory) else str(Path(directory).resolve())
    cached = cache_directory() / f"index-{hashlib.sha256(full.encode()).hexdigest()[:24]}"
    return [cached] if is_remote(directory) else [Path(directory) / FILE, cached]


def _writable(place: Path) -> bool:
    with contextlib.suppress(OSError):
        if place.name != FILE:
            place.parent.mkdir(parents=True, exist_ok=True)
        return os.access(place.parent, os.W_OK)
    return False


@contextlib.contextmanager
def _lock(place: Path, directory: str) -> Iterator[None]:
    """One process scans, the others wait for its result. The lock falls with the process that holds it."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # then several scan at once, and write the same file
            file = stack.enter_context(_lock_file(place).open("a"))
            if not _locked(file):
                print(f"waiting for another process that indexes {directory}", file=sys.stderr)
                _wait_for(file)
        yield


def _lock_file(place: Path) -> Path:
    return place.with_name(place.name + ".lock")


def _locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait_for(file: IO[str]) -> None:
    """Until the lock is free. This process counts as at work only while the one that holds it comes further."""
    touched = 0
    while not _locked(file):
        if (now := os.fstat(file.fileno()).st_mtime_ns) != touched:
            touched = now
            ACTIVITY.still_working()
        time.sleep(LOOK)


class _Saving:
    """Keeps what a long scan has found so far, and shows those who wait for it that it goes on."""

    def __init__(self, place: Path) -> None:
        self.place, self.due = place, time.monotonic() + SAVE_EVERY

    def __call__(self, found: dict[str, Indexed]) -> None:
        with contextlib.suppress(OSError):
            _lock_file(self.place).touch()
        if (began := time.monotonic()) >= self.due:
            _save(self.place, found)
            took = time.monotonic() - began
            self.due = began + took + max(SAVE_EVERY, took / SAVE_SHARE)


def _scan_all(
    files: list[FileStat], keep: Callable[[dict[str, Indexed]], None] = lambda _: None
) -> dict[str, Indexed]:
    """The index of each file. `keep` is told after every one what was found so far."""
    found: dict[str, Indexed] = {}
    with _IndexingProgress(sum(file.size for file in files), len(files)) as progress:
        pool = ThreadPoolExecutor(THREADS)
        try:
            for file, shard in zip(files, pool.map(_scan_one, files), strict=True):
                found[file.path] = shard
                progress.advance(file.size)
                keep(found)
        finally:
            pool.shutdown(cancel_futures=True)
    return found


def _scan_one(file: FileStat) -> Indexed:
    reader = OpenFiles()

    def read(offset: int, length: int) -> bytes:
        content = reader.read(file, offset, length)
        ACTIVITY.still_working()  # here, for on a slow disk a single shard takes long
        return content

    try:
        start = read(0, 512)
        if command := compression_of(start):
            raise UserError(
                f"{file.path} is compressed, and is not read by position; unpack it: {command} {file.path}"
            )
        found = scan(read, file.size, ahead=REMOTE_CHUNK if is_remote(file.path) else None)
    except OSError as error:
        raise UserError(f"cannot read {file.path} ({error.strerror or error})") from error
    finally:
        reader.close()
    if not len(found.table) and found.broken["header"]:
        raise UserError(f"{file.path} is not a tar file; remove it, or give the shards' own pattern")
    return Indexed(file, Rows(found.table, 0, len(found.table), None), found.broken, found.stamp)


def _load(place: Path, files: list[FileStat]) -> dict[str, Indexed] | None:
    """The shards that the file knows in their present state; None if it is missing or not whole."""
    read = _read(place)
    if read is None:
        return None
    entries, table = read
    found = {}
    for file in files:
        entry = entries.get(file.name)
        if entry is not None and entry.fits(file):
            rows = Rows(table, entry.start, entry.start + entry.count, place)
            found[file.path] = Indexed(file, rows, Counter(entry.broken), entry.stamp)
    return found


def _read(place: Path) -> tuple[dict[str, _Entry], np.ndarray] | None:
    try:
        with place.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                return None
            length = int.from_bytes(file.read(8), "little")
            text = json.loads(file.read(min(length, place.stat().st_size)))
        entries = {name: _Entry(**entry) for name, entry in text["shards"].items()}
        count = sum(entry.count for entry in entries.values())
        table = np.zeros((0, COLUMNS), np.uint32)
        if count:
            table = np.asarray(np.memmap(place, np.uint32, "r", offset=_padded(length), shape=(count, COLUMNS)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # of another version, or half of one: it is made anew
    return entries, table


def _padded(length: int) -> int:
    return -(-(len(MAGIC) + 8 + length) // ALIGNED) * ALIGNED


def _rows_of(place: Path, expected: int, start: int, stop: int) -> Rows:
    read = _read(place)
    if read is None or len(read[1]) != expected:
        raise UserError(f"{place} changed while the data were being opened; start again")
    return Rows(read[1], start, stop, place)


def _save(place: Path, fresh: dict[str, Indexed]) -> None:
    """Write the known shards that are still there and the new ones, complete under the name or not at all."""
    tables: list[np.ndarray] = []
    entries: dict[str, dict[str, Any]] = {}
    start = 0

    def add(name: str, rows: np.ndarray, **facts: Any) -> None:
        nonlocal start
        entries[name] = facts | {"start": start, "count": len(rows)}
        tables.append(rows)
        start += len(rows)

    new = {shard.file.name: shard for shard in fresh.values()}
    old, table = _read(place) or ({}, np.zeros((0, COLUMNS), np.uint32))
    for name, entry in old.items():
        if name not in new and (place.name != FILE or (place.parent / name).exists()):
            add(name, table[entry.start : entry.start + entry.count], size=entry.size, version=entry.version,
                stamp=entry.stamp, broken=entry.broken)  # fmt: skip
    for name, shard in new.items():
        add(name, shard.rows.table, size=shard.file.size, version=shard.file.version, stamp=shard.stamp,
            broken=dict(shard.broken))  # fmt: skip
    text = json.dumps({"shards": entries}).encode()
    # A full disk costs the next start a scan, nothing else.
    with contextlib.suppress(OSError), atomic_path(place) as temporary, temporary.open("wb") as file:
        head = MAGIC + len(text).to_bytes(8, "little") + text
        file.write(head + bytes(_padded(len(text)) - len(head)))
        for rows in tables:
            file.write(np.ascontiguousarray(rows).data)
            ACTIVITY.still_working()


class _IndexingProgress:
    """Says that shards are being indexed, once it has taken a while: a bar on a terminal, else one line."""

    def __init__(self, size: int, shards: int) -> None:
        self.size, self.shards, self.done = size, shards, 0
        self.began, self.said = time.monotonic(), False
        self.console = Console(stderr=True, soft_wrap=True, highlight=False)
        self.bar: Progress | None = None

    def __enter__(self) -> "_IndexingProgress":
        return self

    def advance(self, size: int) -> None:
        self.done += size
        if not self.said and time.monotonic() - self.began > QUIET_SECONDS:
            self.said = True
            if self.console.is_terminal:
                columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
                           TimeRemainingColumn())  # fmt: skip
                self.bar = Progress(*columns, console=self.console, transient=True)
                self.bar.add_task(f"indexing {self.shards:,} shards", total=self.size)
                self.bar.start()
            else:
                self.console.print(f"indexing {self.shards:,} shards ({self.size / 1e9:.1f} GB), once")
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=self.done)

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

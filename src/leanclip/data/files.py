"""Shards wherever they lie: local paths and, through fsspec, URLs. The only module that imports fsspec."""

import contextlib
import glob
import os
from collections import OrderedDict
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import braceexpand
import fsspec

from leanclip.errors import UserError, first_line
from leanclip.progress import ACTIVITY

OPEN_FILES = 256  # per process; a data set may have more shards than a process may open files
STAMPS = ("mtime", "LastModified", "last_modified", "ETag", "etag", "updated", "created")


class FileStat(NamedTuple):
    """A file and the state it is in."""

    path: str
    size: int
    version: str  # changes when the file does

    @property
    def directory(self) -> str:
        return self.path.rpartition("/")[0] if is_remote(self.path) else str(Path(self.path).parent)

    @property
    def name(self) -> str:
        return PurePosixPath(self.path).name


def is_remote(path: str) -> bool:
    return "://" in path


def expand(pattern: str) -> list[str]:
    """The files of a path, directory, glob or brace pattern, or of URLs of that form, in a stable order."""
    if pattern.startswith("pipe:"):
        raise UserError(f"{pattern!r} is a command; give the URL itself (s3://, gs://, https://), or a local path")
    try:
        parts = list(braceexpand.braceexpand(pattern))
    except ValueError as error:
        raise UserError(f"the braces of {pattern!r} do not match: {error}") from error
    paths = [path for part in parts for path in (_expand_url(part) if is_remote(part) else _expand_local(part))]
    if not paths:
        raise UserError(f"no *.tar in {pattern}" if Path(pattern).is_dir() else f"no such file or folder: {pattern}")
    return paths


def stat_all(paths: list[str], pattern: str) -> list[FileStat]:
    """The state of every file; a missing one is the user's to mend."""
    listed: dict[str, dict[str, dict[str, Any]]] = {}
    found = []
    for path in paths:
        try:
            found.append(_stat_url(path, listed) if is_remote(path) else _stat_local(path))
        except FileNotFoundError as error:
            origin = "" if path == pattern else f" (from {pattern})"
            raise UserError(f"no such file or folder: {path}{origin}") from error
        except OSError as error:
            raise UserError(f"cannot read {path} ({first_line(error)})") from error
        ACTIVITY.still_working()
    return found


class OpenFiles:
    """Random reads from many files, the most recently used of which stay open. Travels to workers without them."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, int] = OrderedDict()
        self._process = os.getpid()
        self._systems: dict[str, tuple[Any, str]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()

    def read(self, file: FileStat, offset: int, length: int) -> bytes:
        """Up to `length` bytes; fewer at the end. OSError if the file is gone or not the one that was indexed."""
        if is_remote(file.path):
            return self._read_url(file.path, offset, min(length, file.size - offset))
        return os.pread(self._descriptor(file), length, offset)

    def expect(self, file: FileStat, offset: int, length: int) -> None:
        """Let the system fetch a part of a local file meanwhile. What fails here fails again on reading."""
        if not is_remote(file.path) and hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._descriptor(file), offset, length, os.POSIX_FADV_WILLNEED)

    def _descriptor(self, file: FileStat) -> int:
        descriptor = self._open.get(file.path)
        if descriptor is None:
            descriptor = os.open(file.path, os.O_RDONLY)
            state = os.fstat(descriptor)
            if (state.st_size, str(state.st_mtime_ns)) != (file.size, file.version):
                os.close(descriptor)
                raise OSError(f"{file.path} has changed since it was indexed")
            self._open[file.path] = descriptor
            if len(self._open) > OPEN_FILES:
                os.close(self._open.popitem(last=False)[1])
        else:
            self._open.move_to_end(file.path)
        return descriptor

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def __del__(self) -> None:
        self.close()

    def _read_url(self, path: str, offset: int, length: int) -> bytes:
        if length <= 0:
            return b""
        if self._process != os.getpid():  # a client's connections and threads do not survive a fork
            self._systems, self._process = {}, os.getpid()
        protocol = path.partition("://")[0]
        if protocol not in self._systems:
            self._systems[protocol] = _system(path, fresh=True)[0], protocol
        system = self._systems[protocol][0]
        try:
            return system.cat_file(system._strip_protocol(path), start=offset, end=offset + length)
        except OSError:
            raise
        except Exception as error:  # every client has errors of its own
            raise OSError(f"cannot read {path} ({first_line(error)})") from error


def _system(path: str, *, fresh: bool = False) -> tuple[Any, str]:
    try:
        return fsspec.core.url_to_fs(path, skip_instance_cache=fresh)
    except (ImportError, ValueError) as error:
        raise UserError(f"cannot read {path}: {first_line(error)}") from error


def _expand_local(part: str) -> list[str]:
    if Path(part).is_dir():
        part = str(Path(part) / "*.tar")
    return sorted(glob.glob(part)) if glob.has_magic(part) else [part]


def _expand_url(part: str) -> list[str]:
    if not glob.has_magic(part) and not part.endswith("/"):
        return [part]
    system, inside = _system(part + "*.tar" if part.endswith("/") else part)
    try:
        return sorted(system.unstrip_protocol(path) for path in system.glob(inside))
    except Exception as error:  # every client has errors of its own
        raise UserError(f"cannot list {part} ({first_line(error)})") from error


def _stat_local(path: str) -> FileStat:
    state = Path(path).stat()
    if not Path(path).is_file():
        raise OSError("not a file")
    return FileStat(path, state.st_size, str(state.st_mtime_ns))


def _stat_url(path: str, listed: dict[str, dict[str, dict[str, Any]]]) -> FileStat:
    """One listing of the directory serves all its shards; a server that lists nothing is asked for each."""
    system, inside = _system(path)
    parent = inside.rpartition("/")[0]
    if parent not in listed:
        try:
            listed[parent] = {entry["name"]: entry for entry in system.ls(parent, detail=True)}
        except Exception:  # not every server lists, and each says so in its own way
            listed[parent] = {}
    try:
        info = listed[parent].get(inside) or system.info(inside)
    except OSError:
        raise
    except Exception as error:  # every client has errors of its own
        raise OSError(first_line(error)) from error
    if not info.get("size"):
        raise OSError("it has no size")
    version = next((str(info[key]) for key in STAMPS if info.get(key)), "")
    return FileStat(path, int(info["size"]), version)

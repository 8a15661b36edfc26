"""Files by local path or, through fsspec, by URL. The only module that imports fsspec.

A request that takes longer than REMOTE_SECONDS fails: a server may accept connections and never answer.
"""

import contextlib
import glob
import os
import re
import stat
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import braceexpand
import fsspec
import fsspec.asyn

from leanclip.errors import UserError, first_line
from leanclip.progress import ACTIVITY

MAX_OPEN_FILES = 256  # per process; a data set may have more shards than a process may open
MAX_FILES = 1_000_000  # that braces name
RANGE = re.compile(r"\{(-?\d+)\.\.(-?\d+)(?:\.\.-?\d+)?\}")
MAX_IMAGE_BYTES = 1 << 30
MAX_CAPTION_BYTES = 1 << 24  # of a .txt or a .json
REMOTE_SECONDS = float(os.environ.get("LEANCLIP_REMOTE_TIMEOUT", "60"))  # for one request
VERSION_KEYS = ("mtime", "LastModified", "last_modified", "ETag", "etag", "Last-Modified", "updated", "created")


class FileStat(NamedTuple):
    """A file, its size and its version."""

    path: str
    size: int
    version: str  # modification time, or the ETag of a URL

    @property
    def directory(self) -> str:
        return self.path.rpartition("/")[0] if is_remote(self.path) else str(Path(self.path).parent)

    @property
    def name(self) -> str:
        return PurePosixPath(self.path).name


def is_remote(path: str) -> bool:
    return "://" in path


is_file, is_folder = os.path.isfile, os.path.isdir  # of a name that is too long for one: False


def _is_http(path: str) -> bool:
    return path.startswith(("http://", "https://"))


def expand(pattern: str, *, ending: str = ".tar") -> list[str]:
    """The files of a path, directory, glob or brace pattern, or of URLs of that form, in a stable order.

    Of a directory: those with the ending.
    """
    if pattern.startswith("pipe:"):
        raise UserError(
            f"{pattern!r} is a command; give a URL (s3://, gs://, https://) or a local path", code="data.bad_pattern"
        )
    try:
        # Of a range, braceexpand makes all numbers at once.
        longest = max((abs(int(b) - int(a)) for a, b in RANGE.findall(pattern)), default=0)
        parts = list(islice(braceexpand.braceexpand(pattern), MAX_FILES + 1)) if longest <= MAX_FILES else None
    except ValueError as error:
        raise UserError(f"the braces of {pattern!r} do not match: {error}", code="data.bad_pattern") from error
    if parts is None or len(parts) > MAX_FILES:
        raise UserError(f"the braces of {pattern!r} name more than {MAX_FILES:,} files", code="data.bad_pattern")
    paths = [path for part in parts for path in (_expand_url if is_remote(part) else _expand_local)(part, ending)]
    if not paths:
        message = f"no *{ending} in {pattern}" if is_folder(pattern) else f"no such file or folder: {pattern}"
        raise UserError(message, code="data.not_found")
    return paths


def stat_all(paths: list[str], pattern: str) -> list[FileStat]:
    """Size and version of every file; `pattern` is named in the error for a missing one."""
    listings: dict[str, dict[str, dict[str, Any]]] = {}
    files = []
    for path in paths:
        try:
            files.append(_stat_url(path, listings) if is_remote(path) else _stat_local(path))
        except FileNotFoundError as error:
            origin = "" if path == pattern else f" (from {pattern})"
            raise UserError(f"no such file or folder: {path}{origin}", code="data.not_found") from error
        except OSError as error:
            raise UserError(f"cannot read {path} ({first_line(error)})", code="data.unreadable") from error
        ACTIVITY.still_working()
    return files


def read_regular(path: Path, limit: int) -> bytes:
    """The bytes of a file. OSError for a pipe or a device, which may never end, and for more than `limit` bytes."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError("not a regular file")
    if status.st_size > limit:
        raise OSError(f"{status.st_size:,} bytes are too many")
    with path.open("rb") as file:
        return file.read(limit)


class OpenFiles:
    """Random reads from many files; the most recently used stay open. Pickling drops the open files."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, int] = OrderedDict()
        self._process = os.getpid()
        self._systems: dict[str, Any] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return OpenFiles, ()

    def read(self, file: FileStat, offset: int, length: int) -> bytes:
        """Up to `length` bytes; fewer at the end. OSError if the file is missing or has changed."""
        if is_remote(file.path):
            return self._read_url(file, offset, min(length, file.size - offset))
        return os.pread(self._descriptor(file), length, offset)

    def prefetch(self, file: FileStat, offset: int, length: int) -> None:
        """Let the system read a part of a local file ahead. An error is reported by the read that follows."""
        if not is_remote(file.path) and hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._descriptor(file), offset, length, os.POSIX_FADV_WILLNEED)

    def _descriptor(self, file: FileStat) -> int:
        descriptor = self._open.get(file.path)
        if descriptor is None:
            descriptor = os.open(file.path, os.O_RDONLY)
            status = os.fstat(descriptor)
            if (status.st_size, str(status.st_mtime_ns)) != (file.size, file.version):
                os.close(descriptor)
                raise OSError(f"{file.path} has changed since it was indexed")
            self._open[file.path] = descriptor
            if len(self._open) > MAX_OPEN_FILES:
                os.close(self._open.popitem(last=False)[1])
        else:
            self._open.move_to_end(file.path)
        return descriptor

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def __del__(self) -> None:
        self.close()

    def _read_url(self, file: FileStat, offset: int, length: int) -> bytes:
        if length <= 0:
            return b""
        if self._process != os.getpid():  # connections and threads of a client do not survive a fork
            self._systems, self._process = {}, os.getpid()
        protocol = file.path.partition("://")[0]
        if protocol not in self._systems:
            self._systems[protocol] = _file_system(file.path, fresh=True)[0]
        system = self._systems[protocol]
        if _is_http(file.path):
            return _within_limit(system, _read_http, system, file, offset, length)
        return _request(system, "cat_file", system._strip_protocol(file.path), start=offset, end=offset + length)


async def _read_http(system: Any, file: FileStat, offset: int, length: int) -> bytes:
    """fsspec reads whatever a server sends: the whole file where it ignores ranges, or another version of it."""
    session = await system.set_session()
    headers = {"Range": f"bytes={offset}-{offset + length - 1}", "Accept-Encoding": "identity"}
    async with session.get(system.encode_url(file.path), headers=headers) as response:
        response.raise_for_status()
        whole = response.status == 200 and (offset, length) == (0, file.size)
        if response.status != 206 and not whole:
            raise OSError("the server ignores range requests; download the file, or use another server")
        total = response.headers.get("Content-Range", "").rpartition("/")[2]
        versions = [response.headers[key] for key in ("ETag", "Last-Modified") if key in response.headers]
        if (total.isdigit() and int(total) != file.size) or (versions and file.version not in ("", *versions)):
            raise OSError("the file has changed on the server")
        return await response.content.readexactly(length)


def _request(system: Any, name: str, *arguments: Any, **options: Any) -> Any:
    """The result of a method of a file system. Only asynchronous ones have a time limit."""
    if system.async_impl:
        return _within_limit(system, getattr(system, f"_{name}"), *arguments, **options)
    with _os_errors():
        return getattr(system, name)(*arguments, **options)


def _within_limit(system: Any, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    with _os_errors():
        return fsspec.asyn.sync(system.loop, function, *arguments, timeout=REMOTE_SECONDS, **options)


@contextlib.contextmanager
def _os_errors() -> Iterator[None]:
    """Every client has its own exceptions; each becomes an OSError."""
    try:
        yield
    except fsspec.exceptions.FSTimeoutError as error:
        raise OSError(f"no answer within {REMOTE_SECONDS:g} s; LEANCLIP_REMOTE_TIMEOUT sets the limit") from error
    except FileNotFoundError as error:
        cause = error.__cause__  # fsspec takes every failure of an HTTP server for a missing file
        if cause is None or getattr(cause, "status", 0) == 404:
            raise
        raise OSError(first_line(cause)) from error
    except OSError:
        raise
    except Exception as error:
        raise OSError(first_line(error)) from error


def _file_system(path: str, *, fresh: bool = False) -> tuple[Any, str]:
    try:
        return fsspec.core.url_to_fs(path, skip_instance_cache=fresh)
    except (ImportError, ValueError) as error:
        raise UserError(f"cannot read {path}: {first_line(error)}", code="data.unreadable") from error


def _expand_local(part: str, ending: str) -> list[str]:
    if is_folder(part):
        part = str(Path(glob.escape(part)) / f"*{ending}")
    return sorted(glob.glob(part)) if glob.has_magic(part) else [part]


def _expand_url(part: str, ending: str) -> list[str]:
    if not glob.has_magic(part) and not part.endswith("/"):
        return [part]
    system, pattern = _file_system(part + f"*{ending}" if part.endswith("/") else part)
    try:
        return sorted(system.unstrip_protocol(path) for path in _request(system, "glob", pattern))
    except OSError as error:
        raise UserError(f"cannot list {part} ({first_line(error)})", code="data.unreadable") from error


def _stat_local(path: str) -> FileStat:
    status = Path(path).stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError("not a file")
    return FileStat(path, status.st_size, str(status.st_mtime_ns))


def _stat_url(path: str, listings: dict[str, dict[str, dict[str, Any]]]) -> FileStat:
    """One listing of a directory serves all its shards; without one, each shard takes a request."""
    system, inside = _file_system(path)
    parent = inside.rpartition("/")[0]
    if parent not in listings:
        listings[parent] = {}
        with contextlib.suppress(OSError):  # not every server can list, and a listing by HTTP has no sizes
            entries = [] if _is_http(path) else _request(system, "ls", parent, detail=True)
            listings[parent] = {entry["name"]: entry for entry in entries}
    info = listings[parent].get(inside) or _request(system, "info", inside)
    if not info.get("size"):
        raise OSError("the server gives no size")
    version = next((str(info[key]) for key in VERSION_KEYS if info.get(key)), "")
    return FileStat(path, int(info["size"]), version)

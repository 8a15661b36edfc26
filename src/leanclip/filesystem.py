"""Atomic writes of files and directories: a reader sees the old version or the new one, whatever happens between; and
JSON from files that may be damaged."""

import contextlib
import errno
import fcntl
import glob
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from leanclip.errors import UserError, first_line

LITTER_SECONDS = 5  # a younger file may be about to be locked
MAX_JSON_BYTES = 256 << 20
MAX_LINE_BYTES = 16 << 20
MAX_JSON_DEPTH = 100
MAX_JSON_DIGITS = 20  # of an integer: 64 bits


@contextlib.contextmanager
def atomic_path(final: Path, *, suffix: str = ".tmp") -> Iterator[Path]:
    """A temporary path beside `final`, which is moved to it when the block succeeds and removed when it fails."""
    check_target(final)
    remove_litter(final.parent, f".{glob.escape(final.name)}.????????{suffix}")
    handle, name = tempfile.mkstemp(dir=final.parent, prefix=f".{final.name}.", suffix=suffix)
    temporary = Path(name)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the process
        yield temporary
        sync(temporary)
        temporary.chmod(0o666 & ~_umask())  # mkstemp's files are private
        temporary.replace(final)
    finally:
        temporary.unlink(missing_ok=True)
        os.close(handle)


def remove_litter(folder: Path, pattern: str = ".*.tmp") -> None:
    """Remove the temporary files that killed processes left: no process has them locked."""
    for path in folder.glob(pattern):
        with contextlib.suppress(OSError):  # locked, gone, or a disk that cannot be written
            old = path.is_file() and not path.is_symlink() and time.time() - path.stat().st_mtime > LITTER_SECONDS
            if old:
                with path.open("rb+") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()


def check_target(final: Path) -> None:
    """An OSError if a file cannot get this path. A move to a device would replace it, and one to /dev/stdout the link
    of that name, which may lead to a file."""
    if not final.absolute().parent.is_dir():
        raise OSError(errno.ENOENT, "no such directory")
    if (final.exists() and not final.is_file()) or final.absolute().parent == Path("/dev"):
        raise OSError(errno.EEXIST, "not a regular file")


@contextlib.contextmanager
def writing(path: Path, *, code: str, remedy: str = "write elsewhere") -> Iterator[None]:
    """Inside, what a full or read-only disk refuses is a UserError that names the path."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise UserError(f"cannot write {path} ({reason}); {remedy}", code=code) from error


@contextlib.contextmanager
def reading(name: str) -> Iterator[None]:
    """Inside, what the disk refuses, such as a name that is too long, is a UserError that names the data."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot read {name[:200]} ({error.strerror or first_line(error)})", code="data.unreadable"
        ) from error


def write_atomically(path: Path, content: str | bytes) -> None:
    with atomic_path(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def replace_directory(temporary: Path, final: Path) -> None:
    """Give a directory its final name; an older one is renamed first, since the system replaces empty ones only.

    Its files get the mode of others: some libraries write private ones.
    """
    for path in temporary.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(0o666 & ~_umask())
    aside = _aside(final)
    if final.exists():
        shutil.rmtree(aside, ignore_errors=True)
        final.rename(aside)
    temporary.rename(final)
    sync(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def put_back(final: Path) -> None:
    """After a killed `replace_directory`: restore the older directory, or remove it if the new one has its name."""
    aside = _aside(final)
    if final.exists():
        remove(aside)
    elif aside.exists():
        aside.rename(final)


def remove(path: Path) -> Path:
    """Remove a file, link or directory if it exists. Returns the path, which is free now."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)
    return path


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _aside(final: Path) -> Path:
    return final.with_name(f".{final.name}.old")


def read_json(path: Path, *, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """The content of a JSON file. If it is missing, damaged, too large or no regular file, it is a UserError."""
    try:
        return parse_json(read_bounded(path, max_bytes=max_bytes))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path} ({first_line(error)})", code="file.bad_json") from error


def read_bounded(path: Path, *, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """The content of a file. An OSError if it is no regular file, a ValueError if it is larger than it can be."""
    if path.exists() and not path.is_file():
        raise OSError("not a regular file")  # reading a pipe or a device may never end
    if path.stat().st_size > max_bytes:
        raise ValueError(f"more than {max_bytes:,} bytes")
    return path.read_bytes()


def lines_of(path: Path) -> Iterator[bytes]:
    """The lines of a file with their ends. One that no program writes comes in pieces, so that it takes no memory."""
    with path.open("rb") as file:
        while line := file.readline(MAX_LINE_BYTES):
            yield line


def parse_json(text: str | bytes) -> Any:
    """As json.loads. Also a ValueError: nesting that exhausts the stack, integers that no tensor holds."""
    with contextlib.suppress(RecursionError):
        content = json.loads(text, parse_int=_parse_int)
        if _nested_within(content, MAX_JSON_DEPTH):
            return content
    raise ValueError("nested too deeply")


def _parse_int(digits: str) -> int:
    if len(digits) > MAX_JSON_DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)


def _nested_within(content: Any, levels: int) -> bool:
    children = content.values() if isinstance(content, dict) else content if isinstance(content, list) else ()
    return levels > 0 and all(_nested_within(child, levels - 1) for child in children)


def cache_directory() -> Path:
    return Path(os.environ.get("LEANCLIP_CACHE") or Path.home() / ".cache" / "leanclip")

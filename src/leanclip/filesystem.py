"""Atomic writes of files and directories: a reader sees the old version or the new one, whatever happens between."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def atomic_path(final: Path, *, suffix: str = ".tmp") -> Iterator[Path]:
    """A temporary path beside `final`, which is moved to it when the block succeeds and removed when it fails."""
    handle, name = tempfile.mkstemp(dir=final.parent, prefix=f".{final.name}.", suffix=suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        sync(temporary)
        temporary.chmod(0o666 & ~_umask())  # mkstemp's files are private
        temporary.replace(final)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: Path, content: str | bytes) -> None:
    with atomic_path(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def replace_directory(temporary: Path, final: Path) -> None:
    """Give a directory its final name; an older one is renamed first, since the system replaces empty ones only."""
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


def cache_directory() -> Path:
    return Path(os.environ.get("LEANCLIP_CACHE") or Path.home() / ".cache" / "leanclip")

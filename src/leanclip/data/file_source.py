"""What the sources that can be packed into shards have in common."""

from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from leanclip.data.source import BrokenSample, Source


class Packable(Source):
    """A source whose files belong to the user, so that they may change between two runs of `leanclip data pack`."""

    notes: tuple[str, ...] = ()
    """What was left out on opening, for the summary."""

    def identity(self) -> str:
        """Changes when the files that name the samples change, or what is taken of them."""
        raise NotImplementedError


def file_identity(path: Path) -> str:
    status = path.stat()
    return f"{path.name} {status.st_size} {status.st_mtime_ns}"


def read_image(folder: Path, path: str, name: str) -> bytes:
    """The bytes of an image file; a relative path counts from `folder`."""
    if not path.strip():
        raise BrokenSample("no image", f"{name} names no image")
    try:
        content = (folder / path).read_bytes()
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise BrokenSample("no image", f"{name}: cannot read {folder / path} ({reason})") from error
    if not content:
        raise BrokenSample("empty", f"{name}: {folder / path} has no bytes")
    return content


def whole_captions(captions: Iterable[str], name: str) -> list[str]:
    """The captions without blanks around them and without empty ones; at least one."""
    given = [caption.strip() for caption in captions]
    if not given:
        raise BrokenSample("no caption", f"{name} has no caption")
    if not any(given):
        raise BrokenSample("empty", f"the caption of {name} is empty")
    return [caption for caption in given if caption]


def refuse_outside(path: str, name: str) -> None:
    """Lists come with downloaded data: they may name files of their folder and no others."""
    if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
        raise BrokenSample("escaping path", f"{name}: a list may only name files below its folder")

"""A folder of images, with captions in .txt files or in a list, as a source to pack."""

import csv
import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from leanclip.data.source import BrokenSample, Packable, clean_captions, file_identity, read_image
from leanclip.errors import UserError, first_line

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
LIST_NAMES = ("metadata.jsonl", "metadata.csv", "captions.jsonl", "captions.csv", "captions.tsv", "captions.txt")
IMAGE_KEYS = ("file_name", "image", "filename", "filepath", "path")
CAPTION_KEYS = ("caption", "text", "captions", "title")


class Folder(Packable):
    """Every image below a folder, sorted by name.

    Captions come from a list (LIST_NAMES) in the folder of the image or above, else from the .txt of the same name.
    A listed image that does not exist is a broken sample.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise UserError(f"no such folder: {self.path}", code="data.not_found")
        self._listed: dict[str, list[str]] = {}
        names: set[str] = set()
        identity = hashlib.blake2b(digest_size=16)
        for folder, subfolders, files in os.walk(self.path, onerror=_refuse_unreadable):
            subfolders.sort()
            relative = Path(folder).relative_to(self.path)
            for file in sorted(files):
                path = Path(folder) / file
                if file in LIST_NAMES:
                    if not self._is_inside(path):
                        raise UserError(
                            f"{path} is a link to a file outside {self.path}; remove it", code="pack.link_outside"
                        )
                    for name, captions in _read_list(path):
                        self._listed.setdefault(str(relative / name), []).extend(captions)
                elif path.suffix.lower() in IMAGE_SUFFIXES:
                    names.add(str(relative / file))
                elif path.suffix != ".txt":
                    continue
                identity.update(f"{relative} {file_identity(path)}\n".encode(errors="surrogateescape"))
        self._names = sorted(names | set(self._listed))
        self._identity = identity.hexdigest()
        if not self._names:
            raise UserError(
                f"no images in {self.path} and its subfolders; supported: {', '.join(IMAGE_SUFFIXES)}",
                code="pack.no_images",
            )

    def __len__(self) -> int:
        return len(self._names)

    def image_bytes(self, index: int) -> bytes:
        return read_image(self.path, self._names[index], self.name(index))

    def captions(self, index: int) -> list[str]:
        name = self._names[index]
        if name in self._listed:
            return clean_captions(self._listed[name], self.name(index))
        file = (self.path / name).with_suffix(".txt")
        if not self._is_inside(file):
            raise BrokenSample("escaping path", f"the caption of {self.name(index)} is a link to a file outside it")
        try:
            return clean_captions([file.read_bytes().decode("utf-8")], self.name(index))
        except UnicodeDecodeError as error:
            raise BrokenSample("encoding", f"the caption of {self.name(index)} is not UTF-8") from error
        except OSError as error:
            raise BrokenSample("no caption", f"{self.name(index)} has no .txt and is in no list") from error

    def _is_inside(self, file: Path) -> bool:
        """A downloaded folder may contain links to private files elsewhere."""
        return not file.is_symlink() or file.resolve().is_relative_to(self.path.resolve())

    def name(self, index: int) -> str:
        return f"{self._names[index]} in {self.path}"

    def identity(self) -> str:
        return self._identity


def _refuse_unreadable(error: OSError) -> None:
    raise UserError(
        f"cannot read the folder {error.filename} ({first_line(error)})", code="data.unreadable"
    ) from error


def _read_list(path: Path) -> Iterator[tuple[str, list[str]]]:
    """The image names and captions of a list, in its order; a name may occur several times."""
    try:
        text = path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8; convert it (iconv -t UTF-8)", code="data.not_utf8") from error
    rows = _json_rows(path, text) if path.suffix == ".jsonl" else _table_rows(path, text)
    for name, captions in rows:
        yield re.sub(r"#\d+$", "", name), captions  # Flickr8k numbers the captions of an image


def _json_rows(path: Path, text: str) -> Iterator[tuple[str, list[str]]]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            name = next(str(row[key]) for key in IMAGE_KEYS if key in row)
            captions = next(row[key] for key in CAPTION_KEYS if key in row)
        except (ValueError, TypeError, StopIteration) as error:
            raise UserError(
                f'{path}, line {number}: expected {{"file_name": ..., "caption": ...}}, got {line[:80]}',
                code="pack.bad_list",
            ) from error
        yield name, [str(caption) for caption in (captions if isinstance(captions, list) else [captions])]


def _table_rows(path: Path, text: str) -> Iterator[tuple[str, list[str]]]:
    first = text.partition("\n")[0].strip()
    separator = "\t" if "\t" in first else ","
    rows = (row for row in csv.reader(text.splitlines(keepends=True), delimiter=separator) if row)
    header = [column.strip() for column in next(csv.reader([first], delimiter=separator), [])]
    name = next((header.index(key) for key in IMAGE_KEYS if key in header), None)
    caption = next((header.index(key) for key in CAPTION_KEYS if key in header), None)
    if name is not None and caption is not None:
        next(rows)
    elif path.suffix == ".txt" and separator == "\t":
        name, caption = 0, 1
    else:
        raise UserError(
            f"{path}: the first line must name the columns, such as {IMAGE_KEYS[0]} and {CAPTION_KEYS[0]}; got"
            f" {first[:80]!r}",
            code="pack.bad_list",
        )
    try:
        for number, row in enumerate(rows, 1):
            if len(row) <= max(name, caption):
                raise UserError(
                    f"{path}, row {number}: expected an image and a caption, got {row}", code="pack.bad_list"
                )
            yield row[name].strip(), [row[caption]]
    except csv.Error as error:
        raise UserError(f"{path}: {error}; double a quote inside quotes", code="pack.bad_list") from error

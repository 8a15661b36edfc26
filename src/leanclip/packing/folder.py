"""A folder of images with captions beside them, or listed in a file, as a source to pack."""

import csv
import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from leanclip.data.file_source import Packable, file_identity, read_image, refuse_outside, whole_captions
from leanclip.data.source import BrokenSample
from leanclip.errors import UserError

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
LISTS = ("metadata.jsonl", "metadata.csv", "captions.jsonl", "captions.csv", "captions.tsv", "captions.txt")
NAME_KEYS = ("file_name", "image", "filename", "filepath", "path")
CAPTION_KEYS = ("caption", "text", "captions", "title")


class Folder(Packable):
    """Every image below a folder, in the order of the names.

    Captions come from a list (one of LISTS) in the folder of the image or above, else from the .txt of its name.
    An image that is listed and not there is a broken sample, not a missing one.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise UserError(f"no such folder: {self.path}")
        self._listed: dict[str, list[str]] = {}
        names: set[str] = set()
        identity = hashlib.blake2b(digest_size=16)
        for folder, below, files in os.walk(self.path, onerror=_refuse):
            below.sort()
            inside = Path(folder).relative_to(self.path)
            for file in sorted(files):
                if file in LISTS:
                    if not self._inside(Path(folder) / file):
                        raise UserError(f"{Path(folder) / file} is a link that leads out of {self.path}; remove it")
                    for name, captions in _read_list(Path(folder) / file):
                        self._listed.setdefault(str(inside / name), []).extend(captions)
                elif Path(file).suffix.lower() in IMAGE_SUFFIXES:
                    names.add(str(inside / file))
                elif Path(file).suffix != ".txt":
                    continue
                identity.update(f"{inside} {file_identity(Path(folder) / file)}\n".encode(errors="surrogateescape"))
        self._names = sorted(names | set(self._listed))
        self._identity = identity.hexdigest()
        if not self._names:
            raise UserError(f"no images in {self.path}: looked for {', '.join(IMAGE_SUFFIXES)}, in subfolders too")

    def __len__(self) -> int:
        return len(self._names)

    def image_bytes(self, index: int) -> bytes:
        name = self._names[index]
        refuse_outside(name, self.name(index))
        return read_image(self.path, name, self.name(index))

    def captions(self, index: int) -> list[str]:
        name = self._names[index]
        if name in self._listed:
            return whole_captions(self._listed[name], self.name(index))
        file = (self.path / name).with_suffix(".txt")
        if not self._inside(file):
            raise BrokenSample("escaping path", f"the caption of {self.name(index)} is a link that leads out of it")
        try:
            text = file.read_bytes().decode("utf-8")
        except UnicodeDecodeError as error:
            raise BrokenSample("encoding", f"the caption of {self.name(index)} is not UTF-8") from error
        except OSError as error:
            raise BrokenSample("no caption", f"{self.name(index)} has no .txt and is in no list") from error
        return whole_captions([text], self.name(index))

    def _inside(self, file: Path) -> bool:
        """Whether a text lies where it seems to: one of a downloaded folder may be a link to somebody's secrets."""
        return not file.is_symlink() or file.resolve().is_relative_to(self.path.resolve())

    def name(self, index: int) -> str:
        return f"{self._names[index]} in {self.path}"

    def identity(self) -> str:
        return self._identity


def _refuse(error: OSError) -> None:
    raise UserError(f"cannot read the folder {error.filename} ({error.strerror})") from error


def _read_list(path: Path) -> Iterator[tuple[str, list[str]]]:
    """The names and captions of a list, in its order; a name may come several times."""
    try:
        text = path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not text in UTF-8; convert it (iconv -t UTF-8)") from error
    rows = _json_rows(path, text) if path.suffix == ".jsonl" else _table_rows(path, text)
    for name, captions in rows:
        yield re.sub(r"#\d+$", "", name), captions  # Flickr8k numbers the captions of an image so


def _json_rows(path: Path, text: str) -> Iterator[tuple[str, list[str]]]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            name = next(str(row[key]) for key in NAME_KEYS if key in row)
            captions = next(row[key] for key in CAPTION_KEYS if key in row)
        except (ValueError, TypeError, StopIteration) as error:
            raise UserError(
                f'{path}, line {number}: expected {{"file_name": ..., "caption": ...}}, found {line[:80]}'
            ) from error
        yield name, [str(caption) for caption in (captions if isinstance(captions, list) else [captions])]


def _table_rows(path: Path, text: str) -> Iterator[tuple[str, list[str]]]:
    first = text.partition("\n")[0].strip()
    separator = "\t" if "\t" in first else ","
    rows = (row for row in csv.reader(text.splitlines(keepends=True), delimiter=separator) if row)
    header = [column.strip() for column in next(csv.reader([first], delimiter=separator), [])]
    name = next((header.index(key) for key in NAME_KEYS if key in header), None)
    caption = next((header.index(key) for key in CAPTION_KEYS if key in header), None)
    if name is not None and caption is not None:
        next(rows)
    elif path.suffix == ".txt" and separator == "\t":
        name, caption = 0, 1
    else:
        raise UserError(
            f"{path}: the first line must name the columns, {NAME_KEYS[0]} and {CAPTION_KEYS[0]} say; it is"
            f" {first[:80]!r}"
        )
    try:
        for number, row in enumerate(rows, 1):
            if len(row) <= max(name, caption):
                raise UserError(f"{path}, row {number}: expected a name and a caption, found {row}")
            yield row[name].strip(), [row[caption]]
    except csv.Error as error:
        raise UserError(f"{path}: {error}; write a quote inside quotes twice") from error

"""A folder of images, with captions in .txt files or in a list, as a source to pack."""

import hashlib
import io
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from leanclip.data.csv_table import read_rows
from leanclip.data.files import MAX_CAPTION_BYTES, is_folder, read_regular
from leanclip.data.source import BrokenSample, Packable, file_identity, kept_fields, read_image
from leanclip.errors import UserError, first_line
from leanclip.filesystem import parse_json

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
LIST_NAMES = ("metadata.jsonl", "metadata.csv", "captions.jsonl", "captions.csv", "captions.tsv", "captions.txt")
MAX_LIST_BYTES = 1 << 30
IMAGE_KEYS = ("file_name", "image", "filename", "filepath", "path")
CAPTION_KEYS = ("caption", "text", "captions", "title")


class Folder(Packable):
    """Every image below a folder, sorted by name.

    Captions come from a list (LIST_NAMES) in the folder of the image or above, else from the .txt of the same name.
    A listed image that does not exist is a broken sample.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not is_folder(path):
            raise UserError(f"no such folder: {self.path}", code="data.not_found")
        self._listed: dict[str, list[object]] = {}
        self._fields: dict[str, dict[str, Any]] = {}  # of listed images
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
                    for name, captions, fields in _read_list(path):
                        self._listed.setdefault(str(relative / name), []).extend(captions)
                        self._fields.setdefault(str(relative / name), fields)
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

    def raw_captions(self, index: int) -> list[object]:
        name = self._names[index]
        if name in self._listed:
            return self._listed[name]
        file = (self.path / name).with_suffix(".txt")
        if not self._is_inside(file):
            raise BrokenSample("escaping path", f"the caption of {self.name(index)} is a link to a file outside it")
        try:
            return [read_regular(file, MAX_CAPTION_BYTES).decode("utf-8")]
        except UnicodeDecodeError as error:
            raise BrokenSample("encoding", f"the caption of {self.name(index)} is not UTF-8") from error
        except OSError as error:
            reason = f"is in no list and has no .txt ({first_line(error)})"
            raise BrokenSample("no caption", f"{self.name(index)} {reason}") from error

    def fields(self, index: int) -> dict[str, Any]:
        return self._fields.get(self._names[index], {})

    def _is_inside(self, file: Path) -> bool:
        """A downloaded folder may contain links to private files elsewhere."""
        return not file.is_symlink() or Path(os.path.realpath(file)).is_relative_to(self.path.resolve())

    def key(self, index: int) -> str:
        return self._names[index]

    def name(self, index: int) -> str:
        return f"{self._names[index]} in {self.path}"

    def identity(self) -> str:
        return self._identity


def _refuse_unreadable(error: OSError) -> None:
    raise UserError(
        f"cannot read the folder {error.filename} ({first_line(error)})", code="data.unreadable"
    ) from error


def _read_list(path: Path) -> Iterator[tuple[str, list[object], dict[str, Any]]]:
    """Image name, captions and other fields of each row of a list; a name may occur several times."""
    number = 0
    try:
        text = read_regular(path, MAX_LIST_BYTES).decode("utf-8-sig")
        json_rows = (parse_json(line) for line in text.split("\n") if line.strip())
        for row in json_rows if path.suffix == ".jsonl" else _table_rows(path, text):
            number += 1
            if row is None:
                yield (
                    f"row {number} of {path.name}",
                    [],
                    {},
                )  # a sample without image and caption is counted as broken
                continue
            name = next(str(row[key]) for key in IMAGE_KEYS if row.get(key) is not None)
            values = [row[key] for key in CAPTION_KEYS if key in row]
            captions = next((value for value in values if value is not None), values[0])
            captions = captions if isinstance(captions, list) else [captions]
            # Flickr8k numbers the captions of an image
            yield re.sub(r"#\d+$", "", name.strip()), captions, kept_fields(row, without=(*IMAGE_KEYS, *CAPTION_KEYS))
    except OSError as error:
        raise UserError(f"cannot read {path} ({first_line(error)})", code="data.unreadable") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8; convert it (iconv -t UTF-8)", code="data.not_utf8") from error
    except (ValueError, AttributeError, IndexError, StopIteration) as error:
        raise UserError(
            f"{path}, row {max(number, 1)}: expected an image ({IMAGE_KEYS[0]}) and a caption ({CAPTION_KEYS[0]});"
            " double a quote inside quotes",
            code="pack.bad_list",
        ) from error


def _table_rows(path: Path, text: str) -> Iterator[dict[str, Any] | None]:
    """None for a row that cannot be read: a quote that is never closed, a field that is too long."""
    first = text.partition("\n")[0].strip()
    separator = "\t" if "\t" in first else ","
    rows = (fields for _, fields in read_rows(io.BytesIO(text.encode()), separator))
    header = [column.strip() for _, fields in read_rows([first.encode()], separator) for column in fields or ()]
    if set(IMAGE_KEYS) & set(header) and set(CAPTION_KEYS) & set(header):
        next(rows)
    elif path.suffix == ".txt" and separator == "\t":
        header = [IMAGE_KEYS[0], CAPTION_KEYS[0]]
    else:
        raise ValueError("no header")
    return (None if row is None else dict(zip(header, row, strict=False)) for row in rows if row != [])

"""A CSV or TSV file of image paths and captions as training data. Ids number the image paths as they first occur."""

import contextlib
import csv
import io
import posixpath
import zlib
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from leanclip.data.files import OpenFiles, stat_all
from leanclip.data.source import (
    BrokenSample,
    Manifest,
    Packable,
    file_identity,
    kept_fields,
    manifest_version,
    read_image,
)
from leanclip.errors import UserError, first_line
from leanclip.progress import ACTIVITY, progress_bar

SEPARATORS = ("\t", ",", ";", "|")
SEPARATOR_NAMES = {"\\t": "\t", "tab": "\t", "comma": ","}
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
MAX_FIELD = 1 << 17  # characters, the limit of the csv module
MAX_ROW_BYTES = 64 << 20  # of a line
PROGRESS_BYTES = 1 << 22  # between two updates of the progress bar
MIN_BAR_BYTES = 200 << 20  # a smaller file is read in less than two seconds, without a progress bar


class Table(Packable):
    """The images of a file with a header line. Rows of one image path are one sample with several captions.

    Memory holds the positions of the rows, 8 bytes each, and the rows of every sample where an image has several.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        image_key: str = "filepath",
        caption_key: str = "title",
        separator: str | None = None,
        manifest: Manifest | None = None,
        flags: str = "--csv-img-key, --csv-caption-key, --csv-separator",
    ) -> None:
        """The separator is detected from the header by default. An error for a missing column names `flags`."""
        self.path = Path(path)
        self._stat = stat_all([str(path)], str(path))[0]
        self._open = OpenFiles()
        self.version = manifest_version(manifest)
        columns, self.separator, start = _read_header(self.path, image_key, caption_key, separator, flags)
        self._columns, self._column_count = columns, len(columns)
        self._image_column, self._caption_column = columns.index(image_key), columns.index(caption_key)
        self._starts, paths, self._checksum = self._scan(start)
        self._groups = group_rows(paths) if self.version > 1 else None
        if len(self) == 0:
            raise UserError(
                f"{self.path} has a header and no rows; give one row for each image", code="data.no_samples"
            )
        if self._groups is not None:
            rows = len(self._starts) - 1
            self.notes = (f"{self.path.name}: {rows:,} rows are {len(self):,} images, some with several captions",)
        if manifest is not None and not self._starts_with(manifest, start):
            raise UserError(
                f"{self.path} has changed since the run began (rows may only be added at the end); restore it, or"
                " start a new run",
                code="data.changed",
            )

    def __len__(self) -> int:
        return len(self._starts if self._groups is None else self._groups[1]) - 1

    def image_bytes(self, index: int) -> bytes:
        return read_image(self.path.parent, self._image_path(index), self.name(index), anywhere=True)

    def image_sizes(self) -> np.ndarray:
        return np.fromiter(map(self._image_size, range(len(self))), np.int64, len(self))

    def raw_captions(self, index: int) -> list[str]:
        return [self._fields(row)[self._caption_column] for row in self._rows_of(index)]

    def field(self, index: int, key: str) -> str:
        """Of the first row of the sample."""
        if key not in self._columns:
            raise UserError(
                f"{self.path} has no column {key}; its columns are {', '.join(self._columns)[:500]}",
                code="data.missing_column",
            )
        return self._first_fields(index)[self._columns.index(key)].strip()

    def fields(self, index: int) -> dict[str, str]:
        columns = dict(zip(self._columns, map(str.strip, self._first_fields(index)), strict=True))
        return kept_fields(columns, without=(self._columns[self._image_column], self._columns[self._caption_column]))

    def file(self, index: int) -> str:
        return str(self.path)

    def name(self, index: int) -> str:
        return self._row_name(self._rows_of(index)[0])

    def key(self, index: int) -> str:
        with contextlib.suppress(BrokenSample, UserError):
            return self._image_path(index)
        return self.name(index)

    def manifest(self) -> Manifest:
        entry = {"size": int(self._starts[-1]), "count": len(self), "base": 0, "stamp": self._checksum}
        return [{"name": self.path.name} | entry | self.manifest_head()]

    def identity(self) -> str:
        return f"{file_identity(self.path)} {self._image_column} {self._caption_column} {self.separator!r}"

    def _starts_with(self, manifest: Manifest, start: int) -> bool:
        """Whether the first rows are those of the manifest. New images get new ids."""
        size = int(manifest[0]["size"])
        if len(manifest) != 1 or manifest[0]["name"] != self.path.name or not start <= size <= self._starts[-1]:
            return False
        rows = count = int(np.searchsorted(self._starts, size))
        if self._groups is not None:
            order, bounds = self._groups
            count = int(np.searchsorted(order[bounds[:-1]], rows))  # samples whose first row is one of these
        content = np.memmap(self.path, np.uint8, "r")
        added = content[size : self._starts[rows]].tobytes()  # to the last row, if it is more than a line break
        same = zlib.crc32(content[start:size].data) == manifest[0]["stamp"]
        return same and count == manifest[0]["count"] and not added.strip()

    def _scan(self, start: int) -> tuple[np.ndarray, np.ndarray, int]:
        """The start of each row and the end of the last one, a number for each image path, and a checksum."""
        starts, paths, position, checksum = array("q"), array("q"), start, 0
        folder = f"{self.path.parent.absolute()}/".encode(errors="surrogateescape").decode("latin-1")
        title, size = f"reading {self.path.name}", self._stat.size

        def lines() -> Iterator[bytes]:
            nonlocal checksum
            unreported = 0
            with (
                progress_bar(title, size, shown=size >= MIN_BAR_BYTES, unit="bytes") as progress,
                self.path.open("rb") as file,
            ):
                file.seek(start)
                while line := file.readline(MAX_ROW_BYTES):
                    if len(line) == MAX_ROW_BYTES:
                        message = f"{self.path} has a line of more than {MAX_ROW_BYTES:,} bytes; is it a table?"
                        raise UserError(message, code="data.unreadable")
                    checksum = zlib.crc32(line, checksum)
                    unreported += len(line)
                    if unreported >= PROGRESS_BYTES:
                        progress(unreported)
                        ACTIVITY.still_working()
                        unreported = 0
                    yield line

        # Bytes as characters: separators are ASCII, and a row that is not UTF-8 does not affect other rows.
        for length, fields in read_rows(lines(), self.separator, encoding="latin-1", strict=self.version > 1):
            if fields is None or fields:
                path = fields[self._image_column] if fields and len(fields) == self._column_count else ""
                # A row without a path is a sample of its own, by a negative number.
                paths.append(_path_number(path, folder) if path.strip() else -1 - len(starts))
                starts.append(position)
            position += length
        starts.append(position)
        return np.frombuffer(starts, dtype=np.int64), np.frombuffer(paths, dtype=np.int64), checksum

    def _rows_of(self, index: int) -> list[int]:
        if self._groups is None:
            return [index]
        order, bounds = self._groups
        return order[bounds[index] : bounds[index + 1]].tolist()

    def _image_size(self, index: int) -> int:
        ACTIVITY.still_working()
        with contextlib.suppress(BrokenSample, OSError, ValueError):
            return (self.path.parent / self._image_path(index)).stat().st_size
        return 0

    def _first_fields(self, index: int) -> list[str]:
        return self._fields(self._rows_of(index)[0])

    def _image_path(self, index: int) -> str:
        return self._first_fields(index)[self._image_column]

    def _row_name(self, row: int) -> str:
        return f"row {row + 1} of {self.path}"

    def _fields(self, row: int) -> list[str]:
        start, end = int(self._starts[row]), int(self._starts[row + 1])
        try:
            content = self._open.read(self._stat, start, end - start)
            rows = read_rows(io.BytesIO(content), self.separator, strict=self.version > 1)
            _, fields = next(rows)
        except OSError as error:
            raise BrokenSample("vanished", f"cannot read {self.path} ({first_line(error)})") from error
        except UnicodeDecodeError as error:
            raise BrokenSample("encoding", f"{self._row_name(row)} is not UTF-8") from error
        if fields is None:
            raise BrokenSample(
                "row",
                f"{self._row_name(row)} has a quote that is never closed, or a field of more than {MAX_FIELD:,}"
                " characters; double a quote inside quotes, and quote every field that starts with one",
            )
        if len(fields) != self._column_count:
            raise BrokenSample(
                "row",
                f"{self._row_name(row)} has {len(fields)} fields and the header {self._column_count}; put a field"
                f" that contains {self.separator!r} in double quotes",
            )
        return fields


def _read_header(
    path: Path, image_key: str, caption_key: str, separator: str | None, flags: str
) -> tuple[list[str], str, int]:
    """The columns, the separator and the position of the first row."""
    with path.open("rb") as file:
        content = file.readline(1 << 20)
    if not content.strip():
        raise UserError(f"{path} is empty; its first line must name the columns", code="data.no_samples")
    try:
        line = _parsable(content.removeprefix(BYTE_ORDER_MARK).decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8; convert it (iconv -t UTF-8)", code="data.not_utf8") from error
    if separator is not None:
        separator = SEPARATOR_NAMES.get(separator, separator)
        if len(separator) != 1 or not separator.isascii() or separator in '"\r\n':
            raise UserError(
                f"{separator!r} cannot separate columns; give one character, such as ',' or '\\t'",
                code="data.bad_separator",
            )
    headers: dict[str, list[str]] = {}
    for candidate in SEPARATORS if separator is None else (separator,):
        columns = [column.strip() for column in _parse([line], candidate, strict=False) or []]
        if image_key in columns and caption_key in columns:
            return columns, candidate, len(content)
        headers[candidate] = columns
    likeliest = max(headers, key=lambda candidate: len(headers[candidate]))
    missing = " and no ".join(key for key in (image_key, caption_key) if key not in headers[likeliest])
    raise UserError(
        f"{path} has no column {missing}; separated by {likeliest!r} its columns are"
        f" {', '.join(headers[likeliest])[:500]} (name yours with {flags})",
        code="data.missing_column",
    )


def group_rows(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """The rows sorted by sample, and where each sample begins. Equal numbers are one sample; samples are in the order
    of their first rows. None if every row is a sample."""
    if (np.diff(np.sort(numbers)) != 0).all():
        return None
    _, first, group = np.unique(numbers, return_index=True, return_inverse=True)
    samples = np.argsort(np.argsort(first))[group]
    return np.argsort(samples, kind="stable"), np.concatenate([[0], np.cumsum(np.bincount(samples))])


def _path_number(path: str, folder: str) -> int:
    """A number of 63 bits for the path of an image, the same for other spellings of it."""
    if "//" in path or "./" in path:
        path = posixpath.normpath(path)
    return hash(path.removeprefix(folder)) & 0x7FFF_FFFF_FFFF_FFFF


def read_rows(
    lines: Iterable[bytes], separator: str, *, encoding: str = "utf-8", strict: bool = True
) -> Iterator[tuple[int, list[str] | None]]:
    """The length in bytes and the fields of every row. Quoted fields may contain line breaks.

    The fields are None if a quote is never closed or a field is too long. Such a row ends with its first line: it
    takes no other row with it. Without `strict`, the text up to the next quote is a field, even of many rows.
    """
    source, again, taken = iter(lines), deque[bytes](), list[bytes]()

    def take() -> Iterator[str]:
        while (line := again.popleft() if again else next(source, None)) is not None:
            taken.append(line)
            yield _parsable(line.decode(encoding))
        taken.append(b"")  # the end

    while (line := again.popleft() if again else next(source, None)) is not None:
        if b'"' not in line and len(line) <= MAX_FIELD:
            text = _parsable(line.decode(encoding)).removesuffix("\n")
            yield len(line), text.split(separator) if text else []
            continue
        again.appendleft(line)
        taken.clear()
        fields = _parse(take(), separator, strict=strict)
        if fields is None:
            if len(taken) == 1:  # text behind a closing quote
                fields = _parse([_parsable(line.decode(encoding))], separator, strict=False)
            again.extendleft(other for other in reversed(taken[1:]) if other)
            del taken[1:]
        yield sum(map(len, taken)), fields


def _parse(lines: Iterable[str], separator: str, *, strict: bool) -> list[str] | None:
    """The fields of the first row; None if it is not valid."""
    try:
        return next(csv.reader(lines, delimiter=separator, strict=strict), [])  # it reads no line ahead
    except csv.Error:
        return None


def _parsable(text: str) -> str:
    """Replace characters that the csv module of Python 3.10 refuses."""
    if "\r" in text or "\0" in text:
        return text.replace("\r\n", "\n").replace("\r", " ").replace("\0", "\ufffd")
    return text

"""A CSV or TSV file of image paths and captions as training data. The id of a sample is the number of its row."""

import csv
import zlib
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from leanclip.data.file_source import Packable, file_identity, read_image, whole_captions
from leanclip.data.files import OpenFiles, stat_all
from leanclip.data.shards import Manifest
from leanclip.data.source import BrokenSample
from leanclip.errors import UserError
from leanclip.progress import ACTIVITY, progress_bar

SEPARATORS = ("\t", ",", ";", "|")
SPOKEN_SEPARATORS = {"\\t": "\t", "tab": "\t", "comma": ","}
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
REPORT_EVERY = 1 << 22  # bytes
LONG_BYTES = 200 << 20  # about two seconds


class Table(Packable):
    """The rows of a file with a header line. Only the rows' positions are kept: 8 bytes a sample."""

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
        """Without a separator, the one that gives the header both columns. A run's manifest must still hold.

        `flags` are those that name the columns, for the complaint where they are others.
        """
        self.path = Path(path)
        if not self.path.is_file():
            raise UserError(f"no such file: {self.path}; give a CSV or TSV file with a header line")
        self._stat = stat_all([str(path)], str(path))[0]
        self._open = OpenFiles()
        columns, self.separator, start = _read_header(self.path, image_key, caption_key, separator, flags)
        self._columns = len(columns)
        self._image, self._caption = columns.index(image_key), columns.index(caption_key)
        size = self._stat.size
        with progress_bar(f"reading {self.path.name}", size, shown=size >= LONG_BYTES, unit="bytes") as progress:
            self._starts, self._stamp = _scan(self.path, start, self.separator, progress)
        if len(self) == 0:
            raise UserError(f"{self.path} has a header and no rows; give one row for each image")
        if manifest is not None and not self._continues(manifest, start):
            raise UserError(
                f"{self.path} is not what the run was trained on, with or without new rows at the end: restore it, or"
                " start a new run"
            )

    def __len__(self) -> int:
        return len(self._starts) - 1

    def image_bytes(self, index: int) -> bytes:
        return read_image(self.path.parent, self._row(index)[self._image], self.name(index))

    def captions(self, index: int) -> list[str]:
        return whole_captions([self._row(index)[self._caption]], self.name(index))

    def name(self, index: int) -> str:
        return f"row {index + 1} of {self.path}"

    def manifest(self) -> Manifest:
        size = int(self._starts[-1])
        return [{"name": self.path.name, "size": size, "count": len(self), "base": 0, "stamp": self._stamp}]

    def identity(self) -> str:
        return f"{file_identity(self.path)} {self._image} {self._caption} {self.separator!r}"

    def _continues(self, manifest: Manifest, start: int) -> bool:
        """Whether the rows of a run are still the first ones here. New rows get new ids."""
        if len(manifest) != 1 or manifest[0]["name"] != self.path.name:
            return False
        size, count = int(manifest[0]["size"]), int(manifest[0]["count"])
        if count > len(self) or int(self._starts[count]) < size:
            return False
        with self.path.open("rb") as file:
            file.seek(start)
            checksum, left = 0, size - start
            while left > 0 and (piece := file.read(min(left, REPORT_EVERY))):
                checksum, left = zlib.crc32(piece, checksum), left - len(piece)
        return checksum == manifest[0]["stamp"]

    def _row(self, index: int) -> list[str]:
        start, end = int(self._starts[index]), int(self._starts[index + 1])
        try:
            content = self._open.read(self._stat, start, end - start)
        except OSError as error:
            raise BrokenSample("vanished", f"cannot read {self.path} ({error.strerror or error})") from error
        try:
            row = next(csv.reader([_plain(content.decode("utf-8"))], delimiter=self.separator), [])
        except UnicodeDecodeError as error:
            raise BrokenSample("encoding", f"{self.name(index)} is not UTF-8") from error
        except csv.Error as error:
            raise BrokenSample("row", f"{self.name(index)}: {error}") from error
        if len(row) != self._columns:
            raise BrokenSample(
                "row",
                f"{self.name(index)} has {len(row)} fields and the header {self._columns}; a field that holds"
                f" {self.separator!r} must stand in double quotes",
            )
        return row


def _read_header(
    path: Path, image_key: str, caption_key: str, separator: str | None, flags: str
) -> tuple[list[str], str, int]:
    """The columns, the separator and where the rows start."""
    with path.open("rb") as file:
        content = file.readline(1 << 20)
    if not content.strip():
        raise UserError(f"{path} is empty; its first line must name the columns")
    try:
        line = _plain(content.removeprefix(BYTE_ORDER_MARK).decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not text in UTF-8; convert it (iconv -t UTF-8)") from error
    if separator is not None:
        separator = SPOKEN_SEPARATORS.get(separator, separator)
        if len(separator) != 1 or not separator.isascii() or separator in '"\r\n':
            raise UserError(f"{separator!r} cannot separate columns; give one character, such as ',' or '\\t'")
    found: dict[str, list[str]] = {}
    for candidate in SEPARATORS if separator is None else (separator,):
        columns = [column.strip() for column in next(csv.reader([line], delimiter=candidate), [])]
        if image_key in columns and caption_key in columns:
            return columns, candidate, len(content)
        found[candidate] = columns
    likeliest = max(found, key=lambda candidate: len(found[candidate]))
    missing = " and no ".join(key for key in (image_key, caption_key) if key not in found[likeliest])
    raise UserError(
        f"{path} has no column {missing}; separated by {likeliest!r} its columns are"
        f" {', '.join(found[likeliest])[:500]} (name yours with {flags})"
    )


def _scan(path: Path, start: int, separator: str, progress: Callable[[int], None]) -> tuple[np.ndarray, int]:
    """Where each row starts, then where the last one ends; and a checksum. Quoted fields may hold line breaks."""
    starts = array("q")
    position = begin = reported = start
    checksum = 0

    def lines() -> Iterator[str]:
        """Bytes as characters: what splits rows is ASCII, and a row that is not UTF-8 costs only itself."""
        nonlocal position, reported, checksum
        with path.open("rb") as file:
            file.seek(start)
            for line in file:
                position += len(line)
                checksum = zlib.crc32(line, checksum)
                if position - reported >= REPORT_EVERY:
                    progress(position - reported)
                    ACTIVITY.still_working()
                    reported = position
                yield _plain(line.decode("latin-1"))
        if begin < position:
            raise csv.Error("a quote that is never closed")

    try:
        for row in csv.reader(lines(), delimiter=separator):  # asks for a line only when it needs one
            if row:
                starts.append(begin)
            begin = position
    except csv.Error as error:
        raise UserError(
            f"{path}, row {len(starts) + 1}: {error}; write a quote inside quotes twice, and quote every field that"
            " starts with one"
        ) from error
    starts.append(position)
    return np.frombuffer(starts, dtype=np.int64), checksum


def _plain(text: str) -> str:
    """Without the characters for which csv (of Python 3.10) refuses a whole file."""
    return text.replace("\r\n", "\n").replace("\r", " ").replace("\0", "\ufffd")

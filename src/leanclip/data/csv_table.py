"""A CSV or TSV file of image paths and captions as training data. The id of a sample is its row number."""

import csv
import zlib
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from leanclip.data.files import OpenFiles, stat_all
from leanclip.data.source import BrokenSample, Manifest, Packable, clean_captions, file_identity, read_image
from leanclip.errors import UserError, first_line
from leanclip.progress import ACTIVITY, progress_bar

SEPARATORS = ("\t", ",", ";", "|")
SEPARATOR_NAMES = {"\\t": "\t", "tab": "\t", "comma": ","}
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
PROGRESS_BYTES = 1 << 22  # between two updates of the progress bar
MIN_BAR_BYTES = 200 << 20  # a smaller file is read in less than two seconds, without a progress bar


class Table(Packable):
    """The rows of a file with a header line. Memory holds only the positions of the rows, 8 bytes per sample."""

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
        columns, self.separator, start = _read_header(self.path, image_key, caption_key, separator, flags)
        self._column_count = len(columns)
        self._image_column, self._caption_column = columns.index(image_key), columns.index(caption_key)
        size = self._stat.size
        with progress_bar(f"reading {self.path.name}", size, shown=size >= MIN_BAR_BYTES, unit="bytes") as progress:
            self._starts, self._checksum = _scan(self.path, start, self.separator, progress)
        if len(self) == 0:
            raise UserError(
                f"{self.path} has a header and no rows; give one row for each image", code="data.no_samples"
            )
        if manifest is not None and not self._starts_with(manifest, start):
            raise UserError(
                f"{self.path} has changed since the run began (rows may only be added at the end); restore it, or"
                " start a new run",
                code="data.changed",
            )

    def __len__(self) -> int:
        return len(self._starts) - 1

    def image_bytes(self, index: int) -> bytes:
        return read_image(self.path.parent, self._row(index)[self._image_column], self.name(index), anywhere=True)

    def captions(self, index: int) -> list[str]:
        return clean_captions([self._row(index)[self._caption_column]], self.name(index))

    def name(self, index: int) -> str:
        return f"row {index + 1} of {self.path}"

    def manifest(self) -> Manifest:
        size = int(self._starts[-1])
        return [{"name": self.path.name, "size": size, "count": len(self), "base": 0, "stamp": self._checksum}]

    def identity(self) -> str:
        return f"{file_identity(self.path)} {self._image_column} {self._caption_column} {self.separator!r}"

    def _starts_with(self, manifest: Manifest, start: int) -> bool:
        """Whether the first rows are those of the manifest. New rows get new ids."""
        if len(manifest) != 1 or manifest[0]["name"] != self.path.name:
            return False
        size, count = int(manifest[0]["size"]), int(manifest[0]["count"])
        if count > len(self) or int(self._starts[count]) < size:
            return False
        return zlib.crc32(np.memmap(self.path, np.uint8, "r")[start:size].data) == manifest[0]["stamp"]

    def _row(self, index: int) -> list[str]:
        start, end = int(self._starts[index]), int(self._starts[index + 1])
        try:
            content = self._open.read(self._stat, start, end - start)
        except OSError as error:
            raise BrokenSample("vanished", f"cannot read {self.path} ({first_line(error)})") from error
        try:
            row = next(csv.reader([_parsable(content.decode("utf-8"))], delimiter=self.separator), [])
        except UnicodeDecodeError as error:
            raise BrokenSample("encoding", f"{self.name(index)} is not UTF-8") from error
        except csv.Error as error:
            raise BrokenSample("row", f"{self.name(index)}: {error}") from error
        if len(row) != self._column_count:
            raise BrokenSample(
                "row",
                f"{self.name(index)} has {len(row)} fields and the header {self._column_count}; put a field that"
                f" contains {self.separator!r} in double quotes",
            )
        return row


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
        columns = [column.strip() for column in next(csv.reader([line], delimiter=candidate), [])]
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


def _scan(path: Path, start: int, separator: str, progress: Callable[[int], None]) -> tuple[np.ndarray, int]:
    """The start of each row and the end of the last one; and a checksum. Quoted fields may contain line breaks."""
    starts = array("q")
    position = row_start = reported = start
    checksum = 0

    def lines() -> Iterator[str]:
        """Bytes as characters: separators are ASCII, and a row that is not UTF-8 does not affect other rows."""
        nonlocal position, reported, checksum
        with path.open("rb") as file:
            file.seek(start)
            for line in file:
                position += len(line)
                checksum = zlib.crc32(line, checksum)
                if position - reported >= PROGRESS_BYTES:
                    progress(position - reported)
                    ACTIVITY.still_working()
                    reported = position
                yield _parsable(line.decode("latin-1"))
        if row_start < position:
            raise csv.Error("a quote is never closed")

    try:
        for row in csv.reader(lines(), delimiter=separator):  # it reads no line ahead
            if row:
                starts.append(row_start)
            row_start = position
    except csv.Error as error:
        raise UserError(
            f"{path}, row {len(starts) + 1}: {error}; double a quote inside quotes, and quote every field that starts"
            " with one",
            code="data.bad_row",
        ) from error
    starts.append(position)
    return np.frombuffer(starts, dtype=np.int64), checksum


def _parsable(text: str) -> str:
    """Replace characters that the csv module of Python 3.10 refuses."""
    return text.replace("\r\n", "\n").replace("\r", " ").replace("\0", "\ufffd")

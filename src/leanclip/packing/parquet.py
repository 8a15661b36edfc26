"""Parquet files with image bytes or paths as a source to pack. The only module that imports pyarrow."""

import contextlib
import hashlib
import posixpath
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from leanclip.data.csv_table import MIN_BAR_BYTES, group_rows
from leanclip.data.files import expand, stat_all
from leanclip.data.source import (
    MAX_FIELDS,
    BrokenSample,
    Packable,
    file_identity,
    kept_fields,
    read_image,
)
from leanclip.errors import UserError, first_line
from leanclip.progress import progress_bar

IMAGE_KEYS = ("image", "jpg", "img", "image_bytes", "bytes", "filepath", "image_path", "file_name", "path")
CAPTION_KEYS = ("caption", "captions", "text", "txt", "title")
ROWS_PER_READ = 32


class Parquet(Packable):
    """The images of one or several files. Rows of one path, or of the same bytes, are one sample with several
    captions. Sequential reads are fast; a step back reads its row group from the start.

    The image column holds bytes, paths, or Hugging Face's {"bytes", "path"}; the caption column a string or a list.
    Memory holds a number for each image and, of an image with several rows, the captions of all but the first.
    """

    def __init__(self, pattern: str | Path, *, image_key: str | None = None, caption_key: str | None = None) -> None:
        """Without keys, the first of IMAGE_KEYS and CAPTION_KEYS that the first file has."""
        files = stat_all(expand(str(pattern), ending=".parquet"), str(pattern))
        self.paths = [Path(file.path) for file in files]
        self._groups: list[tuple[int, int]] = []  # file, row group
        self._others: list[list[str]] = []  # of each file, the columns of metadata
        ends = [0]
        for number, path in enumerate(self.paths):
            with _open(path) as file:
                image_key = _column(path, file, "image", image_key, IMAGE_KEYS)
                caption_key = _column(path, file, "caption", caption_key, CAPTION_KEYS)
                self._others.append(_metadata_columns(file, (image_key, caption_key)))
                for group in range(file.num_row_groups):
                    self._groups.append((number, group))
                    ends.append(ends[-1] + _row_count(path, file, group))
        if not ends[-1]:
            raise UserError(f"no rows in {pattern}", code="data.no_samples")
        assert image_key is not None and caption_key is not None
        self._columns = (image_key, caption_key)
        self._starts = np.asarray(ends)
        self._cursor = _Cursor()
        self._first: np.ndarray | None = None  # rows, by sample; None if every row is one
        self._later: dict[int, list[Any]] = {}  # captions in further rows, by sample
        self._join_rows(sum(file.size for file in files))

    def __len__(self) -> int:
        return int(self._starts[-1]) if self._first is None else len(self._first)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_cursor": _Cursor()}

    def image_bytes(self, index: int) -> bytes:
        image = _bytes_or_path(self._read(index)[0])
        if image and isinstance(image, bytes):
            return image
        if image and not isinstance(image, str):
            value = f"{self._columns[0]} holds a value of type {type(image).__name__}"
            raise BrokenSample("image", f"{self.name(index)}: {value}, not an image or a path")
        return read_image(self.paths[self._location(index)[0]].parent, image or "", self.name(index))

    def raw_captions(self, index: int) -> list[object]:
        values = [self._read(index)[1], *self._later.get(index, ())]
        captions = [caption for value in values for caption in (value if isinstance(value, list) else [value])]
        try:
            return [caption.decode("utf-8") if isinstance(caption, bytes) else caption for caption in captions]
        except UnicodeDecodeError as error:
            raise BrokenSample("encoding", f"the caption of {self.name(index)} is not UTF-8") from error

    def fields(self, index: int) -> dict[str, Any]:
        return kept_fields(self._read(index)[2], without=self._columns)

    def name(self, index: int) -> str:
        file, row = self._location(index)
        return f"row {row + 1} of {self.paths[file]}"

    def identity(self) -> str:
        return "\n".join([*map(file_identity, self.paths), *self._columns])

    def _join_rows(self, size: int) -> None:
        """Find the rows of one image. That reads all images once: a hash of each takes less than to decode it."""
        rows = int(self._starts[-1])
        numbers = np.arange(-rows, 0)  # a row without an image, or that cannot be read, is a sample of its own
        title = f"reading {self.paths[0].name}" + (" and others" if len(self.paths) > 1 else "")
        with progress_bar(title, rows, shown=size >= MIN_BAR_BYTES) as progress:
            for group, start in enumerate(self._starts[:-1].tolist()):
                folder = self.paths[self._groups[group][0]].parent
                with contextlib.suppress(Exception):  # a damaged row group: its samples are counted as broken
                    for done, (value,) in enumerate(self._rows(group, self._columns[:1]), start + 1):
                        if image := _bytes_or_path(value):
                            numbers[done - 1] = _image_number(image, folder)
                        if done % ROWS_PER_READ == 0:
                            progress(ROWS_PER_READ)
        groups = group_rows(numbers)
        if groups is None:
            return
        order, bounds = groups
        self._first = order[bounds[:-1]]
        samples = np.repeat(np.arange(len(self._first)), np.diff(bounds))
        further = np.ones(rows, bool)
        further[bounds[:-1]] = False
        sample_of = dict(zip(order[further].tolist(), samples[further].tolist(), strict=True))
        for group, start in enumerate(self._starts[:-1].tolist()):
            with contextlib.suppress(Exception):
                for row, (caption,) in enumerate(self._rows(group, self._columns[1:]), start):
                    if row in sample_of:
                        self._later.setdefault(sample_of[row], []).append(caption)
        self.notes = (f"{rows:,} rows are {len(self):,} images, some with several captions",)

    def _row(self, index: int) -> int:
        return index if self._first is None else int(self._first[index])

    def _location(self, index: int) -> tuple[int, int]:
        """The file of a sample, and its first row number in the file."""
        row = self._row(index)
        number = self._group(row)
        file, group = self._groups[number]
        return file, row - int(self._starts[number - group])

    def _group(self, row: int) -> int:
        return int(np.searchsorted(self._starts, row, side="right")) - 1

    def _read(self, index: int) -> tuple[Any, Any, dict[str, Any]]:
        """The image, the caption and the metadata of a sample's first row."""
        cursor, row = self._cursor, self._row(index)
        group = self._group(row)
        if row != cursor.index:
            if group != cursor.group or row < cursor.next_index:
                columns = (*self._columns, *self._others[self._groups[group][0]])
                cursor.rows, cursor.group = self._rows(group, columns), group
                cursor.columns, cursor.next_index = columns[2:], int(self._starts[group])
            try:
                cursor.row = next(islice(cursor.rows, row - cursor.next_index, None))
            except Exception as error:  # a damaged file may state any size and type
                raise BrokenSample("row", f"{self.name(index)} cannot be read ({first_line(error)})") from error
            cursor.index, cursor.next_index = row, row + 1
        image, caption, *others = cursor.row
        return image, caption, dict(zip(cursor.columns, others, strict=True))

    def _rows(self, number: int, columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        """The rows of a row group, read in small batches: one group may hold many gigabytes."""
        file_number, group = self._groups[number]
        names = list(columns)
        with _open(self.paths[file_number]) as file:
            for batch in file.iter_batches(ROWS_PER_READ, row_groups=[group], columns=names, use_threads=False):
                yield from zip(*(map(_as_python, batch.column(name)) for name in names), strict=True)


class _Cursor:
    """The last row that was read, and the rows of its row group that follow."""

    rows: Iterator[tuple[Any, ...]] = iter(())
    row: tuple[Any, ...] = (None, None)
    columns: Sequence[str] = ()  # of the row's values behind image and caption
    group = index = next_index = -1


def _bytes_or_path(image: Any) -> Any:
    return image.get("bytes") or image.get("path") if isinstance(image, dict) else image


def _image_number(image: Any, folder: Path) -> int:
    """Equal for equal bytes and for equal paths, which count from the folder; 63 bits."""
    if isinstance(image, str):
        image = posixpath.normpath(f"{folder}/{image}")
    content = image if isinstance(image, bytes) else repr(image).encode("utf-8", errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") >> 1


def _as_python(value: Any) -> Any:
    """A value of pyarrow; a string that is not UTF-8 as bytes."""
    try:
        return value.as_py()
    except UnicodeDecodeError:
        return value.as_buffer().to_pybytes()


def _open(path: Path) -> Any:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise UserError(
            "parquet files need pyarrow; install it: pip install 'leanclip[parquet]'", code="pack.no_pyarrow"
        ) from error
    try:
        return parquet.ParquetFile(path, buffer_size=1 << 20)
    except Exception as error:  # a damaged file may state any size and type
        raise UserError(f"{path} is not a parquet file ({first_line(error)})", code="pack.not_parquet") from error


def _row_count(path: Path, file: Any, group: int) -> int:
    """As the footer states, which cannot be true where a row has less than a bit."""
    rows = int(file.metadata.row_group(group).num_rows)
    if not 0 <= rows <= 8 * path.stat().st_size:
        message = f"{path} states {rows:,} rows in {path.stat().st_size:,} bytes: it is damaged"
        raise UserError(message, code="pack.not_parquet")
    return rows


def _metadata_columns(file: Any, taken: tuple[str, str]) -> list[str]:
    """Columns of numbers, booleans and strings; of equal names none, since pyarrow cannot tell them apart."""
    schema = file.schema_arrow
    simple = ("int", "uint", "float", "double", "half", "bool", "string", "large_string")
    names = [entry.name for entry in schema if str(entry.type).startswith(simple) and entry.name not in taken]
    return [name for name in names if schema.names.count(name) == 1][:MAX_FIELDS]


def _column(path: Path, file: Any, content: str, key: str | None, default_keys: tuple[str, ...]) -> str:
    names: list[str] = file.schema_arrow.names
    for name in default_keys if key is None else (key,):
        if name in names:
            return name
    missing = f"no {content} column" if key is None else f"no column {key}"
    raise UserError(
        f"{path} has {missing}; its columns are {', '.join(names)[:500]} (name yours with --{content}-key)",
        code="data.missing_column",
    )

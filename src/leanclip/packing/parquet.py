"""Parquet files with image bytes or paths as a source to pack. The only module that imports pyarrow."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from leanclip.data.files import expand, stat_all
from leanclip.data.source import BrokenSample, Packable, clean_captions, file_identity, read_image
from leanclip.errors import UserError, first_line

IMAGE_KEYS = ("image", "jpg", "img", "image_bytes", "bytes", "filepath", "image_path", "file_name", "path")
CAPTION_KEYS = ("caption", "captions", "text", "txt", "title")
ROWS_PER_READ = 32


class Parquet(Packable):
    """The rows of one or several files. Sequential reads are fast; a step back reads its row group from the start.

    The image column holds bytes, paths, or Hugging Face's {"bytes", "path"}; the caption column a string or a list.
    """

    def __init__(self, pattern: str | Path, *, image_key: str | None = None, caption_key: str | None = None) -> None:
        """Without keys, the first of IMAGE_KEYS and CAPTION_KEYS that the first file has."""
        files = stat_all(expand(str(pattern), ending=".parquet"), str(pattern))
        self.paths = [Path(file.path) for file in files]
        self._groups: list[tuple[int, int]] = []  # file, row group
        ends = [0]
        for number, path in enumerate(self.paths):
            with _open(path) as file:
                image_key = _column(path, file, "image", image_key, IMAGE_KEYS)
                caption_key = _column(path, file, "caption", caption_key, CAPTION_KEYS)
                for group in range(file.num_row_groups):
                    self._groups.append((number, group))
                    ends.append(ends[-1] + file.metadata.row_group(group).num_rows)
        if not ends[-1]:
            raise UserError(f"no rows in {pattern}", code="data.no_samples")
        assert image_key is not None and caption_key is not None
        self._columns = (image_key, caption_key)
        self._starts = np.asarray(ends)
        self._cursor = _Cursor()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_cursor": _Cursor()}

    def image_bytes(self, index: int) -> bytes:
        image = self._read(index)[0]
        if isinstance(image, dict):
            image = image.get("bytes") or image.get("path")
        if image and isinstance(image, bytes):
            return image
        if image and not isinstance(image, str):
            value = f"{self._columns[0]} holds a value of type {type(image).__name__}"
            raise BrokenSample("image", f"{self.name(index)}: {value}, not an image or a path")
        return read_image(self.paths[self._location(index)[0]].parent, image or "", self.name(index))

    def captions(self, index: int) -> list[str]:
        value = self._read(index)[1]
        captions = value if isinstance(value, list) else [value]
        try:
            texts = [caption.decode("utf-8") if isinstance(caption, bytes) else caption for caption in captions]
        except UnicodeDecodeError as error:
            raise BrokenSample("encoding", f"the caption of {self.name(index)} is not UTF-8") from error
        return clean_captions(texts, self.name(index))

    def name(self, index: int) -> str:
        file, row = self._location(index)
        return f"row {row + 1} of {self.paths[file]}"

    def identity(self) -> str:
        return "\n".join([*map(file_identity, self.paths), *self._columns])

    def _location(self, index: int) -> tuple[int, int]:
        """The file of a row, and the row number in the file."""
        number = self._group(index)
        file, group = self._groups[number]
        return file, index - int(self._starts[number - group])

    def _group(self, index: int) -> int:
        return int(np.searchsorted(self._starts, index, side="right")) - 1

    def _read(self, index: int) -> tuple[Any, Any]:
        """The image and the caption of a row."""
        cursor, group = self._cursor, self._group(index)
        if index == cursor.index:
            return cursor.row
        if group != cursor.group or index < cursor.next_index:
            cursor.rows, cursor.group, cursor.next_index = self._rows(group), group, int(self._starts[group])
        try:
            cursor.row = next(islice(cursor.rows, index - cursor.next_index, None))
        except Exception as error:  # a damaged file may state any size and type
            raise BrokenSample("row", f"{self.name(index)} cannot be read ({first_line(error)})") from error
        cursor.index, cursor.next_index = index, index + 1
        return cursor.row

    def _rows(self, number: int) -> Iterator[tuple[Any, Any]]:
        """The rows of a row group, read in small batches: one group may hold many gigabytes."""
        file_number, group = self._groups[number]
        columns = list(self._columns)
        with _open(self.paths[file_number]) as file:
            for batch in file.iter_batches(ROWS_PER_READ, row_groups=[group], columns=columns, use_threads=False):
                yield from zip(*(map(_as_python, batch.column(name)) for name in columns), strict=True)


class _Cursor:
    """The last row that was read, and the rows of its row group that follow."""

    rows: Iterator[tuple[Any, Any]] = iter(())
    row: tuple[Any, Any] = (None, None)
    group = index = next_index = -1


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

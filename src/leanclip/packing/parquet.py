"""Parquet files with image bytes or paths as a source to pack. The only module that imports pyarrow."""

import glob
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from leanclip.data.file_source import Packable, file_identity, read_image, refuse_outside, whole_captions
from leanclip.data.source import BrokenSample
from leanclip.errors import UserError

IMAGE_KEYS = ("image", "jpg", "img", "image_bytes", "bytes", "filepath", "image_path", "file_name", "path")
CAPTION_KEYS = ("caption", "captions", "text", "txt", "title")
BATCH = 32  # rows decoded at a time


class Parquet(Packable):
    """The rows of one or several files, meant to be read in order: going back starts a row group again.

    The image column holds bytes, paths, or Hugging Face's {"bytes", "path"}; the caption column a text or a list.
    """

    def __init__(self, pattern: str | Path, *, image_key: str | None = None, caption_key: str | None = None) -> None:
        """Without keys, the first usual name that the first file has."""
        self.paths = _expand(str(pattern))
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
            raise UserError(f"no rows in {pattern}")
        assert image_key is not None and caption_key is not None
        self._columns = (image_key, caption_key)
        self._starts = np.asarray(ends)
        self._rewind()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        for name in ("_reader", "_at", "_next", "_index", "_row"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._rewind()

    def image_bytes(self, index: int) -> bytes:
        image, path = self._read(index)[0].as_py(), None
        if isinstance(image, dict):
            image, path = image.get("bytes"), image.get("path")
        if isinstance(image, str):
            image, path = None, image
        if image:
            return bytes(image)
        refuse_outside(path or "", self.name(index))
        return read_image(self.paths[self._place(index)[0]].parent, path or "", self.name(index))

    def captions(self, index: int) -> list[str]:
        try:
            found = self._read(index)[1].as_py()
            captions = [caption for caption in (found if isinstance(found, list) else [found]) if caption is not None]
            texts = [caption.decode("utf-8") if isinstance(caption, bytes) else str(caption) for caption in captions]
        except UnicodeDecodeError as error:
            raise BrokenSample("encoding", f"the caption of {self.name(index)} is not UTF-8") from error
        return whole_captions(texts, self.name(index))

    def name(self, index: int) -> str:
        file, row = self._place(index)
        return f"row {row + 1} of {self.paths[file]}"

    def identity(self) -> str:
        return "\n".join([*map(file_identity, self.paths), *self._columns])

    def _place(self, index: int) -> tuple[int, int]:
        """The file of a row, and its number there."""
        at = self._group(index)
        file, group = self._groups[at]
        return file, index - int(self._starts[at - group])

    def _group(self, index: int) -> int:
        return int(np.searchsorted(self._starts, index, side="right")) - 1

    def _rewind(self) -> None:
        self._reader: Iterator[tuple[Any, Any]] = iter(())
        self._at = self._next = self._index = -1
        self._row: tuple[Any, Any] = (None, None)

    def _read(self, index: int) -> tuple[Any, Any]:
        """The image and the caption of a row, as pyarrow's scalars."""
        if index == self._index:
            return self._row
        at = self._group(index)
        if at != self._at or index < self._next:
            self._reader, self._at, self._next = self._rows(at), at, int(self._starts[at])
        try:
            self._row = next(islice(self._reader, index - self._next, None))
        except (OSError, ValueError, StopIteration) as error:  # pyarrow's errors are of the first two
            raise BrokenSample("row", f"{self.name(index)} cannot be read ({error})") from error
        self._index, self._next = index, index + 1
        return self._row

    def _rows(self, at: int) -> Iterator[tuple[Any, Any]]:
        """The rows of a row group, a few at a time: some writers make one group of many gigabytes."""
        number, group = self._groups[at]
        with _open(self.paths[number]) as file:
            for batch in file.iter_batches(BATCH, row_groups=[group], columns=list(self._columns), use_threads=False):
                yield from zip(*(batch.column(name) for name in self._columns), strict=True)


def _open(path: Path) -> Any:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise UserError("parquet files need pyarrow; install it: pip install 'leanclip[parquet]'") from error
    try:
        return parquet.ParquetFile(path, buffer_size=1 << 20)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not a parquet file ({error})") from error


def _column(path: Path, file: Any, what: str, key: str | None, usual: tuple[str, ...]) -> str:
    names: list[str] = file.schema_arrow.names
    found = next((name for name in (usual if key is None else (key,)) if name in names), None)
    if found is None:
        missing = f"no {what} column that is known" if key is None else f"no column {key}"
        raise UserError(f"{path} has {missing}; its columns are {', '.join(names)[:500]} (give --{what}-key)")
    return found


def _expand(pattern: str) -> list[Path]:
    path = Path(pattern)
    found = sorted(path.glob("*.parquet")) if path.is_dir() else [Path(name) for name in sorted(glob.glob(pattern))]
    if not found and path.is_file():
        found = [path]  # its own name reads as a pattern
    if not found:
        raise UserError(f"no such file: {pattern}; give a .parquet file, a folder of them or a quoted pattern")
    return found

"""The table of suspects: which pairs it lists, worst first, and how it is written."""

import contextlib
import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from leanclip.data import BrokenSample, Source
from leanclip.errors import UserError
from leanclip.filesystem import atomic_path, check_target, writing
from leanclip.suspects.scores import Scores

ROWS_AT_ONCE = 1 << 18  # read from the data in the order of their ids, which is the order on the disk
SUFFIXES = (".csv", ".parquet")


class Suspect(NamedTuple):
    """A row of the table."""

    rank: int  # from 1, the worst
    id: int  # of the sample in the run
    key: str
    shard: str
    caption: str  # several are separated by " | "
    score: float
    probability: float  # of being wrong
    numbers: str  # of the caption or captions among those of the sample, from 0; "": the row is about all of them


def worst_first(scores: Scores, *, least: int, rows: int | None = None) -> np.ndarray:
    """Positions of the pairs to list: those that are more likely wrong than right, at least `least`; or `rows`."""
    ids = np.flatnonzero(scores.scored)
    if rows is None:
        rows = max(least, int((scores.probability[ids] > 0.5).sum()))
    values, rows = scores.score[ids], min(rows, len(ids))
    if rows < len(ids):
        chosen = np.argpartition(-values, rows - 1)[:rows] if rows else np.zeros(0, np.int64)
        ids, values = ids[chosen], values[chosen]
    return ids[np.lexsort((ids, -values))]


def suspects(source: Source, scores: Scores, ids: np.ndarray) -> Iterator[Suspect]:
    """The rows for these positions, in their order."""
    for start in range(0, len(ids), ROWS_AT_ONCE):
        block = ids[start : start + ROWS_AT_ONCE]
        texts = {position: _texts(source, position, scores.captions) for position in np.sort(block).tolist()}
        for rank, position in enumerate(block.tolist(), start + 1):
            key, shard, caption, numbers = texts[position]
            score, probability = float(scores.score[position]), float(scores.probability[position])
            yield Suspect(rank, position // scores.captions, key, shard, caption, score, probability, numbers)


def _texts(source: Source, position: int, columns: int) -> tuple[str, str, str, str]:
    """Key, shard, captions and their numbers."""
    index, column = divmod(position, columns)
    captions: list[str] = []  # of a sample that is broken now
    with contextlib.suppress(BrokenSample):
        captions = source.captions(index)[column::columns]
    numbers = range(column, column + columns * len(captions), columns) if columns > 1 else ()
    texts = source.key(index), source.file(index), " | ".join(captions), " ".join(map(str, numbers))
    key, shard, caption, named = map(utf8, texts)
    return key, shard, caption, named


def utf8(text: str) -> str:
    """Captions from the web may hold half a surrogate pair, which has no UTF-8 form."""
    return text.encode(errors="replace").decode()


def check_output(path: Path) -> None:
    """Before the work: a table has one of two suffixes, and its folder exists."""
    if path.suffix not in SUFFIXES:
        raise UserError(
            f"--output {path}: give a name that ends in {' or '.join(SUFFIXES)}", code="suspects.bad_output"
        )
    if path.suffix == ".parquet":
        _pyarrow()
    with writing(path, code="suspects.cannot_write"):
        check_target(path)


def write_table(path: Path, rows: Iterator[Suspect]) -> int:
    """As CSV or parquet, by the suffix. Returns the number of rows."""
    with writing(path, code="suspects.cannot_write"), atomic_path(path) as temporary:
        return _write_parquet(temporary, rows) if path.suffix == ".parquet" else _write_csv(temporary, rows)


def _write_csv(path: Path, rows: Iterator[Suspect]) -> int:
    count = 0
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(Suspect._fields)
        for row in rows:
            writer.writerow(row._replace(score=round(row.score, 4), probability=round(row.probability, 4)))
            count += 1
    return count


def _write_parquet(path: Path, rows: Iterator[Suspect]) -> int:
    arrow, parquet = _pyarrow()
    kinds = {int: arrow.int64(), str: arrow.string(), float: arrow.float32()}
    schema = arrow.schema([(name, kinds[kind]) for name, kind in Suspect.__annotations__.items()])
    count = 0
    with parquet.ParquetWriter(path, schema) as writer:
        while block := [row for _, row in zip(range(ROWS_AT_ONCE), rows, strict=False)]:
            columns = dict(zip(Suspect._fields, map(list, zip(*block, strict=True)), strict=True))
            writer.write_table(arrow.table(columns, schema=schema))
            count += len(block)
    return count


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise UserError(
            "a .parquet table needs pyarrow; install it (pip install pyarrow), or give a name that ends in .csv",
            code="suspects.no_pyarrow",
        ) from error
    return pyarrow, parquet

"""The samples that a file of keys, or a table of suspects, names."""

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np

from leanclip.data.exclusion.same_shards import same_shards
from leanclip.data.shards import Shards
from leanclip.data.source import BrokenSample, Source
from leanclip.errors import UserError, first_line
from leanclip.progress import ACTIVITY, progress_bar

ID_PREFIX = "id:"
TABLES = (".csv", ".parquet")
COLUMNS = ("id", "key", "shard", "probability", "numbers")
LONGEST_LINE = 1_000_000  # characters
SHOWN_SAMPLES = 1_000_000  # whose keys are read in more than a moment
REPORT_EVERY = 1 << 14  # keys
MAX_DIGITS = 19  # of a number, which fits into 64 bits then
LEAST_PROBABILITY = 0.5  # of being wrong, above which a row of a table of suspects is taken


class Entry(NamedTuple):
    """A line or row: what it says of a sample."""

    key: str | None
    id: int | None = None
    file: str | None = None  # its shard
    taken: bool = True  # False for a pair that is more likely right than wrong
    captions: tuple[int, ...] = ()  # their numbers among those of the sample, if it names captions

    def __str__(self) -> str:
        return self.key or f"{ID_PREFIX}{self.id}"


class Listed(NamedTuple):
    ids: np.ndarray  # sorted
    message: str  # for the log
    captions: dict[int, frozenset[int]]  # numbers of listed captions, by sample, where it has others


def listed_samples(path: str, source: Source, captions_of: np.ndarray | None = None) -> Listed:
    """The ids of the samples that a file lists. Entries that name none are counted, and those that are not taken.
    `captions_of`: the sample whose captions each one gets, by default its own."""
    ids, captions = set[int](), dict[int, frozenset[int]]()
    by_key, unknown, skipped = dict[str, list[Entry]](), list[Entry](), 0
    shard_of = _shards(Path(path), source)
    for entry in _entries(Path(path)):
        if not entry.taken:
            skipped += 1
        elif entry.id is not None and 0 <= entry.id < len(source) and _names(entry, source, entry.id, shard_of):
            _add(entry.id, entry, ids, captions)
        elif entry.key is not None:  # without an id, or with that of other data
            by_key.setdefault(entry.key, []).append(entry)
        else:
            unknown.append(entry)
    if by_key:
        matches = _find(source, by_key, shard_of)
        for index, entry in matches:
            _add(index, entry, ids, captions)
        matched = {entry for _, entry in matches}
        unknown += [entry for entries in by_key.values() for entry in entries if entry not in matched]
    captions = _some_of(captions, ids, source, captions_of)
    if not ids and not captions and (unknown or not skipped):
        raise UserError(
            f"--exclude {path} names no sample of the training data; give keys or {ID_PREFIX}NUMBER, one per line, or"
            " a table that leanclip data suspects wrote",
            code="data.exclude_nothing",
        )
    message = f"--exclude: {len(ids):,} of {len(source):,} samples are left out"
    if captions:
        message += f", and {sum(map(len, captions.values())):,} captions of {len(captions):,} others"
    if skipped:
        message += f"; {skipped:,} rows with a probability of at most {LEAST_PROBABILITY} are skipped"
    if unknown:
        message += f"; {len(unknown):,} entries of {path} name no sample, such as {str(unknown[0])[:80]!r}"
    return Listed(np.array(sorted(ids), np.int64), message, captions)


def _add(index: int, entry: Entry, ids: set[int], captions: dict[int, frozenset[int]]) -> None:
    if entry.captions:
        captions[index] = captions.get(index, frozenset()).union(entry.captions)
    else:
        ids.add(index)


def _some_of(
    captions: dict[int, frozenset[int]], ids: set[int], source: Source, captions_of: np.ndarray | None
) -> dict[int, frozenset[int]]:
    """Captions that exist, of samples that keep one that can be drawn; the other samples become ids."""
    kept = {}
    for index, listed in captions.items():
        ACTIVITY.still_working()
        owner = index if captions_of is None else int(captions_of[index])
        try:
            texts, weights = source.weighted_captions(owner)
        except BrokenSample:  # never drawn
            continue
        numbers = listed.intersection(range(len(texts)))
        if numbers.issuperset(n for n in range(len(texts)) if weights is None or weights[n] > 0):
            ids.add(index)
        elif numbers and index not in ids:
            kept[index] = numbers
    return kept


def _shards(path: Path, source: Source) -> dict[str, str]:
    """Of the shards that the entries name, those of the data."""
    listed = {entry.file for entry in _entries(path) if entry.file is not None}
    known = [file.path for file in source.files] if isinstance(source, Shards) else [source.file(0)]
    return same_shards(listed, known) if listed else {}


def _names(entry: Entry, source: Source, index: int, shard_of: Mapping[str, str]) -> bool:
    """Whether an entry is of this sample, by all that it says besides the id."""
    if entry.key is not None and entry.key != source.key(index):
        return False
    return entry.file is None or shard_of.get(entry.file) == source.file(index)


def _find(source: Source, by_key: Mapping[str, list[Entry]], shard_of: Mapping[str, str]) -> list[tuple[int, Entry]]:
    """The samples with these keys, each with an entry that names it. Reads the key of every sample."""
    matches: list[tuple[int, Entry]] = []
    with progress_bar("keys for --exclude", len(source), shown=len(source) >= SHOWN_SAMPLES) as progress:
        for index in range(len(source)):
            for entry in by_key.get(source.key(index), ()):
                if entry.file is None or shard_of.get(entry.file) == source.file(index):
                    matches.append((index, entry))
            if index % REPORT_EVERY == REPORT_EVERY - 1:
                progress(REPORT_EVERY)
                ACTIVITY.still_working()
    return matches


def _entries(path: Path) -> Iterator[Entry]:
    if not path.is_file():
        raise UserError(f"--exclude {path}: no such file", code="data.not_found")
    try:
        if path.suffix.lower() in TABLES:
            yield from _table_entries(path)
            return
        with path.open(encoding="utf-8-sig", errors="replace") as file:
            for text in filter(None, map(str.strip, _lines(file))):
                digits = text.removeprefix(ID_PREFIX)
                is_id = digits != text and digits.isdecimal() and len(digits) < MAX_DIGITS
                yield Entry(None, int(digits)) if is_id else Entry(text)
    except (OSError, csv.Error) as error:
        raise UserError(f"--exclude {path} cannot be read ({first_line(error)})", code="data.unreadable") from error


def _table_entries(path: Path) -> Iterator[Entry]:
    """Of a table with the columns `key` or `id`, and perhaps `shard`, `probability` and `numbers` of captions."""
    rows = _parquet_rows(path) if path.suffix.lower() == ".parquet" else _csv_rows(path)
    for row in rows:
        if "key" not in row and "id" not in row:
            raise UserError(f"--exclude {path} has neither a column key nor a column id", code="data.missing_column")
        number, key = ("" if row.get(name) is None else str(row[name]) for name in ("id", "key"))
        index = int(number) if number.isdecimal() and len(number) < MAX_DIGITS else None
        shard = str(row["shard"]) if row.get("shard") else None
        captions = () if row.get("numbers") is None else _numbers(str(row["numbers"]), path)
        taken = "probability" not in row or _is_likely(row["probability"])
        yield Entry(key or None, index, shard, taken, captions)


def _numbers(text: str, path: Path) -> tuple[int, ...]:
    numbers = text.split()
    if not all(number.isdecimal() and len(number) < MAX_DIGITS for number in numbers):
        raise UserError(
            f"--exclude {path}: the column numbers has {text[:40]!r}; it holds numbers of captions with spaces"
            " between them, or nothing for all captions",
            code="data.unreadable",
        )
    return tuple(map(int, numbers))


def _is_likely(probability: Any) -> bool:
    try:
        return float(probability) > LEAST_PROBABILITY
    except (TypeError, ValueError):
        return False


def _csv_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        yield from csv.DictReader(
            _lines(file), strict=True
        )  # a quote that is never closed would take all rows after it


def _lines(file: TextIO) -> Iterator[str]:
    while line := file.readline(LONGEST_LINE):
        if len(line) == LONGEST_LINE:
            raise OSError("a line has more than a million characters")
        yield line


def _parquet_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise UserError(
            f"--exclude {path} needs pyarrow; install it (pip install pyarrow), or give a .csv",
            code="data.no_pyarrow",
        ) from error
    try:
        file = parquet.ParquetFile(path)
        columns = [name for name in COLUMNS if name in file.schema_arrow.names]
        for batch in file.iter_batches(columns=columns) if columns else ():
            yield from batch.to_pylist()
        if not columns:
            yield {}
    except (ArrowException, ValueError) as error:  # ValueError: text that is not UTF-8, impossible times
        raise UserError(f"--exclude {path} cannot be read ({first_line(error)})", code="data.unreadable") from error

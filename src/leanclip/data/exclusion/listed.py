"""The samples that a file of keys, or a table of suspects, names."""

import csv
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np

from leanclip.data.files import is_remote
from leanclip.data.shards import Shards
from leanclip.data.source import BrokenSample, Source
from leanclip.errors import UserError, first_line
from leanclip.progress import ACTIVITY, progress_bar

ID_PREFIX = "id:"
TABLES = (".csv", ".parquet")
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
    except ImportError as error:
        raise UserError(
            f"--exclude {path} needs pyarrow; install it (pip install pyarrow), or give a .csv",
            code="data.no_pyarrow",
        ) from error
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(f"--exclude {path} cannot be read ({first_line(error)})", code="data.unreadable") from error


def _table_entries(path: Path) -> Iterator[Entry]:
    """Of a table with the columns `key` or `id`, and perhaps `shard`, `probability` and `numbers` of captions."""
    for row in table_rows(path):
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


def _lines(file: TextIO) -> Iterator[str]:
    while line := file.readline(LONGEST_LINE):
        if len(line) == LONGEST_LINE:
            raise OSError("a line has more than a million characters")
        yield line


def table_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Of a .parquet file, else of a CSV. ImportError without pyarrow, ValueError for a damaged file."""
    if path.suffix.lower() != ".parquet":
        with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
            # Strict: a quote that is never closed would take all rows after it.
            yield from csv.DictReader(_lines(file), strict=True)
        return
    from pyarrow import ArrowException, parquet

    try:
        for batch in parquet.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
    except ArrowException as error:
        raise ValueError(first_line(error)) from error


def same_shards(listed: Collection[str], known: Collection[str]) -> dict[str, str]:
    """For each shard that a table lists the one of the data, where there is one: by its path, or, since data move, by
    its file name. A name that several shards have decides nothing, nor does one in a folder that the table knows by
    path: there the shards have not moved."""
    by_path = {_absolute(path): path for path in known}
    shard_of = {shard: by_path[_absolute(shard)] for shard in listed if _absolute(shard) in by_path}
    in_place = {_folder_and_name(path)[0] for path in shard_of.values()}
    names_listed = Counter(_folder_and_name(shard)[1] for shard in set(listed))
    names_known = Counter(_folder_and_name(path)[1] for path in by_path)
    by_name = {_folder_and_name(path)[1]: path for path in known}
    for shard in set(listed) - shard_of.keys():
        name = _folder_and_name(shard)[1]
        unique = names_listed[name] == names_known[name] == 1
        if unique and _folder_and_name(by_name[name])[0] not in in_place:
            shard_of[shard] = by_name[name]
    return shard_of


def _absolute(path: str) -> str:
    return path if is_remote(path) else str(Path(path).absolute())


def _folder_and_name(path: str) -> tuple[str, str]:
    folder, _, name = path.rstrip("/").rpartition("/")
    return folder, name

"""A table of pairs that look wrong, as `leanclip data suspects` writes it: .csv or .parquet."""

import csv
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from leanclip.data.exclusion.listed import same_shards, table_rows
from leanclip.errors import UserError, first_line
from leanclip.search.store import EmbeddingStore

NAMES = ("suspects.parquet", "suspects.csv")
NEEDED = ("key", "shard")
SHOWN = ("key", "shard", "caption", "score", "probability", "rank")
MOST_ROWS = 100_000


def find_suspects(store: EmbeddingStore, path: str | None) -> list[dict[str, Any]] | None:
    """The rows of a table, with the ids of the samples that the store has; None if there is no table."""
    if path is None:
        found = next((store.directory / name for name in NAMES if (store.directory / name).is_file()), None)
        if found is None:
            return None
        path = str(found)
    try:
        rows = list(islice(table_rows(Path(path)), MOST_ROWS))
    except ImportError as error:
        message = "pyarrow is not installed: pip install 'leanclip[parquet]'"
        raise UserError(message, code="install.parquet") from error
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(f"cannot read {path} ({first_line(error)})", code="search.bad_suspects") from error
    missing = [name for name in NEEDED if rows and name not in rows[0]]
    if missing:
        raise UserError(
            f"{path} has no column {missing[0]}; a table of suspects has {', '.join(SHOWN)}",
            code="search.bad_suspects",
        )
    ids = _ids(store, rows)
    return [{name: row.get(name) for name in SHOWN} | {"id": index} for row, index in zip(rows, ids, strict=True)]


def _ids(store: EmbeddingStore, rows: list[dict[str, Any]]) -> list[int | None]:
    """The id of each row: its own, if shard and key are those of that sample; otherwise by shard and key."""
    paths = [shard.path for shard in store.shards]
    shard_of = same_shards({str(row["shard"]) for row in rows}, paths)

    def names(index: int) -> tuple[str, str]:
        return paths[int(store.shard_number(index))], store.key(index)

    wanted = np.array([str(row["key"]).encode("utf-8", "replace") for row in rows])
    order = np.argsort(wanted)
    positions = np.flatnonzero(np.isin(store.keys, wanted[order]))
    ids: dict[tuple[str, str], int] = {}
    for index in positions.tolist():
        ids.setdefault(names(index), index)
    found = []
    for row in rows:
        name, number = (shard_of.get(str(row["shard"]), ""), str(row["key"])), str(row.get("id"))
        index = int(number) if number.isdecimal() and len(number) < 19 else store.samples
        found.append(index if index < store.samples and names(index) == name else ids.get(name))
    return found

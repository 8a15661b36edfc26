"""Measured rows in CSV files, with their provenance, and tables made of them."""

import csv
import datetime
import functools
import hashlib
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import leanclip

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Table:
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __str__(self) -> str:
        """As Markdown."""
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)

    def cell(self, *address: str) -> str:
        """The cell in the row that starts with these cells and in the column named last."""
        *start, column = address
        for row in self.rows:
            if list(row[: len(start)]) == start and column in self.columns:
                return row[self.columns.index(column)]
        raise KeyError(f"no cell {', '.join(address)} in the table of {', '.join(self.columns)}")


def append(path: Path, *new: Mapping[str, Any]) -> None:
    """Adds rows, and the header before the first. An unknown column is an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    stored = rows(path)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list((stored or new)[0]), lineterminator="\n")
        if not stored:
            writer.writeheader()
        writer.writerows(new)


def rows(path: Path) -> list[dict[str, str]]:
    """All stored rows; none if the file does not exist."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def show(tables: Mapping[str, Table]) -> None:
    for name, table in tables.items():
        print(f"{name}\n{table}\n")


def provenance() -> dict[str, str]:
    """The last columns of every row: version, source, torch, device, date and command, of whose absolute paths the
    names are kept."""
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    script, root = Path(sys.argv[0]).resolve(), Path(__file__).resolve().parents[2]
    name = script.relative_to(root) if script.is_relative_to(root) else script.name
    return {
        "version": leanclip.__version__,
        "source": source_hash(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores",
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", str(name), *words]),
    }


@functools.cache
def source_hash() -> str:
    """Identifies the code of the package, also where there is no git history."""
    package = Path(leanclip.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]

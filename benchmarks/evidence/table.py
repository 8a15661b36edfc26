"""Rows of evidence: one CSV file per table, written as measured, so that a run which ended early is continued."""

import csv
import datetime
import functools
import hashlib
import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import leanclip

RESULTS = Path(__file__).parent / "results"
PROVENANCE = ("version", "source", "torch", "device", "date", "command")


def append(path: Path, fields: Sequence[str], row: Mapping[str, Any]) -> None:
    """Adds one row, and the header before the first. A row must name exactly the fields."""
    if set(row) != set(fields):
        raise ValueError(f"row has {sorted(row)}, {path.name} has {sorted(fields)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, fields, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)


def rows(path: Path) -> list[dict[str, str]]:
    """All rows written so far; none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def provenance() -> dict[str, str]:
    """What every row says of its origin."""
    cuda = torch.cuda.is_available()
    return {
        "version": leanclip.__version__,
        "source": source(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if cuda else f"CPU, {os.cpu_count()} cores",
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", _shown(sys.argv[0]), *sys.argv[1:]]),
    }


@functools.cache
def source() -> str:
    """Which state of the package this is, whether or not it comes with its history: the hash of its code."""
    package = Path(leanclip.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _shown(script: str) -> str:
    """The script as called from the repository's root, wherever that is."""
    path, root = Path(script).resolve(), Path(__file__).resolve().parents[2]
    return str(path.relative_to(root)) if path.is_relative_to(root) else path.name


def not_complete(names: Iterable[str]) -> str:
    """A line for the table that these are not in; nothing where there are none."""
    named = ", ".join(names)
    return f"\nNot complete yet, and so not in the table: {named}.\n" if named else ""

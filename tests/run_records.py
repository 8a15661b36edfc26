"""What a run has logged."""

import json
from pathlib import Path
from typing import Any


def records(run: Path, kind: str | None = None, **fields: object) -> list[dict[str, Any]]:
    """The lines of its metrics.jsonl, all or those of one kind and with these fields."""
    wanted = fields if kind is None else {"kind": kind} | fields
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if all(line.get(name) == value for name, value in wanted.items())]


def losses(run: Path) -> list[float]:
    """Of its logged steps."""
    return [line["loss"] for line in records(run, "train")]

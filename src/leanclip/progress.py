"""A bar for what takes longer than a few seconds."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)


@contextmanager
def progress_bar(
    title: str, total: int, *, shown: bool = True, unit: Literal["samples", "bytes"] = "samples"
) -> Iterator[Callable[[int], None]]:
    """Gives the function to tell how much more is done. Nothing is drawn outside a terminal."""
    console = Console(stderr=True)
    count = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), count, TimeRemainingColumn(compact=True))
    with Progress(*columns, console=console, disable=not (shown and console.is_terminal), transient=True) as progress:
        task = progress.add_task(title, total=total)
        yield lambda done: progress.advance(task, done)

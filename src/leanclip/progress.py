"""Progress of long work: a bar on the terminal, and a count that shows other processes that this one is active."""

import time
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


class Activity:
    """Progress of the main thread: the collectives that it began and the steps that it finished.

    All ranks count the same events in the same order, so the others wait for the rank with the lowest count.
    """

    def __init__(self) -> None:
        self.count, self.ticks, self.changed_at = 0, 0, time.monotonic()

    def advance(self) -> None:
        self.count += 1
        self.changed_at = time.monotonic()

    def still_working(self) -> None:
        """Called during an operation that takes long, such as reading a slow disk, so that it does not time out."""
        self.ticks += 1
        self.changed_at = time.monotonic()


ACTIVITY = Activity()  # of this process


def make_console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """Where a command prints. Brackets and colons in paths and names are printed as they are, not read as markup."""
    return Console(stderr=stderr, quiet=quiet, soft_wrap=True, highlight=False, markup=False, emoji=False)


@contextmanager
def progress_bar(
    title: str, total: int, *, shown: bool = True, unit: Literal["samples", "bytes"] = "samples"
) -> Iterator[Callable[[int], None]]:
    """Yields the function that advances the bar. Nothing is drawn outside a terminal."""
    console = make_console(stderr=True)
    count = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        count,
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=console, disable=not (shown and console.is_terminal), transient=True) as progress:
        task = progress.add_task(title, total=total)
        yield lambda done: progress.advance(task, done)

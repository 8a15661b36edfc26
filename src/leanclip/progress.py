"""Progress of long work: a bar on the terminal, and a count that shows other processes that this one is active."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from rich.table import Table


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


SECONDS_PER_LINE = 60.0  # in a log file
ACTIVITY = Activity()  # of this process


def make_console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """Where a command prints. Brackets and colons in paths and names are printed as they are, not read as markup."""
    return Console(stderr=stderr, quiet=quiet, soft_wrap=True, highlight=False, markup=False, emoji=False)


def make_table(
    title: str | None,
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    texts: int = 1,
    no_wrap: bool = False,
) -> Table:
    """Columns of texts, as many as `texts`, before columns of numbers."""
    table = Table(title=title, title_justify="left")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number < texts else "right", no_wrap=no_wrap)
    for row in rows:
        table.add_row(*row)
    return table


def printable(text: str) -> str:
    """What others wrote, without the control characters that a terminal obeys."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


@contextmanager
def progress_bar(
    title: str, total: int, *, shown: bool = True, unit: Literal["samples", "bytes"] = "samples"
) -> Iterator[Callable[[int], None]]:
    """Yields the function that advances the bar. Outside a terminal, long work prints a line now and then."""
    console = make_console(stderr=True)
    if shown and not console.is_terminal:
        yield _lines(title, total, console)
        return
    count = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        count,
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=console, disable=not shown, transient=True) as progress:
        task = progress.add_task(title, total=total)
        yield lambda done: progress.advance(task, done)


class TrainingProgress(Progress):
    """Of a training run: a bar in a terminal, plain lines elsewhere."""

    def __init__(self, steps: int, start: int, console: Console) -> None:
        columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("{task.description}", markup=False),
                   TextColumn("left"), TimeRemainingColumn(compact=True))  # fmt: skip
        super().__init__(*columns, console=console, disable=not console.is_terminal)
        self._steps, self._task = steps, self.add_task("starting", total=steps, completed=start)

    def at(self, step: int, line: str, left: float) -> None:
        self.update(self._task, completed=step, description=line)
        if not self.console.is_terminal:
            self.console.print(f"step {step}/{self._steps}  {line}  left {left / 60:.1f} min")


def _lines(title: str, total: int, console: Console) -> Callable[[int], None]:
    done, begin = 0, time.monotonic()
    printed = begin

    def advance(more: int) -> None:
        nonlocal done, printed
        done, now = done + more, time.monotonic()
        if done and now - printed >= SECONDS_PER_LINE:
            printed = now
            left = max(0.0, (now - begin) * (total - done) / done / 60)
            console.print(f"{title}: {done / max(total, done):.0%}, {left:,.1f} min left")

    return advance

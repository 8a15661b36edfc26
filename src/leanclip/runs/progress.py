"""Progress of a training run: a bar in a terminal, plain lines elsewhere."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from leanclip.progress import make_console


class TrainingProgress:
    """`update` advances the bar or prints a line; `print` prints a permanent line."""

    def __init__(self, steps: int, start: int, console: Console | None = None) -> None:
        self.console, self.steps = console or make_console(), steps
        columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("{task.description}", markup=False),
                   TextColumn("left"), TimeRemainingColumn(compact=True))  # fmt: skip
        self._bar = Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        self._task = self._bar.add_task("starting", total=steps, completed=start)

    def __enter__(self) -> "TrainingProgress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, step: int, line: str, left: float) -> None:
        self._bar.update(self._task, completed=step, description=line)
        if not self.console.is_terminal:
            self.console.print(f"step {step}/{self.steps}  {line}  left {left / 60:.1f} min")

    def print(self, line: str) -> None:
        self.console.print(line)

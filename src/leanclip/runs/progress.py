"""Progress of a training run: a bar in a terminal, plain lines elsewhere."""

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class TrainingProgress:
    """`update` advances the bar or prints a line; `print` prints a permanent line."""

    def __init__(self, steps: int, start: int, console: Console | None = None) -> None:
        self.console = console or Console(soft_wrap=True, highlight=False)
        self.steps = steps
        self._bar: Progress | None = None
        if self.console.is_terminal:
            columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("{task.description}"),
                       TextColumn("left"), TimeRemainingColumn(compact=True))  # fmt: skip
            self._bar = Progress(*columns, console=self.console)
            self._task = self._bar.add_task("starting", total=steps, completed=start)

    def __enter__(self) -> "TrainingProgress":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, step: int, line: str, left: float) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=line)
        else:
            self.console.print(f"step {step}/{self.steps}  {line}  left {left / 60:.1f} min", markup=False)

    def print(self, line: str) -> None:
        self.console.print(line, markup=False)

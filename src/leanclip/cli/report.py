"""leanclip report: one HTML file about a run, or about several side by side."""

from dataclasses import dataclass
from pathlib import Path

from leanclip.cli.parse import parse
from leanclip.reporting import write_report

DESCRIPTION = """Write one self-contained HTML file with a run's curves, evaluations and pictures.

Works on a run that is still going. Several runs are compared: final figures and the settings that differ in tables,
curves on the same axes.

  leanclip report logs/demo
  leanclip report logs/one logs/two logs/three --output comparison.html
"""


@dataclass(frozen=True, kw_only=True)
class ReportCommand:
    run: tuple[str, ...]
    """The run's directory, or several."""
    output: str | None = None
    """The file to write. Default: report.html in the run's directory; comparison.html beside the first of several."""


def run(arguments: list[str]) -> None:
    command = parse(ReportCommand, arguments, command="report", description=DESCRIPTION)
    path = write_report([Path(run) for run in command.run], None if command.output is None else Path(command.output))
    print(f"report: {path.resolve()}")

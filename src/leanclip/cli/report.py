"""leanclip report: one HTML file about a run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from leanclip.cli.parse import Positional, parse
from leanclip.reporting import write_report

DESCRIPTION = """Write one self-contained HTML file with a run's curves, evaluations and pictures.

Works on a run that is still going. Example: leanclip report logs/demo
"""


@dataclass(frozen=True, kw_only=True)
class ReportCommand:
    run: Annotated[str, Positional]
    """The run's directory."""
    output: str | None = None
    """The file to write. Default: report.html in the run's directory."""


def run(arguments: list[str]) -> None:
    command = parse(ReportCommand, arguments, command="report", description=DESCRIPTION)
    path = write_report(Path(command.run), None if command.output is None else Path(command.output))
    print(f"report: {path.resolve()}")

"""leanclip selftest: are losses and gradients correct on this machine?"""

import sys
from contextlib import nullcontext
from dataclasses import dataclass

from leanclip.cli.parse import parse
from leanclip.config import override
from leanclip.device import device_of
from leanclip.errors import UserError
from leanclip.losses import LOSSES
from leanclip.losses.gradient_check import check_implementations
from leanclip.losses.registry import spec_of
from leanclip.progress import make_console, make_table
from leanclip.recipes import settings_below
from leanclip.runs.defaults import loss_name
from leanclip.settings import at_least, check_limits, setting
from leanclip.training.rank_check import processes_selftest

DESCRIPTION = """Check the computations of leanclip on this machine. The exit code is 1 if a check fails.

Without --processes: every implementation of the losses against float64. An error passes if it is at most twice that
of plain PyTorch at the same input precision, or four units in the last place of the largest entry.

With --processes N: N processes against one on your own model, loss and data, two training steps in float64; the
loss, all gradients, temperatures and tables must agree to 1e-8.

  leanclip selftest --loss fastclip-v3 --batch-size 1000
  leanclip selftest --processes 4 --config logs/RUN/config.toml
"""


@dataclass(frozen=True, kw_only=True)
class SelftestCommand:
    processes: int | None = None
    """Compare this number of processes with one."""
    config: str | None = None
    """With --processes: the run to check, such as a run's config.toml. Default: the bundled data."""
    recipe: str | None = None
    """With --processes: the recipe to check."""
    loss: str | None = None
    """The loss to check. Default: all of them; with --processes the run's own."""
    batch_size: int | None = setting(None, limits=at_least(2))
    """Samples in the batch. Default: 257; with --processes 32 of the run's own."""
    dim: int = setting(96, limits=at_least(1))
    """Size of the embeddings."""
    device: str | None = None
    """cpu or cuda. Default: a GPU if there is one."""

    def __post_init__(self) -> None:
        check_limits(self)


def run(arguments: list[str]) -> None:
    command = parse(SelftestCommand, arguments, command="selftest", description=DESCRIPTION)
    if command.loss is not None:
        spec_of(command.loss)
    if command.processes is not None:
        _compare_processes(command, command.processes)
    elif command.config is not None or command.recipe is not None:
        raise UserError("--config and --recipe require --processes N: add it", code="selftest.no_processes")
    else:
        _compare_implementations(command)


def _compare_implementations(command: SelftestCommand) -> None:
    device, batch = device_of(command.device), command.batch_size or 257
    losses = list(LOSSES) if command.loss is None else [command.loss]
    _report(
        f"selftest on {device}, batch {batch}, dim {command.dim}: error against float64",
        ("loss", "implementation", "input", "quantity", "error", "plain PyTorch"),
        [
            ((check.loss, check.implementation, check.dtype, check.quantity, f"{check.error:.1e}",
              f"{check.plain:.1e}"), check.passed)
            for check in check_implementations(losses, device=device, batch=batch, dim=command.dim)
        ],
    )  # fmt: skip


def _compare_processes(command: SelftestCommand, processes: int) -> None:
    if processes < 1:
        raise UserError(f"--processes {processes}: give at least 1", code="selftest.no_processes")
    settings = settings_below({"recipe": command.recipe, "config": command.config})
    values = {"loss": command.loss, "device": command.device}
    settings = override(settings, {name: value for name, value in values.items() if value is not None}, "selftest")
    batch, console = command.batch_size or max(32, processes), make_console()
    with console.status(f"{processes} processes and one") if console.is_terminal else nullcontext():
        agreements = list(processes_selftest(settings, processes=processes, batch=batch))
    _report(
        f"{processes} processes against one, {loss_name(settings)}, global batch {batch}, float64",
        ("quantity", "norm", "difference"),
        [((row.quantity, f"{row.size:.3e}", f"{row.error:.1e}"), row.passed) for row in agreements],
    )


def _report(title: str, headings: tuple[str, ...], rows: list[tuple[tuple[str, ...], bool]]) -> None:
    """Print a table of checks, and exit with 1 if one failed."""
    console = make_console()
    console.width = max(console.width, 110)  # wide enough for the table where the terminal's width is unknown
    lines = [(*cells, "ok" if passed else "WRONG") for cells, passed in rows]
    console.print(make_table(title, (*headings, ""), lines, texts=headings.index("quantity") + 1))
    correct = sum(passed for _, passed in rows)
    console.print(f"{correct} of {len(rows)} checks passed")
    if correct < len(rows):
        sys.exit(1)

"""leanclip selftest: is the mathematics right on this machine?"""

import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from leanclip.cli.parse import parse
from leanclip.config import load_toml, override
from leanclip.device import device_of
from leanclip.errors import UserError
from leanclip.losses import LOSSES, LossConfig
from leanclip.losses.gradient_check import selftest
from leanclip.losses.registry import spec_of
from leanclip.recipes import load_recipe
from leanclip.runs import TrainConfig
from leanclip.training.rank_check import processes_selftest

DESCRIPTION = """Check on this machine that leanclip computes what it should. The exit code is 1 if anything fails.

Without --processes: every implementation of the losses against float64 truth. An error passes if it is at most twice
that of plain PyTorch at the same input precision, or four units in the last place of the largest entry.

With --processes N: N processes against one on your own model, loss and data, two training steps in float64; the
loss, all gradients, temperatures and tables must agree to 1e-8.

  leanclip selftest --loss fastclip-v3 --batch-size 1000
  leanclip selftest --processes 4 --config logs/RUN/config.toml
"""


@dataclass(frozen=True, kw_only=True)
class SelftestCommand:
    processes: int | None = None
    """Check that so many processes compute what one does."""
    config: str | None = None
    """With --processes: the run to check, such as a run's config.toml. Default: the bundled data."""
    recipe: str | None = None
    """With --processes: the recipe to check."""
    loss: str | None = None
    """The loss to check. Default: all of them; with --processes the run's own."""
    batch_size: int | None = None
    """Samples in the batch. Default: 257; with --processes 32 of the run's own."""
    dim: int = 96
    """Size of the embeddings."""
    device: str | None = None
    """cpu or cuda. Default: a GPU if there is one."""


def run(arguments: list[str]) -> None:
    command = parse(SelftestCommand, arguments, command="selftest", description=DESCRIPTION)
    if command.loss is not None:
        try:
            spec_of(command.loss)
        except ValueError as error:
            raise UserError(str(error)) from error
    if command.processes is not None:
        _processes(command)
        return
    if command.config is not None or command.recipe is not None:
        raise UserError("--config and --recipe go with --processes N; add it")
    device = device_of(command.device)
    batch = command.batch_size or 257
    losses = list(LOSSES) if command.loss is None else [command.loss]
    console = Console(soft_wrap=True, highlight=False)
    console.width = max(console.width, 110)  # wide enough for the table where the terminal's width is unknown
    table = Table(title=f"selftest on {device}, batch {batch}, dim {command.dim}: error against float64")
    for heading in ("loss", "implementation", "input", "quantity", "error", "plain PyTorch", ""):
        table.add_column(heading, justify="right" if heading in ("error", "plain PyTorch") else "left")
    failed = total = 0
    for check in selftest(losses, device=device, batch=batch, dim=command.dim):
        total += 1
        failed += not check.passed
        verdict = "ok" if check.passed else "WRONG"
        table.add_row(check.loss, check.implementation, check.dtype, check.quantity, f"{check.error:.1e}",
                      f"{check.plain:.1e}", verdict)  # fmt: skip
    console.print(table)
    console.print(f"{total - failed} of {total} checks passed")
    if failed:
        sys.exit(1)


def _processes(command: SelftestCommand) -> None:
    assert command.processes is not None
    if command.processes < 1:
        raise UserError(f"--processes {command.processes}: give at least 1")
    settings = TrainConfig()
    if command.recipe is not None:
        settings = override(settings, load_recipe(command.recipe), f"recipe {command.recipe}")
    if command.config is not None:
        settings = override(settings, load_toml(Path(command.config)), command.config)
    if command.loss is not None and command.loss != settings.run.loss:
        settings = replace(settings, run=replace(settings.run, loss=command.loss), loss=LossConfig())
    settings = replace(settings, run=replace(settings.run, device=command.device))
    batch = command.batch_size or max(32, command.processes)
    console = Console(soft_wrap=True, highlight=False)
    with console.status(f"{command.processes} processes and one") if console.is_terminal else nullcontext():
        found = list(processes_selftest(settings, processes=command.processes, batch=batch))
    console.width = max(console.width, 110)
    table = Table(
        title=f"{command.processes} processes against one, {settings.run.loss}, global batch {batch}, float64"
    )
    for heading in ("quantity", "norm", "difference", ""):
        table.add_column(heading, justify="right" if heading in ("norm", "difference") else "left")
    for agreement in found:
        verdict = "ok" if agreement.passed else "WRONG"
        table.add_row(agreement.quantity, f"{agreement.size:.3e}", f"{agreement.error:.1e}", verdict)
    console.print(table)
    failed = sum(not agreement.passed for agreement in found)
    console.print(f"{len(found) - failed} of {len(found)} checks passed")
    if failed:
        sys.exit(1)

"""leanclip selftest: is the mathematics right on this machine?"""

import sys
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from leanclip.cli.parse import parse
from leanclip.errors import UserError
from leanclip.losses import LOSSES
from leanclip.losses.registry import spec_of
from leanclip.losses.selftest import selftest
from leanclip.training import device_of

DESCRIPTION = """Compare every implementation that runs on this machine with float64 truth.

An error passes if it is at most twice that of plain PyTorch at the same input precision, or four units in the last
place of the largest entry. The exit code is 1 if anything fails.

Example: leanclip selftest --loss fastclip-v3 --batch-size 1000
"""


@dataclass(frozen=True, kw_only=True)
class SelftestCommand:
    loss: str | None = None
    """The loss to check. Default: all of them."""
    batch_size: int = 257
    """Samples in the batch."""
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
    device = device_of(command.device)
    losses = list(LOSSES) if command.loss is None else [command.loss]
    console = Console(soft_wrap=True, highlight=False)
    console.width = max(console.width, 110)  # wide enough for the table where the terminal's width is unknown
    table = Table(title=f"selftest on {device}, batch {command.batch_size}, dim {command.dim}: error against float64")
    for heading in ("loss", "implementation", "input", "quantity", "error", "plain PyTorch", ""):
        table.add_column(heading, justify="right" if heading in ("error", "plain PyTorch") else "left")
    failed = total = 0
    for check in selftest(losses, device=device, batch=command.batch_size, dim=command.dim):
        total += 1
        failed += not check.passed
        verdict = "ok" if check.passed else "WRONG"
        table.add_row(check.loss, check.implementation, check.dtype, check.quantity, f"{check.error:.1e}",
                      f"{check.plain:.1e}", verdict)  # fmt: skip
    console.print(table)
    console.print(f"{total - failed} of {total} checks passed")
    if failed:
        sys.exit(1)

"""leanclip data suspects: the pairs of a run whose caption looks wrong."""

from dataclasses import dataclass
from pathlib import Path

from leanclip.cli.parse import parse
from leanclip.errors import UserError

DESCRIPTION = """List the pairs of a run's training data whose caption looks wrong, worst first.

Writes a table (rank, id, key, shard, caption, score, probability of being wrong) and a page of images with their
captions and the caption that the model would have chosen instead. A run with --pair-weights auto or learned has
scored its pairs while it trained, and no image is read for the table; for other runs the model makes one pass over
the data that it was trained on.

Example: leanclip data suspects logs/mine
         leanclip data suspects logs/mine --output worst.csv
         leanclip train --config logs/mine/config.toml --name cleaner --exclude worst.csv

Of the table, --exclude takes the pairs that are more likely wrong than right, and skips the others.
"""


@dataclass(frozen=True, kw_only=True)
class SuspectsCommand:
    run: str
    """A folder that leanclip train wrote, or one of its checkpoints."""
    output: str | None = None
    """The table: a .csv or .parquet file. Default: suspects.csv in the run."""
    rows: int | None = None
    """Pairs in the table. Default: those that are more likely wrong than right, at least 1,000."""
    page: str | None = None
    """The page. Default: suspects.html in the run."""
    shown: int = 48
    """Pairs on the page. 0 for no page: then no image is read and no model loaded."""
    train_data: str | None = None
    """Where the training data are, if they have moved. Default: where the run found them."""
    batch_size: int = 256
    """Images or captions embedded at a time."""
    device: str | None = None
    """cpu or cuda. Default: a GPU if there is one."""


def run(arguments: list[str]) -> None:
    command = parse(SuspectsCommand, arguments, command="data suspects", description=DESCRIPTION)
    for flag, value, least in (("--rows", command.rows, 1), ("--shown", command.shown, 0)):
        if value is not None and value < least:
            raise UserError(f"{flag} is {value}; it must be at least {least}", code="data.bad_value")
    if command.batch_size < 1:
        raise UserError(f"--batch-size is {command.batch_size}; it must be at least 1", code="data.bad_value")
    from leanclip.suspects.find import Search, find_suspects

    found = find_suspects(
        Search(
            run=Path(command.run),
            output=None if command.output is None else Path(command.output),
            page=None if command.page is None else Path(command.page),
            shown=command.shown,
            rows=command.rows,
            train_data=command.train_data,
            device=command.device,
            batch=command.batch_size,
            progress=True,
        )
    )
    scored_by = "the run" if found.from_table else "its model, in one pass"
    print(f"{found.pairs_scored} were scored by {scored_by}")
    if found.can_tell:
        print(f"{found.share:.1%} look wrong, about {round(found.share * found.scored):,}")
    else:
        print("the model cannot tell right captions from wrong ones: every probability is 0, --exclude takes none")
    print(f"table: {found.table} ({found.rows:,} pairs, worst first)")
    if found.page is not None:
        print(f"page: {found.page}")

"""leanclip search: a local page to search embedded images, or a table of the nearest ones."""

import contextlib
import os
import sys
import threading
import webbrowser
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from leanclip.cli.parse import parse
from leanclip.errors import UserError, first_line
from leanclip.progress import make_console, printable
from leanclip.search.engine import MOST_HITS, Engine, RequestError, open_engine
from leanclip.search.index import LARGEST_EXACT
from leanclip.search.server import SearchServer
from leanclip.search.suspects import find_suspects
from leanclip.settings import between, check_limits, setting

DESCRIPTION = """Search the images that leanclip embed has embedded: a page on this machine, or a table.

  leanclip search embeddings
  leanclip search embeddings --query "a red car in the snow" --count 20
  leanclip search embeddings --suspects suspects.csv --port 8080

The page finds images by a sentence or by an image that is dropped on it, sorts them into classes, and shows
near-duplicates. Only this machine can open it, unless --host says otherwise: then everyone who reaches that address
can see the images.
"""
PORT = 8026
NARROWEST = 120  # columns of a table that is not printed on a terminal


@dataclass(frozen=True, kw_only=True)
class SearchCommand:
    out: str
    """The directory that leanclip embed wrote."""
    query: str | None = None
    """Print the images nearest to this sentence as a table instead of opening a page."""
    count: int = setting(10, limits=between(1, MOST_HITS))
    """Rows of the table, up to 1,000."""
    shard: str | None = None
    """Only images of the shard of this name, for --query."""
    suspects: str | None = None
    """A table of suspects, .csv or .parquet, with the columns key and shard. Default: suspects.parquet or
    suspects.csv in OUT, if there is one."""
    model: str | None = None
    """Where the model is now. Default: where it was when the data were embedded."""
    data: str | None = None
    """Where the data are now. Default: where they were."""
    host: str = "127.0.0.1"
    """The address to serve. Default: this machine only."""
    port: int | None = setting(None, limits=between(0, 65535))
    """The port to serve. Default: 8026, or a free one."""
    browser: bool = True
    """Open the page in a browser, where there is a display."""
    exact_up_to: int = LARGEST_EXACT
    """With more images than these, search an approximate index, which is built once; it needs
    pip install 'leanclip[search]'."""
    device: str | None = None
    """cpu or cuda, for the model. Default: a GPU if there is one."""

    def __post_init__(self) -> None:
        check_limits(self)
        if self.shard is not None and self.query is None:
            raise ValueError("--shard is for --query; the page has a list of shards")


def run(arguments: list[str]) -> None:
    command = parse(SearchCommand, arguments, command="search", description=DESCRIPTION)
    console = make_console()
    engine = open_engine(
        command.out,
        model=command.model,
        data=command.data,
        device=command.device,
        largest_exact=command.exact_up_to,
        notify=console.print,
    )
    if command.query is not None:
        show(console, engine, command, command.query)
        return
    with open_server(engine, command) as server:
        console.print(f"search {engine.usable.sum():,} images at {server.url}   (Ctrl-C ends it)")
        if command.browser and _has_display():
            threading.Thread(target=webbrowser.open, args=(server.url,), daemon=True).start()
        server.serve_forever()


def open_server(engine: Engine, command: SearchCommand) -> SearchServer:
    suspects = find_suspects(engine.store, command.suspects)
    if command.port is None:
        with contextlib.suppress(OSError):  # another page has it: any free port
            return SearchServer(engine, command.host, PORT, suspects=suspects)
    try:
        return SearchServer(engine, command.host, command.port or 0, suspects=suspects)
    except OSError as error:
        raise UserError(
            f"cannot serve {command.host}, port {command.port or PORT} ({first_line(error)}); give another --port or"
            " --host",
            code="search.cannot_serve",
        ) from error


def show(console: Console, engine: Engine, command: SearchCommand, text: str) -> None:
    number = None
    if command.shard is not None:
        names = [shard.name for shard in engine.store.shards]
        if command.shard not in names:
            raise UserError(
                f"there is no shard {command.shard!r}; the first is {names[0]!r}, of {len(names):,}",
                code="search.no_shard",
            )
        number = names.index(command.shard)
    try:
        hits = engine.nearest(engine.of_text(text), count=command.count, shard=number)
    except RequestError as error:
        raise UserError(str(error), code="search.bad_query") from error
    if not console.is_terminal:
        console.width = NARROWEST
    table = Table()
    for heading, side in (("score", "right"), ("key", "left"), ("shard", "left"), ("caption", "left")):
        table.add_column(heading, justify=side)  # type: ignore[arg-type]
    for hit in hits:
        texts = (" ".join(text.split()) for text in (hit.key, hit.shard, hit.caption))
        table.add_row(f"{hit.score:.3f}", *map(printable, texts))
    console.print(table)


def _has_display() -> bool:
    return sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))

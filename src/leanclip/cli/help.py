"""What --help shows: the flags that tyro found and their docstrings, in running text under plain headings.

tyro breaks sentences where the docstrings' lines end, heads its sections with the names of fields, and says of half
of the flags that they are {None}|STR and None by default.
"""

import re
import shutil
import textwrap
from collections.abc import Iterator
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

COLUMNS = 120  # of tyro's; from 130 on it puts sections side by side
WIDEST = 100
NAMES = 26  # columns of a flag; longer ones have a line of their own
NARROW, LEAST = 60, 40  # below the first all have; nothing is narrower than the second


class Section(NamedTuple):
    title: str
    about: str
    entries: list[tuple[str, str]]  # a flag with what it takes, and its help


def show(told: str) -> None:
    """tyro's help, read again and printed."""
    console = Console(highlight=False, soft_wrap=True)
    width = max(min(shutil.get_terminal_size().columns, WIDEST), LEAST)
    head, sections = read(told)
    for paragraph in re.split(r"\n\n+", head):
        whole = paragraph.startswith(" ") or "\n  " in paragraph  # examples and tables
        console.print(Text((paragraph if whole else wrapped(paragraph, width)) + "\n"))
    for section in sections:
        console.print(Text(section.title, style="bold"))
        if section.about:
            console.print(Text(wrapped(section.about, width, "  ")))
        for names, help in section.entries:
            console.print(entry(names, help, width))
        console.print()


def read(told: str) -> tuple[str, list[Section]]:
    """What stands before the first heading, which is underlined and one column in, and the sections."""
    head, *rest = re.split(r"^ (\S.*?) *\n -{20,} *\n", told, flags=re.MULTILINE)
    sections = [section_of(name, text) for name, text in zip(rest[::2], rest[1::2], strict=True)]
    return of_types(head.strip("\n")), sections


def section_of(name: str, text: str) -> Section:
    about, _, flags = text.rpartition("  --------------------")
    lines = [line[2:].rstrip() for line in flags.splitlines() if line.strip().strip("-")]
    name, about = name.removesuffix(" options").removeprefix("settings.").removeprefix("positional "), about.strip()
    if about and not about.endswith("."):  # a heading
        name, about = about, ""
    return Section(name[:1].upper() + name[1:], about, list(entries(lines)))


def wrapped(text: str, width: int, indent: str = "") -> str:
    kept = text.replace("(default: ", "(default:\0")  # together with what it is
    lines = textwrap.fill(kept, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    return lines.replace("\0", " ")


def entries(lines: list[str]) -> Iterator[tuple[str, str]]:
    names, told = "", []
    for line in lines:
        if line.startswith(" "):
            told.append(line.strip())
            continue
        if names:
            yield names, plain(told)
        names, _, first = line.partition("  ")
        names, told = of_types(names), [first.strip()]
    if names:
        yield names, plain(told)


def of_types(names: str) -> str:
    """--image-mean FLOAT FLOAT FLOAT, not {None}|{FLOAT FLOAT FLOAT}."""
    return re.sub(r"\{([A-Z ]+)\}", r"\1", names.replace("{None}|", "").replace("{None,", "{"))


def plain(lines: list[str]) -> str:
    """One paragraph, without a default that is none, or is told in words."""
    return re.sub(r" ?\((default: (None|False)?|required|repeatable)\)$", "", " ".join(filter(None, lines)))


def entry(names: str, help: str, width: int) -> Text:
    indent = " " * (6 if width < NARROW else NAMES + 4)
    body = wrapped(help, width, indent)
    if len(names) > NAMES or width < NARROW:
        return Text.assemble(("  " + names, "cyan"), "\n", body)
    return Text.assemble((f"  {names:<{NAMES + 2}}", "cyan"), body.removeprefix(indent))

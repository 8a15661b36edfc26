"""What --help and --help-all print: the flags of a command and their docstrings, under plain headings."""

import re
import shutil
import textwrap

from rich.console import Console
from rich.text import Text

from leanclip.cli.flags import Flag, Section

WIDEST = 100
NAMES = 26  # columns of a flag; longer ones have a line of their own
NARROW, NARROWEST = 60, 40  # below the first every flag has its own line; nothing is narrower than the second


def show(command: str, description: str, sections: list[Section], *, everything: bool) -> None:
    """Print the help. Without `everything`, only common flags, if a command marks any, and their first sentences."""
    console = Console(highlight=False, soft_wrap=True)
    width = max(min(shutil.get_terminal_size().columns, WIDEST), NARROWEST)
    flags = [flag for section in sections for flag in section.flags]
    short = not everything and any(flag.common for flag in flags)
    positionals = [flag for flag in flags if flag.positional]
    console.print(Text(" ".join(["usage:", command, *map(signature, positionals), "[options]"]) + "\n"))
    for paragraph in re.split(r"\n\n+", description.strip("\n")):
        preformatted = paragraph.startswith(" ") or "\n  " in paragraph  # examples and tables
        console.print(Text((paragraph if preformatted else wrapped(paragraph, width)) + "\n"))
    if positionals:
        print_section(console, "Arguments", "", positionals, width=width, short=short)
    for section in sections:
        shown = [flag for flag in section.flags if not flag.positional and (flag.common or not short)]
        if shown:
            print_section(console, section.title, "" if short else section.about, shown, width=width, short=short)
    if short:
        console.print(Text(f"{command} --help-all explains all {len(flags)} settings."))


def print_section(console: Console, title: str, about: str, flags: list[Flag], *, width: int, short: bool) -> None:
    console.print(Text(title, style="bold"))
    if about:
        console.print(Text(wrapped(about, width, "  ")))
    indent = " " * (6 if width < NARROW else NAMES + 4)
    for flag in flags:
        name, text = signature(flag), wrapped(explanation(flag, short=short), width, indent)
        if len(name) > NAMES or width < NARROW:
            console.print(Text.assemble(("  " + name, "cyan"), "\n", text))
        else:
            console.print(Text.assemble((f"  {name:<{NAMES + 2}}", "cyan"), text.removeprefix(indent)))
    console.print()


def signature(flag: Flag) -> str:
    """The flag with what it takes: --image-mean FLOAT FLOAT FLOAT, --no-pad-text, RUN ..."""
    if flag.positional:
        return flag.name + (" ..." if flag.accepts.length == 0 else "")
    if flag.accepts.kinds == (bool,) and not flag.accepts.optional:
        return flag.name.replace("--", "--no-", 1) if flag.default is True else flag.name
    taken = flag.accepts.described
    return f"{flag.name} [{taken}]" if flag.bare is not None else f"{flag.name} {taken}"


def explanation(flag: Flag, *, short: bool) -> str:
    """The docstring, or its first sentence, with the default unless that is none or stands in the text."""
    text = f"{flag.help.partition('. ')[0].rstrip('.')}." if short else flag.help
    value = " ".join(map(str, flag.default)) if isinstance(flag.default, tuple) else flag.default
    unsaid = flag.positional or value is None or value == "" or isinstance(value, bool)
    return text if unsaid else f"{text} (default: {value})"


def wrapped(text: str, width: int, indent: str = "") -> str:
    text = text.replace("(default: ", "(default:\0")  # keeps the value on the same line
    lines = textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    return lines.replace("\0", " ")

"""Typed command lines from dataclasses.

A field is a flag: its type says what the flag takes, and the docstring under it is its help. A field without a
default is a positional argument. Fields of nested dataclasses are flags like the others, under their own heading.
"""

import argparse
import difflib
import re
import shutil
import textwrap
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any, NoReturn, TypeVar, get_type_hints

from leanclip.cli.flags import Flag, Section, sections_of
from leanclip.errors import UserError
from leanclip.settings import OTHER_NAMES, Accepted

HELP = {"-h", "--help", "--help-all"}
WIDEST, NARROW, NARROWEST = 100, 60, 40  # columns of the help; below NARROW every flag has a line of its own
T = TypeVar("T")


def parse(
    kind: type[T],
    arguments: list[str],
    *,
    command: str,
    description: str,
    below: Callable[[dict[str, Any]], T] | None = None,
) -> T:
    """Build `kind` from flags. `below` maps the typed values, by field name, to the values that they override."""
    shows_help = HELP & set(arguments)
    words = [_dashes(word) for word in arguments if word not in HELP]
    typed = typed_values(sections_of(kind), words, command=command, positionals=not shows_help)
    default = None if below is None else below(typed)
    if shows_help:
        everything = "--help-all" in shows_help
        print(_help(command, description, sections_of(kind, default), everything=everything), end="")
        raise SystemExit(0)
    try:
        return assemble(kind, default, typed)
    except ValueError as error:
        code = error.code if isinstance(error, UserError) else "config.bad_value"
        raise UserError(with_flags(str(error), sections_of(kind)), code=code) from error


def with_flags(message: str, sections: list[Section]) -> str:
    """A message of a component, which names its fields, with flags in their place: the first word, and words that can
    be nothing else."""
    names = {flag.field: flag.name for section in sections for flag in section.flags}

    def replaced(word: re.Match[str]) -> str:
        return names.get(word[0], word[0]) if word.start() == 0 or "_" in word[0] else word[0]

    return re.sub(r"(?<![\w/.'-])\w+(?![\w/.'-])", replaced, message)


def typed_values(sections: list[Section], words: list[str], *, command: str, positionals: bool) -> dict[str, Any]:
    """The values that the words give, by field name."""
    parser = _Parser(command)
    for section in sections:
        for flag in section.flags:
            if positionals or not flag.positional:
                _add(parser, flag, flag.help)
    values, unknown = parser.parse_known_args(words)
    if unknown and positionals:
        word = next((word for word in unknown if word.startswith("-")), unknown[0])
        if not word.startswith("-"):
            raise UserError(f"unexpected argument {word!r} ({parser.remedy})", code="cli.unexpected_argument")
        name = word.partition("=")[0]
        near = OTHER_NAMES.get(name) or next(iter(difflib.get_close_matches(name, parser.names(), n=1)), None)
        hint = f"; did you mean {near}?" if near else ""
        raise UserError(f"unknown flag {name}{hint} ({parser.remedy})", code="cli.unknown_flag")
    for flag in (flag for section in sections for flag in section.flags if flag.positional):
        if getattr(values, flag.field, None) in ("", [""]):  # which would be the current directory
            raise UserError(f"{flag.name} is empty ({parser.remedy})", code="cli.missing_argument")
    return vars(values)


def assemble(kind: type[T], default: T | None, typed: dict[str, Any]) -> T:
    """`kind` with the typed values over the default; values of repeated flags are added to it."""
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    for entry in fields(kind):  # type: ignore[arg-type]
        if is_dataclass(hints[entry.name]):
            values[entry.name] = assemble(hints[entry.name], getattr(default, entry.name, None), typed)
        elif entry.name in typed:
            value = typed[entry.name]
            below = getattr(default, entry.name, ()) if isinstance(value, list) else ()
            repeated = Accepted.of(hints[entry.name]).length == 0
            values[entry.name] = (*(below if repeated else ()), *value) if isinstance(value, list) else value
    return kind(**values) if default is None else replace(default, **values)  # type: ignore[type-var]


class _Parser(argparse.ArgumentParser):
    """argparse whose mistakes are UserErrors."""

    def __init__(self, command: str, **options: Any) -> None:
        super().__init__(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS, **options)
        self.remedy = f"leanclip {command} --help-all lists the flags"

    def names(self) -> list[str]:
        return [name for action in self._actions for name in action.option_strings]

    def error(self, message: str) -> NoReturn:
        required = "the following arguments are required"
        if message.startswith(required):
            raise UserError(f"missing{message.removeprefix(required)} ({self.remedy})", code="cli.missing_argument")
        raise UserError(f"{message.removeprefix('argument ')} ({self.remedy})", code="cli.bad_value")


def _add(parser: argparse._ActionsContainer, flag: Flag, text: str) -> None:
    accepts = flag.accepts

    def convert(word: str) -> Any:
        try:
            return accepts.from_word(word)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    options: dict[str, Any] = {"type": convert, "help": text.replace("%", "%%")}
    value = {"dest": flag.field, "metavar": accepts.described.split()[0]}
    if flag.positional:
        parser.add_argument(flag.field, metavar=flag.name, nargs="+" if accepts.length == 0 else None, **options)
    elif accepts == Accepted((bool,)):
        parser.add_argument(flag.name, dest=flag.field, action="store_true", help=options["help"])
        name = flag.name.replace("--", "--no-", 1)
        parser.add_argument(name, dest=flag.field, action="store_false", help=argparse.SUPPRESS)
    elif accepts.length == 0:
        parser.add_argument(flag.name, action="append", **value, **options)
    elif flag.bare is not None:
        parser.add_argument(flag.name, nargs="?", const=flag.bare, **value, **options)
    else:
        parser.add_argument(flag.name, nargs=accepts.length, **value, **options)


def _dashes(word: str) -> str:
    """--batch_size is --batch-size."""
    name, equals, value = word.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}" if word.startswith("--") else word


# ---- --help and --help-all


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Flags are not broken at their hyphens."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)


def _help(command: str, description: str, sections: list[Section], *, everything: bool) -> str:
    """Without `everything`, only common flags, if a command marks any, and their first sentences."""
    width = max(min(shutil.get_terminal_size().columns, WIDEST), NARROWEST)
    flags = [flag for section in sections for flag in section.flags]
    short = not everything and any(flag.common for flag in flags)
    wrapped = partial(textwrap.fill, width=width, break_on_hyphens=False)
    paragraphs = description.strip("\n").split("\n\n")
    arguments = [f"{flag.name} ..." if flag.accepts.length == 0 else flag.name for flag in flags if flag.positional]
    parser = _Parser(
        command,
        usage=" ".join(["leanclip", command, *arguments, "[options]"]),
        # Examples and tables are indented and keep their lines.
        description="\n\n".join(text if re.search("^ ", text, re.M) else wrapped(text) for text in paragraphs),
        formatter_class=partial(_Formatter, width=width, max_help_position=6 if width < NARROW else 30),
        epilog=f"leanclip {command} --help-all explains all {len(flags)} settings." if short else None,
    )
    for section in sections:
        group = parser.add_argument_group(section.title, None if short else wrapped(section.about) or None)
        for flag in section.flags:
            if flag.common or flag.positional or not short:
                _add(group, flag, _explanation(flag, short=short))
    return parser.format_help().replace("\N{NO-BREAK SPACE}", " ")


def _explanation(flag: Flag, *, short: bool) -> str:
    """The docstring, or its first sentence, with the default unless that is none or stands in the text."""
    text = f"{flag.help.partition('. ')[0].rstrip('.')}." if short else flag.help
    value = " ".join(map(str, flag.default)) if isinstance(flag.default, tuple) else flag.default
    unsaid = flag.positional or value is None or value == "" or isinstance(value, bool)
    return text if unsaid else f"{text} (default:\N{NO-BREAK SPACE}{value})"

"""Typed command lines from dataclasses.

A field is a flag: its type says what the flag takes, and the docstring under it is its help. A field without a
default is a positional argument. Fields of nested dataclasses are flags like the others, under their own heading.
"""

import argparse
import difflib
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from itertools import chain
from typing import Any, NoReturn, TypeVar, get_type_hints

from leanclip.cli import help
from leanclip.cli.flags import Flag, Section, sections_of
from leanclip.errors import UserError
from leanclip.settings import Accepted

OTHER_NAMES = {  # in other programs
    "--learning-rate": "--lr",
    "--weight-decay": "--wd",
    "--num-workers": "--workers",
    "--num-epochs": "--epochs",
    "--optimizer": "--opt",
    "--warmup-steps": "--warmup",
    "--output-dir": "--logs",
    "--gradient-clipping": "--grad-clip-norm",
    "--temperature": "--tau",
}
HELP = {"-h", "--help", "--help-all"}
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
        sections = sections_of(kind, default)
        help.show(f"leanclip {command}", description, sections, everything="--help-all" in shows_help)
        raise SystemExit(0)
    try:
        return assemble(kind, default, typed)
    except ValueError as error:
        raise UserError(str(error), code="config.bad_value") from error


def typed_values(sections: list[Section], words: list[str], *, command: str, positionals: bool) -> dict[str, Any]:
    """The values that the words give, by field name."""
    parser = _Parser(command)
    flags = list(chain.from_iterable(section.flags for section in sections))
    for flag in flags:
        if positionals or not flag.positional:
            _add(parser, flag)
    values, unknown = parser.parse_known_args(words)
    if unknown and positionals:
        word = next((word for word in unknown if word.startswith("-")), unknown[0])
        if not word.startswith("-"):
            raise UserError(f"unexpected argument {word!r} ({parser.remedy})", code="cli.unexpected_argument")
        name = word.partition("=")[0]
        near = OTHER_NAMES.get(name) or next(iter(difflib.get_close_matches(name, parser.names(), n=1)), None)
        hint = f"; did you mean {near}?" if near else ""
        raise UserError(f"unknown flag {name}{hint} ({parser.remedy})", code="cli.unknown_flag")
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

    def __init__(self, command: str) -> None:
        super().__init__(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
        self.remedy = f"leanclip {command} --help-all lists the flags"

    def names(self) -> list[str]:
        return [name for action in self._actions for name in action.option_strings]

    def error(self, message: str) -> NoReturn:
        required = "the following arguments are required"
        if message.startswith(required):
            raise UserError(f"missing{message.removeprefix(required)} ({self.remedy})", code="cli.missing_argument")
        raise UserError(f"{message.removeprefix('argument ')} ({self.remedy})", code="cli.bad_value")


def _add(parser: argparse.ArgumentParser, flag: Flag) -> None:
    accepts = flag.accepts

    def convert(word: str) -> Any:
        try:
            return accepts.from_word(word)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    options: dict[str, Any] = {"type": convert}
    if flag.positional:
        parser.add_argument(flag.field, metavar=flag.name, nargs="+" if accepts.length == 0 else None, **options)
    elif accepts == Accepted((bool,)):
        parser.add_argument(flag.name, dest=flag.field, action=argparse.BooleanOptionalAction)
    elif accepts.length == 0:
        parser.add_argument(flag.name, dest=flag.field, action="append", **options)
    elif flag.bare is not None:
        parser.add_argument(flag.name, dest=flag.field, nargs="?", const=flag.bare, **options)
    else:
        parser.add_argument(flag.name, dest=flag.field, nargs=accepts.length, **options)


def _dashes(word: str) -> str:
    """--batch_size is --batch-size."""
    name, equals, value = word.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}" if word.startswith("--") else word

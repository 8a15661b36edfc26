"""Typed command lines from dataclasses. The only module that imports tyro.

tyro, because it reads the types, defaults and docstrings that the dataclasses have anyway, flattens nested ones, and
takes a dataclass as the defaults, which is how a recipe or file comes before the flags.
"""

import contextlib
import io
import os
import re
from collections.abc import Iterator
from typing import TypeVar

import tyro

from leanclip.cli import help
from leanclip.errors import UserError

OTHER_NAMES = {  # what other programs call them
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
T = TypeVar("T")
Positional = tyro.conf.Positional
arg = tyro.conf.arg


def parse(kind: type[T], arguments: list[str], *, command: str, description: str, default: T | None = None) -> T:
    """Build `kind` from flags over `default`. Every mistake becomes a one-line UserError."""
    complaint, told = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint), contextlib.redirect_stdout(told), _columns(help.COLUMNS):
            return tyro.cli(
                kind,
                args=arguments,
                prog=f"leanclip {command}",
                description=description,
                default=tyro.MISSING_NONPROP if default is None else default,
                config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff, tyro.conf.UseAppendAction),
            )
    except SystemExit as stop:
        if not stop.code:
            asked = {"-h", "--help"} & set(arguments)
            help.show(told.getvalue()) if asked else print(told.getvalue(), end="")
            raise
        said = one_line(complaint.getvalue())
        if "did you mean" not in said and (
            ours := next((OTHER_NAMES[a] for a in arguments if a in OTHER_NAMES), None)
        ):
            said = f"{said}; did you mean {ours}?"
        raise UserError(f"{said} (leanclip {command} --help lists the flags)") from None
    except ValueError as error:
        raise UserError(str(error)) from error


@contextlib.contextmanager
def _columns(width: int) -> Iterator[None]:
    """As if the terminal were that wide."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(width)
    try:
        yield
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before


def one_line(boxed: str) -> str:
    """tyro's boxed complaint as a sentence: the first paragraph, and its nearest flag."""
    if "Missing from leanclip" in boxed:
        return f"missing: {' and '.join(re.findall(r'^ {6}([A-Z]+) *$', boxed, flags=re.MULTILINE))}"
    plain = re.sub(r"\[/?[a-z ]+\]", "", boxed)
    lines = [re.sub(r"^[│╭╮╰╯─|+\s]+|[│╭╮╰╯─|+\s]+$|^-{3,}$|-{5,}", "", line).strip() for line in plain.splitlines()]
    text = [line for line in lines[1:] if line]
    if "Perhaps you meant:" in text:
        at = text.index("Perhaps you meant:")
        nearest = text[at + 1].split()[0] if at + 1 < len(text) else ""
        return f"{' '.join(text[:at])}; did you mean {nearest}?"
    ends = ("Argument helptext", "For full helptext", "Got errors")
    end = next((i for i, line in enumerate(text) if line.startswith(ends)), None)
    sentence = " ".join(text[:end])
    unread = re.match(r"Error parsing (\S+): no type matching (.+?) could be instantiated from \[(.*)\]", sentence)
    if unread:
        flag, kind, value = unread.groups()
        return f"{flag} {value}: expected {kind.replace('{None}|', '').strip('{}')}"
    return re.sub(r"^Error parsing (settings\.\w+|\w+Command): ", "", sentence) or boxed.strip()

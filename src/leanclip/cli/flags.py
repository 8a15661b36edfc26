"""The fields of a dataclass as the flags of a command: names, types, defaults and help texts."""

import ast
import inspect
import textwrap
from dataclasses import MISSING, fields, is_dataclass
from itertools import pairwise
from typing import Any, NamedTuple, get_type_hints

from leanclip.settings import Accepted


class Flag(NamedTuple):
    """A field as the command line shows it."""

    field: str
    accepts: Accepted
    help: str
    default: Any
    common: bool

    @property
    def positional(self) -> bool:
        return self.default is MISSING

    @property
    def name(self) -> str:
        return self.field.upper() if self.positional else f"--{self.field.replace('_', '-')}"

    @property
    def bare(self) -> Any:
        """The value of the flag alone, where it may stand alone."""
        return True if bool in self.accepts.kinds else "on" if "on" in self.accepts.choices else None


class Section(NamedTuple):
    title: str
    about: str
    flags: list[Flag]


def sections_of(
    kind: type, default: Any = None, title: str = "Options", about: str = "", *, common: bool = True
) -> list[Section]:
    """The flags of a dataclass, under headings: arguments, its own flags, then those of each nested dataclass."""
    hints, texts = get_type_hints(kind), field_texts(kind)
    flags: list[Flag] = []
    nested: list[Section] = []
    for entry in fields(kind):
        hint, value = hints[entry.name], getattr(default, entry.name, entry.default)
        if is_dataclass(hint):
            assert isinstance(hint, type)
            text = inspect.cleandoc(hint.__doc__ or "")
            heading, rest = (entry.name.capitalize(), text) if text.endswith(".") else (text, "")
            inner = hint() if value is MISSING else value
            shown = common and entry.metadata.get("common", True)
            nested += sections_of(hint, inner, heading, rest, common=shown)
        else:
            shown = common and entry.metadata.get("common", False)
            flags.append(Flag(entry.name, Accepted.of(hint), texts.get(entry.name, ""), value, shown))
    positionals = [flag for flag in flags if flag.positional]
    options = [flag for flag in flags if not flag.positional]
    sections = [Section("Arguments", "", positionals), Section(title, about, options), *nested]
    return [section for section in sections if section.flags]


def field_texts(kind: type) -> dict[str, str]:
    """The docstrings under the fields of a dataclass, each as one line."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    texts = {}
    for entry, text in pairwise(definition.body):
        if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name) and isinstance(text, ast.Expr):
            texts[entry.target.id] = " ".join(ast.literal_eval(text.value).split())
    return texts

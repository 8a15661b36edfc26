"""Configurations as files: TOML whose keys are the flags.

A run is a recipe, a TOML file, flags, or any mix: each overrides the one before. `TrainConfig` is a tree of the
components' own dataclasses; on the outside it is flat, because field names are unique over the tree.
"""

import difflib
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import tomli_w

from leanclip.errors import UserError
from leanclip.runs import TrainConfig

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["TrainConfig", "flatten", "load_toml", "override", "save_toml"]


def flatten(config: TrainConfig) -> dict[str, Any]:
    """All values by flag name; the open ones (None) are left out."""
    flat = {}
    for part in fields(config):
        component = getattr(config, part.name)
        assert is_dataclass(component)
        for entry in fields(component):
            value = getattr(component, entry.name)
            if value is not None:
                flat[entry.name] = list(value) if isinstance(value, tuple) else value
    return flat


def override(config: TrainConfig, values: Mapping[str, Any], source: str) -> TrainConfig:
    """The configuration with these values, checked against the fields' types."""
    owners = {entry.name: part.name for part in fields(TrainConfig) for entry in fields(getattr(config, part.name))}
    changes: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        if name not in owners:
            near = difflib.get_close_matches(name, owners, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; the keys are {', '.join(sorted(owners))}"
            raise UserError(f"{source}: unknown key {name!r}{hint}")
        component = type(getattr(config, owners[name]))
        changes.setdefault(owners[name], {})[name] = _typed(component, name, value, source)
    given = changes.get("data", {})
    for one, other in (("batch_size", "global_batch_size"), ("global_batch_size", "batch_size")):
        if one in given and other not in given:
            given[other] = None  # a later source says it the other way
    try:
        return replace(config, **{part: replace(getattr(config, part), **new) for part, new in changes.items()})
    except ValueError as error:
        raise UserError(f"{source}: {error}") from error


def load_toml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"no such config file: {path}")
    try:
        return tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid TOML: {error}") from error


def save_toml(config: TrainConfig, path: Path) -> None:
    path.write_text(tomli_w.dumps(flatten(config)))


def _typed(component: type, name: str, value: Any, source: str) -> Any:
    """The value as the field's type, or an error that says what is allowed."""
    hint = get_type_hints(component)[name]
    options = [option for option in (get_args(hint) or (hint,)) if option is not type(None)]
    literals = [item for option in (hint, *options) for item in get_args(option) if isinstance(item, str)]
    if literals:
        if value in literals:
            return value
        raise UserError(f"{source}: {name} is {value!r}; choose from {', '.join(literals)}")
    if isinstance(value, list):
        if hint == tuple[str, ...]:
            if not all(type(item) is str for item in value):
                raise UserError(f"{source}: {name} is {value!r}; expected a list of texts")
            return tuple(value)
        items = next((get_args(option) for option in options if get_args(option)), ())
        if len(value) != len(items) or not all(type(item) in (int, float) for item in value):
            raise UserError(f"{source}: {name} is {value!r}; expected {len(items) or 'no'} numbers")
        return tuple(float(item) for item in value)
    if float in options and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    expected = tuple(
        {tuple if get_args(option) else option for option in options if isinstance(option, type) or get_args(option)}
    )
    if type(value) not in expected:
        names = " or ".join(getattr(option, "__name__", str(option)) for option in options)
        raise UserError(f"{source}: {name} is {value!r}; expected {names}")
    return value

"""Configurations as files: TOML whose keys are the flags.

A run is a recipe, a TOML file, flags, or any mix: each overrides the one before. `TrainConfig` is a tree of the
components' own dataclasses; on the outside it is flat, because field names are unique over the tree.
"""

import difflib
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import tomli_w

from leanclip.errors import UserError
from leanclip.filesystem import write_atomically
from leanclip.runs import TrainConfig
from leanclip.settings import Accepted

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["TrainConfig", "flatten", "load_toml", "override", "save_toml"]


def flatten(config: TrainConfig) -> dict[str, Any]:
    """All values by flag name, without those that are None."""
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
            raise UserError(f"{source}: unknown key {name!r}{hint}", code="config.unknown_key")
        component = type(getattr(config, owners[name]))
        changes.setdefault(owners[name], {})[name] = _checked(component, name, value, source)
    batch = changes.get("data", {})
    for name, other in (("batch_size", "global_batch_size"), ("global_batch_size", "batch_size")):
        if name in batch:
            batch.setdefault(other, None)  # this source replaces the batch size of the one before
    try:
        return replace(config, **{part: replace(getattr(config, part), **new) for part, new in changes.items()})
    except ValueError as error:
        raise UserError(f"{source}: {error}", code="config.bad_value") from error


def load_toml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"no such config file: {path}", code="config.not_found")
    try:
        return tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid TOML: {error}", code="config.bad_toml") from error


def save_toml(config: TrainConfig, path: Path) -> None:
    write_atomically(path, tomli_w.dumps(flatten(config)))


def _checked(component: type, name: str, value: Any, source: str) -> Any:
    """The value as the field's type."""
    try:
        return Accepted.of(get_type_hints(component)[name]).from_toml(value)
    except ValueError as error:
        raise UserError(f"{source}: {name} is {error}", code="config.bad_value") from None

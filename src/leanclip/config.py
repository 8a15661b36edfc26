"""Configurations as files: TOML whose keys are the flags.

A run is a recipe, a TOML file, flags, or any mix: each overrides the one before. `TrainConfig` is a tree of the
components' own dataclasses; on the outside it is flat, because field names are unique over the tree.
"""

import difflib
import sys
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import tomli_w

from leanclip.errors import UserError, first_line
from leanclip.filesystem import read_bounded, write_atomically
from leanclip.losses import LossConfig
from leanclip.runs import TrainConfig
from leanclip.runs.config import AUTO_LOSS
from leanclip.runs.defaults import loss_name
from leanclip.settings import OTHER_NAMES, Accepted

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["TrainConfig", "load_toml", "override", "save_toml", "yielding"]

# Settings that say the same in two ways, with the part of the configuration that holds them.
ALTERNATIVES = (
    ("data", "batch_size", "global_batch_size"),
    ("run", "save_frequency", "save_every"),
    ("run", "val_frequency", "eval_every"),
)


def yielding(config: TrainConfig, values: Mapping[str, Any]) -> TrainConfig:
    """The configuration without what these values replace: another spelling, or what belongs to another loss."""
    for part, *names in ALTERNATIVES:
        unset = {other: None for name, other in (names, names[::-1]) if name in values}
        config = replace(config, **{part: replace(getattr(config, part), **unset)})
    other_loss = values.get("loss", AUTO_LOSS) not in (AUTO_LOSS, loss_name(config))
    return replace(config, loss=LossConfig()) if other_loss else config


def override(config: TrainConfig, values: Mapping[str, Any], source: str) -> TrainConfig:
    """The configuration with these values, checked against the fields' types."""
    config = yielding(config, values)
    owners = {entry.name: part.name for part in fields(TrainConfig) for entry in fields(getattr(config, part.name))}
    changes: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        if name not in owners:
            flag = OTHER_NAMES.get("--" + name.replace("_", "-"))
            near = [flag[2:].replace("-", "_")] if flag else difflib.get_close_matches(name, owners, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; the keys are {', '.join(sorted(owners))}"
            raise UserError(f"{source}: unknown key {name!r}{hint}", code="config.unknown_key")
        hints = get_type_hints(type(getattr(config, owners[name])))
        try:
            changes.setdefault(owners[name], {})[name] = Accepted.of(hints[name]).from_toml(value)
        except ValueError as error:
            raise UserError(f"{source}: {name} is {error}", code="config.bad_value") from None
    try:
        return replace(config, **{part: replace(getattr(config, part), **new) for part, new in changes.items()})
    except ValueError as error:
        raise UserError(f"{source}: {error}", code="config.bad_value") from error


def load_toml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"no such config file: {path}", code="config.not_found")
    try:
        return tomllib.loads(read_bounded(path).decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid TOML ({first_line(error)})", code="config.bad_toml") from error


def save_toml(config: TrainConfig, path: Path) -> None:
    """Without the settings that are None, which TOML does not have."""
    values = {name: value for name, value in config.values().items() if value is not None}
    write_atomically(path, tomli_w.dumps(values))

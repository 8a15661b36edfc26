"""The command line of a benchmark: its flags as a table, and a quick form that keeps nothing."""

import argparse
import atexit
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

INTERNAL = argparse.SUPPRESS  # the help of a flag that a script gives to its own processes


class Flag(NamedTuple):
    default: Any
    help: str | None = None
    choices: Iterable[Any] | None = None
    kind: type = str  # of the value, where the default has none

    @property
    def options(self) -> dict[str, Any]:
        """As argparse takes them."""
        common = {"default": self.default, "help": self.help}
        if isinstance(self.default, bool):
            return common | {"action": argparse.BooleanOptionalAction}
        values = self.default if isinstance(self.default, list) else [self.default]
        kinds = [type(value) for value in values if value is not None]
        several = {"nargs": "*"} if values is self.default else {}
        return common | several | {"choices": self.choices, "type": kinds[0] if kinds else self.kind}


def command_line(
    description: str | None,
    argv: Sequence[str] | None = None,
    *,
    quick: Mapping[str, Any] | None = None,
    **flags: Any,
) -> argparse.Namespace:
    """Of each flag a Flag or its default, whose type its value has. With --quick those in `quick` have these values,
    and what is written to `output` is removed at the end."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes on any machine; nothing is kept")
    for name, flag in flags.items():
        options = (flag if isinstance(flag, Flag) else Flag(flag)).options
        parser.add_argument(f"--{name.replace('_', '-')}", **options)
    arguments = parser.parse_args(argv)
    if arguments.quick:
        vars(arguments).update(quick or {})
        if "output" in flags:
            arguments.output = temporary_folder() / Path(arguments.output).name
    return arguments


def temporary_folder() -> Path:
    """Removed when the program ends."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)

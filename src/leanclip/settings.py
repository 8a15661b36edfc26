"""Fields of the configuration dataclasses: the values that they accept, and marks for --help and --resume."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

LARGEST = 2**63 - 1
T = TypeVar("T")

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


class Limits(NamedTuple):
    """The numbers that a field accepts."""

    allowed: str  # in words, after "it must be"
    contains: Callable[[float], bool]


def at_least(low: float) -> Limits:
    return Limits(f"at least {low:g}", lambda value: value >= low)


def between(low: float, high: float) -> Limits:
    return Limits(f"from {low:,} to {high:,}", lambda value: low <= value <= high)


POSITIVE = Limits("positive and finite", lambda value: 0 < value < math.inf)


def check_limits(config: Any) -> None:
    """A ValueError for a field whose value lies beyond its limits."""
    for entry in fields(config):
        limits, value = entry.metadata.get("limits"), getattr(config, entry.name)
        if limits is not None and value is not None and not limits.contains(value):
            raise ValueError(f"{entry.name} is {value}; it must be {limits.allowed}")


def setting(
    default: T,
    *,
    common: bool = False,
    limits: Limits | None = None,
    resume: Literal["noted", "free", "fixed", "fixed_unless_reset"] = "noted",
) -> T:
    """A field with marks.

    Args:
        default: of the field.
        common: `--help` shows it; the others are in `--help-all` only.
        limits: of its values other than None, for `check_limits`.
        resume: a resumed run may change it with a note, without one (free), not at all (fixed), or only with
            --reset-loss-state.
    """
    return field(default=default, metadata={"common": common, "limits": limits, "resume": resume})


def common(default: T, limits: Limits | None = None) -> T:
    """A field that `--help` shows."""
    return setting(default, common=True, limits=limits)


@dataclass(frozen=True)
class Accepted:
    """The values that a field accepts, read from its type."""

    kinds: tuple[type, ...]  # scalar types, in the order in which a word is tried
    choices: tuple[str, ...] = ()
    length: int | None = None  # of a tuple; 0 for any length
    optional: bool = False

    @classmethod
    def of(cls, hint: Any) -> "Accepted":
        options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        optional = NoneType in options
        options = tuple(option for option in options if option is not NoneType)
        items = get_args(options[0])
        if get_origin(options[0]) is Literal:
            return cls((str,), choices=items, optional=optional)
        if get_origin(options[0]) is tuple:
            return cls(items[:1], length=0 if items[-1] is Ellipsis else len(items), optional=optional)
        return cls(options, optional=optional)

    @property
    def described(self) -> str:
        """For messages and --help: FLOAT FLOAT, INT or {on,off}."""
        kinds = [kind.__name__.upper() for kind in self.kinds if kind is not bool] or ["{True,False}"]
        return f"{{{','.join(self.choices)}}}" if self.choices else " ".join(kinds * (self.length or 1))

    def from_word(self, word: str) -> Any:
        """A word of the command line as one value of this type; `None` unsets an optional field."""
        if word == "None" and self.optional:
            return None
        for kind in self.kinds:
            try:
                value = {"True": True, "False": False}[word] if kind is bool else kind(word)
            except (KeyError, ValueError):
                continue
            return self._checked(value)
        raise ValueError(f"{word[:80]!r}; expected {self.described}")

    def from_toml(self, value: Any) -> Any:
        """A value of a TOML file, checked; lists become tuples, and whole numbers floats where floats are due."""
        if self.length is None:
            return self._scalar(value)
        if not isinstance(value, list) or len(value) != (self.length or len(value)):
            raise ValueError(f"{repr(value)[:80]}; expected a list of {self.length or 'any number of'} values")
        return tuple(self._scalar(item) for item in value)

    def _scalar(self, value: Any) -> Any:
        if float in self.kinds and type(value) is int and abs(value) <= LARGEST:
            value = float(value)
        if type(value) not in self.kinds:
            raise ValueError(f"{repr(value)[:80]}; expected {self.described}")
        return self._checked(value)

    def _checked(self, value: Any) -> Any:
        """A value of the right type: one of the choices, a number that can be computed with, or printable text."""
        if self.choices and value not in self.choices:
            raise ValueError(f"{value!r}; expected {self.described}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{value}; expected a finite number")
        if isinstance(value, int) and abs(value) > LARGEST:
            raise ValueError(f"{str(value)[:20]}...; expected a number of at most 64 bits")
        if isinstance(value, str) and ("\0" in value or any("\ud800" <= letter <= "\udfff" for letter in value)):
            raise ValueError(f"{value[:80]!r}; expected text in UTF-8")
        return value

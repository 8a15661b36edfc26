"""OpenCLIP's command lines: every flag of open_clip_train 3.3.0, and its replacement in `leanclip train`.

openclip_flags.md is the one source; docs/from-openclip.md contains it. A name followed by X takes a value; flags that
leanclip has by the same name have no X. A translated flag without a rule here becomes the flags that its text begins
with.
"""

import ast
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

from leanclip.distributed import detect_launch
from leanclip.errors import UserError
from leanclip.losses import LOSSES
from leanclip.losses.registry import spec_of
from leanclip.runs import TrainConfig

# OpenCLIP's defaults that differ from leanclip's.
DEFAULTS = {
    "model": "RN50", "batch-size": "64", "lr": "5e-4", "wd": "0.2", "precision": "amp", "workers": "4",
    "save-frequency": "1", "val-frequency": "1",
}  # fmt: skip
WARMUP = 10_000  # OpenCLIP's default, which a short run refuses
SPELLINGS = {"bf16": "amp_bf16", "pure_bf16": "amp_bf16", "fp16": "amp", "pure_fp16": "amp"}
TABLE = Path(__file__).with_suffix(".md").read_text(encoding="utf-8")
OURS = {
    entry.name.replace("_", "-")
    for part in fields(TrainConfig())
    for entry in fields(getattr(TrainConfig(), part.name))
}
AUGMENTATION = {name.removeprefix("aug-").replace("-", "_"): name for name in OURS if name.startswith("aug-")}
Values = dict[str, list[str]]  # of flags, by names without dashes in front and with dashes inside


class Flag(NamedTuple):
    """A flag of OpenCLIP, and a text about it for the documentation and for notes."""

    name: str
    status: str  # honoured, translated, ignored or refused
    text: str
    takes_value: bool


def _flag(row: str) -> Flag:
    name, status, text = row.strip("| ").split(" | ")
    name, _, value = name.strip("`-").partition(" ")
    return Flag(name, status, text.replace("`", ""), bool(value))


FLAGS = tuple(_flag(row) for row in TABLE.splitlines())
BY_NAME = {flag.name: flag for flag in FLAGS}


def mistake(text: str) -> UserError:
    return UserError(text, code="openclip.bad_value")


class Line(NamedTuple):
    """A command line by flag; the last of several wins."""

    flags: Values
    loose: list[str]  # words before the first flag, which the parser refuses

    @classmethod
    def of(cls, arguments: list[str]) -> "Line":
        line = cls({}, [])
        values = line.loose
        for word in arguments:
            if re.match(r"--[A-Za-z]", word):
                name, equals, value = word.removeprefix("--").partition("=")
                values = line.flags[name.replace("_", "-")] = [value] if equals else []
            else:
                values.append(word)
        return line

    @property
    def foreign(self) -> bool:
        """Whether it has flags that only OpenCLIP has."""
        return any(name in BY_NAME and name not in OURS for name in self.flags)

    def arguments(self) -> list[str]:
        words = list(self.loose)
        for name, values in self.flags.items():
            joined = len(values) == 1 and values[0].startswith("-")  # a value that looks like a flag
            words += [f"--{name}={values[0]}"] if joined else [f"--{name}", *values]
        return words

    def value(self, name: str) -> str:
        return next(iter(self.flags.get(name, ())), "")

    def number(self, name: str, default: int) -> int:
        """The value of a flag as a whole number, which may be written 4e8."""
        try:
            return int(float(self.value(name) or default))
        except (ValueError, OverflowError):
            raise mistake(f"--{name} {self.value(name)}: expected a number") from None


# ---- Rules of flags for which the table is not enough: the flags that replace one, or nothing.


def _data(line: Line, name: str) -> Values:
    """webdataset's pipes become the URLs inside them, which are read directly."""
    parts = line.value(name).split("::")
    for number, part in enumerate(parts):
        if part.startswith("pipe:"):
            urls = [word for word in part.split() if re.match(r"(s3|gs|gcs|https?|hdfs)://", word)]
            if len(urls) != 1:
                raise mistake(f"{part}: commands in a pipe: are not run; give files or URLs (s3://, gs://, https://)")
            parts[number] = urls[0]
    return {name: ["::".join(parts)]}


def _dataset_type(line: Line, name: str) -> Values:
    synthetic = line.value(name) == "synthetic"
    return {"train-data": [f"synthetic:{line.number('train-num-samples', 100)}"]} if synthetic else {}


def _dataset_resampled(line: Line, name: str) -> Values:
    """A run with replacement is as long as its virtual epochs, which are not passes over the data. As many epochs as
    steps are enough for any data: --max-steps ends the run."""
    count, epochs = line.number("train-num-samples", 0), line.number("epochs", TrainConfig().run.epochs)
    batch = line.number("batch-size", 0) * line.number("accum-freq", 1) * detect_launch().size
    if not count or not batch or "max-steps" in line.flags:
        return {}
    steps = str(epochs * max(1, count // batch))
    return {"max-steps": [steps], "epochs": [steps]}


def _accum_freq(line: Line, name: str) -> Values:
    """OpenCLIP multiplies the batch by it, and computes it in micro-batches of the old batch size."""
    times, batch = line.number(name, 1), line.number("batch-size", int(DEFAULTS["batch-size"]))
    return {"batch-size": [str(times * batch)], "micro-batch": [str(batch)]} if times != 1 else {}


def _spelling(line: Line, name: str) -> Values:
    """Other names of precisions, and timm's optimizers without their prefix."""
    value = line.value(name).removeprefix("timm/")
    return {name: [SPELLINGS.get(value, value)]}


def _eps(line: Line, name: str) -> Values:
    """leanclip's --eps belongs to the loss. OpenCLIP's is meant on a line of OpenCLIP, and if the loss has none."""
    loss = line.value("loss")
    of_loss = not line.foreign if not loss else loss in LOSSES and spec_of(loss).defaults.eps is not None
    return {name if of_loss else "eps-opt": line.flags[name]}


def _cooldown(line: Line, name: str) -> Values:
    """OpenCLIP ignores the flags of a cooldown that it does not make."""
    made = line.value("lr-scheduler") == "const-cooldown"
    return {"lr-floor" if name == "lr-cooldown-end" else name: line.flags[name]} if made else {}


def _resume(line: Line, name: str) -> Values:
    """`latest` without a checkpoint starts a run, so that a job script can be submitted again and again."""
    if line.value(name) != "latest" or not line.foreign:
        return {name: line.flags[name]}
    checkpoints = Path(line.value("logs") or "logs") / line.value("name") / "checkpoints"
    theirs = sorted(checkpoints.glob("epoch_*.pt"), key=lambda path: (len(path.name), path.name))
    return {name: [str(theirs[-1]) if theirs and not any(checkpoints.glob("step_*")) else "auto"]}


def _sizes(line: Line, name: str) -> Values:
    """One number for three channels, and one for the two sides of an image."""
    values, count = line.flags[name], 1 if name == "force-image-size" else 3
    if count == 1 and len(set(values)) > 1:
        raise mistake(f"--{name} {' '.join(values)}: only square images are supported; give one number")
    return {name: values[:1] * count if len(set(values)) == 1 else values}


def _logs(line: Line, name: str) -> Values:
    if line.value(name).lower() == "none":
        raise mistake("--logs none: a run needs a directory for its checkpoints; give one")
    return {name: line.flags[name]}


def _aug_cfg(line: Line, name: str) -> Values:
    """Words such as scale='(0.9, 1.0)'."""
    flags: Values = {}
    for word in line.flags[name]:
        key, _, text = word.partition("=")
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            raise mistake(f"--aug-cfg {word}: expected KEY=VALUE, such as scale='(0.9, 1.0)'") from None
        if value not in (None, False):
            if key not in AUGMENTATION:
                raise mistake(f"--aug-cfg {key}: choose from {', '.join(AUGMENTATION)}; timm's are not supported")
            flags[AUGMENTATION[key]] = [str(item) for item in (value if isinstance(value, tuple | list) else [value])]
    return flags


def _translated(line: Line, name: str) -> Values:
    """The flags that the text begins with; one without a value takes over this flag's."""
    flags = Line.of(BY_NAME[name].text.split()).flags
    return {flag: line.flags[name] if BY_NAME[name].takes_value else values for flag, values in flags.items()}


RULES: dict[str, Callable[[Line, str], Values]] = {
    "train-data": _data,
    "val-data": _data,
    "train-num-samples": lambda line, name: {name: [str(line.number(name, 0))]},
    "dataset-type": _dataset_type,
    "dataset-resampled": _dataset_resampled,
    "logs": _logs,
    "epochs-cooldown": _cooldown,
    "lr-cooldown-end": _cooldown,
    "eps": _eps,
    "opt": _spelling,
    "resume": _resume,
    "precision": _spelling,
    "pretrained": lambda line, name: {name: line.flags[name]} if line.value(name) else {},
    "image-mean": _sizes,
    "image-std": _sizes,
    "aug-cfg": _aug_cfg,
    "force-image-size": _sizes,
    "accum-freq": _accum_freq,
}
BY_STATUS: dict[str, Callable[[Line, str], Values]] = {
    "honoured": lambda line, name: {name: line.flags[name]},
    "translated": _translated,
    "ignored": lambda line, name: {},
}


def from_openclip(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The command line in leanclip's flags, and notes about what changed.

    A line without flags that only OpenCLIP has is returned unchanged, except for values that OpenCLIP spells
    differently.
    """
    line = Line.of(arguments)
    before, foreign, notes = dict(line.flags), line.foreign, dict[str, list[str]]()
    standalone = not line.flags.keys() & {"recipe", "config"}
    has_data = "train-data" in line.flags or line.value("dataset-type") == "synthetic"
    if standalone and not has_data and line.flags.keys() & {"val-data", "imagenet-val", "imagenet-v2"}:
        text = "without --train-data OpenCLIP only evaluates; use `leanclip evaluate`"
        raise UserError(text, code="openclip.evaluation_only")
    replacements = {flag.name: _replacement(flag, line) for flag in FLAGS if flag.name in line.flags}
    for name, values in replacements.items():
        if values != {name: before[name]}:
            del line.flags[name]
            line.flags.update(values)
            texts = [f"becomes {' '.join([f'--{new}', *words])}" for new, words in values.items()]
            for text in texts or [f"is ignored: {BY_NAME[name].text}"]:
                notes.setdefault(text, []).append(f"--{name}")
    if standalone and foreign:
        typed = line.flags.keys() | ({"batch-size"} if "global-batch-size" in line.flags else set())
        if others := [f"--{name} {value}" for name, value in DEFAULTS.items() if name not in typed]:
            text = f"other settings have leanclip's defaults; for OpenCLIP's add {' '.join(others)}"
            longer = f" and, in a run of more steps, --warmup {WARMUP}" if "warmup" not in typed else ""
            notes[text + longer] = []
        if "loss" not in typed and "pretrained" not in typed:
            notes["the loss is fastclip-v3, which is not OpenCLIP's; --loss infonce is"] = []
    words = arguments if line.flags == before else line.arguments()
    return words, [f"{', '.join(names)} {text}".strip() for text, names in notes.items()]


def _replacement(flag: Flag, line: Line) -> Values:
    if flag.name not in OURS and flag.takes_value == (not line.flags[flag.name]):
        takes, values = "one value" if flag.takes_value else "no value", " ".join(line.flags[flag.name]) or "none"
        raise mistake(f"--{flag.name} takes {takes}, not {values}")
    if len(line.flags[flag.name]) > 1 and RULES.get(flag.name) not in (None, _sizes, _aug_cfg):
        hint = "; put a pattern in quotes" if flag.name.endswith("-data") else ""
        text = f"unexpected argument {line.flags[flag.name][1]!r}: --{flag.name} takes one value"
        raise UserError(text + hint, code="cli.unexpected_argument")
    if flag.status == "refused":
        raise UserError(f"OpenCLIP's --{flag.name} is not supported: {flag.text}", code="openclip.refused")
    return RULES.get(flag.name, BY_STATUS[flag.status])(line, flag.name)

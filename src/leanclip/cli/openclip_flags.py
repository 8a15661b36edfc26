"""OpenCLIP's command lines: every flag of open_clip_train 3.3.0, and its replacement in `leanclip train`.

openclip_flags.txt is the one source: `from_openclip` rewrites a command line by it, and
`python -m leanclip.cli.openclip_flags docs/from-openclip.md` writes it into the documentation.
"""

import ast
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import NamedTuple

from leanclip.distributed import detect_launch
from leanclip.errors import UserError
from leanclip.losses import LOSSES
from leanclip.losses.registry import spec_of
from leanclip.runs import TrainConfig

START, END = "<!-- table: python -m leanclip.cli.openclip_flags docs/from-openclip.md -->", "<!-- end of table -->"

# OpenCLIP's defaults that differ from leanclip's.
DEFAULTS = {
    "loss": "infonce", "model": "RN50", "batch-size": "64", "lr": "5e-4", "wd": "0.2", "warmup": "10000",
    "precision": "amp", "workers": "4", "save-frequency": "1", "val-frequency": "1",
}  # fmt: skip
AUGMENTATION = {
    "scale": "aug-scale",
    "color_jitter": "aug-color-jitter",
    "color_jitter_prob": "aug-color-jitter-prob",
    "gray_scale_prob": "aug-gray-scale-prob",
}
PRECISIONS = {"bf16": "amp_bf16", "pure_bf16": "amp_bf16", "fp16": "amp", "pure_fp16": "amp"}


class Flag(NamedTuple):
    """A flag of OpenCLIP, and a text about it for the documentation and for notes."""

    name: str
    status: str  # honoured, translated, ignored or refused
    text: str
    takes_value: bool

    @classmethod
    def of(cls, row: str) -> "Flag":
        name, status, text = (cell.strip() for cell in row.split("|"))
        return cls(name.removesuffix("="), status, text, name.endswith("="))


TABLE = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
FLAGS = tuple(Flag.of(row) for row in TABLE.splitlines() if not row.startswith("#"))
BY_NAME = {flag.name: flag for flag in FLAGS}
OURS = {
    entry.name.replace("_", "-")
    for part in fields(TrainConfig())
    for entry in fields(getattr(TrainConfig(), part.name))
}
OURS_OUTSIDE_SETTINGS = {"recipe", "config", "dry-run", "profile", "help", "help-all"}


def mistake(text: str) -> UserError:
    return UserError(text, code="openclip.bad_value")


@dataclass
class Line:
    """A command line by flag, without dashes in front and with dashes inside; the last of several wins."""

    flags: dict[str, list[str]]
    loose: list[str]  # words before the first flag, which the parser refuses
    notes: dict[str, list[str]] = field(default_factory=dict)  # flags by note
    foreign: bool = False  # has flags that only OpenCLIP has

    @classmethod
    def of(cls, arguments: list[str]) -> "Line":
        flags: dict[str, list[str]] = {}
        loose: list[str] = []
        values = loose
        for word in arguments:
            if re.match(r"--[A-Za-z]", word):
                name, equals, value = word.removeprefix("--").partition("=")
                name = name.replace("_", "-")
                flags.pop(name, None)
                values = flags[name] = [value] if equals else []
            else:
                values.append(word)
        return cls(flags, loose)

    def arguments(self) -> list[str]:
        words = list(self.loose)
        for name, values in self.flags.items():
            joined = len(values) == 1 and values[0].startswith("-")  # a value that looks like a flag
            words += [f"--{name}={values[0]}"] if joined else [f"--{name}", *values]
        return words

    def note(self, name: str, text: str) -> None:
        self.notes.setdefault(text, []).append(f"--{name}")

    def set(self, name: str, *values: str, because: str) -> None:
        """Give a flag of ours these values, with a note at the flag of OpenCLIP that they come from."""
        self.flags[name] = list(values)
        self.note(because, f"becomes {' '.join([f'--{name}', *values])}")

    def value(self, name: str) -> str | None:
        values = self.flags.get(name)
        return values[0] if values else None

    def take(self, name: str) -> str:
        """The value of a flag, which is removed."""
        values = self.flags.pop(name)
        if len(values) != 1:
            raise mistake(f"--{name} takes one value, not {len(values)}")
        return values[0]

    def number(self, name: str, default: int) -> int:
        """The value of a flag as a whole number, which may be written 4e8."""
        value = self.value(name)
        try:
            return default if value is None else int(float(value))
        except ValueError:
            raise mistake(f"--{name} {value}: expected a number") from None


# ---- Rules of flags for which the table is not enough. A rule changes the line and adds notes.


def _data(line: Line, name: str) -> None:
    """webdataset's pipes become the URLs inside them, which are read directly."""
    data = line.value(name) or ""
    if "pipe:" in data:
        line.flags[name] = ["::".join(_without_pipe(part) for part in data.split("::"))]
        line.note(name, "is read without the command of its pipe:")


def _without_pipe(data: str) -> str:
    if not data.startswith("pipe:"):
        return data
    urls = [word for word in data.split() if re.match(r"(s3|gs|gcs|https?|hdfs)://", word)]
    if len(urls) != 1:
        raise mistake(f"{data}: commands in a pipe: are not run; give files or URLs (s3://, gs://, https://)")
    return urls[0]


def _sample_count(line: Line, name: str) -> None:
    line.flags[name] = [str(line.number(name, 0))]


def _dataset_type(line: Line, name: str) -> None:
    kind, data = line.take(name), line.value("train-data") or ""
    if kind == "synthetic":
        count = line.number("train-num-samples", 100)
        line.flags.pop("train-num-samples", None)
        line.set("train-data", f"synthetic:{count}", because=name)
    elif kind not in ("webdataset", "csv", "auto"):
        raise mistake(f"--dataset-type {kind}: choose from webdataset, csv, synthetic, auto")
    elif kind != "auto" and data and data.lower().endswith((".csv", ".tsv")) != (kind == "csv"):
        raise mistake(f"--dataset-type {kind} and --train-data {data}: the name of a table ends in .csv or .tsv")
    else:
        line.note(name, "is not needed: the name of the data decides the format")


def _dataset_resampled(line: Line, name: str) -> None:
    """A run with replacement is as long as its virtual epochs, which are not passes over the data."""
    del line.flags[name]
    line.note(name, "is not supported: every epoch visits every sample once, in a new order")
    count, epochs = line.number("train-num-samples", 0), line.number("epochs", TrainConfig().run.epochs)
    batch = line.number("batch-size", 0) * line.number("accum-freq", 1) * detect_launch().size
    if count and batch and "max-steps" not in line.flags:
        line.set("max-steps", str(epochs * max(1, count // batch)), because=name)


def _accum_freq(line: Line, name: str) -> None:
    """OpenCLIP multiplies the batch by it, and computes it in micro-batches of the old batch size."""
    times, batch = line.number(name, 1), line.number("batch-size", int(DEFAULTS["batch-size"]))
    del line.flags[name]
    if times < 1:
        raise mistake(f"--accum-freq {times}: it must be at least 1")
    if times > 1:
        line.set("batch-size", str(times * batch), because=name)
        line.set("micro-batch", str(batch), because=name)


def _precision(line: Line, name: str) -> None:
    if precision := PRECISIONS.get(line.value(name) or ""):
        line.set(name, precision, because=name)


def _eps(line: Line, name: str) -> None:
    """leanclip's --eps belongs to the loss. OpenCLIP's is meant on a line of OpenCLIP, and if the loss has none."""
    loss = line.value("loss")
    loss_has_eps = loss is None or (loss in LOSSES and spec_of(loss).defaults.eps is not None)
    if not loss_has_eps or (line.foreign and loss is None):
        line.set("eps-opt", line.take(name), because=name)


def _opt(line: Line, name: str) -> None:
    if (line.value(name) or "").startswith("timm/"):
        line.set(name, line.take(name).removeprefix("timm/"), because=name)


def _cooldown(line: Line, name: str) -> None:
    """OpenCLIP ignores the flags of a cooldown that it does not make."""
    value = line.take(name)
    if line.value("lr-scheduler") != "const-cooldown":
        line.note(name, "has no effect without --lr-scheduler const-cooldown")
    elif name == "lr-cooldown-end":
        line.set("lr-floor", value, because=name)
    else:
        line.flags[name] = [value]


def _resume(line: Line, name: str) -> None:
    """`latest` without a checkpoint starts a run, so that a job script can be submitted again and again."""
    if line.value(name) != "latest" or not line.foreign:
        return
    run = line.value("name")
    checkpoints = Path(line.value("logs") or "logs") / (run or "") / "checkpoints"
    if run is None:
        del line.flags[name]
        line.note(name, "latest needs --name; this run starts from the beginning")
        return
    saved = sorted(checkpoints.glob("epoch_*.pt"), key=_epoch_of)
    if saved and not any(checkpoints.glob("step_*")):
        line.set(name, str(saved[-1]), because=name)
    else:
        line.set(name, "auto", because=name)


def _epoch_of(path: Path) -> float:
    number = path.stem.removeprefix("epoch_")
    return float(number) if number.isdigit() else float("inf")  # epoch_latest


def _pretrained(line: Line, name: str) -> None:
    if line.flags[name] in ([""], []):
        del line.flags[name]


def _siglip(line: Line, name: str) -> None:
    del line.flags[name]
    if (loss := line.value("loss")) not in (None, "siglip"):
        raise mistake(f"--siglip contradicts --loss {loss}; give one")
    line.set("loss", "siglip", because=name)


def _image_size(line: Line, name: str) -> None:
    values = line.flags[name]
    if len(set(values)) > 1:
        raise mistake(f"--{name} {' '.join(values)}: only square images are supported; give one number")
    line.flags[name] = values[:1]


def _colour_channels(line: Line, name: str) -> None:
    if len(line.flags[name]) == 1:
        line.flags[name] *= 3


def _logs(line: Line, name: str) -> None:
    if (line.value(name) or "").lower() == "none":
        raise mistake("--logs none: a run needs a directory for its checkpoints; give one")


def _aug_cfg(line: Line, name: str) -> None:
    """Words such as scale='(0.9, 1.0)'."""
    for word in line.flags.pop(name):
        key, _, text = word.partition("=")
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            raise mistake(f"--aug-cfg {word}: expected KEY=VALUE, such as scale='(0.9, 1.0)'") from None
        if value in (None, False):
            continue
        if key not in AUGMENTATION:
            raise mistake(f"--aug-cfg {key}: choose from {', '.join(AUGMENTATION)}; timm's are not supported")
        values = value if isinstance(value, tuple | list) else (value,)
        line.set(AUGMENTATION[key], *map(str, values), because=name)


RULES: dict[str, Callable[[Line, str], None]] = {
    "train-data": _data,
    "val-data": _data,
    "train-num-samples": _sample_count,
    "dataset-type": _dataset_type,
    "dataset-resampled": _dataset_resampled,
    "logs": _logs,
    "epochs-cooldown": _cooldown,
    "lr-cooldown-end": _cooldown,
    "eps": _eps,
    "opt": _opt,
    "resume": _resume,
    "precision": _precision,
    "pretrained": _pretrained,
    "image-mean": _colour_channels,
    "image-std": _colour_channels,
    "aug-cfg": _aug_cfg,
    "force-image-size": _image_size,
    "accum-freq": _accum_freq,
    "siglip": _siglip,
}


def from_openclip(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The command line in leanclip's flags, and notes about what changed.

    A line without flags that only OpenCLIP has is returned unchanged, except for values that OpenCLIP spells
    differently.
    """
    line = Line.of(arguments)
    before = dict(line.flags)
    _complete(line)
    line.foreign = any(name in BY_NAME and name not in OURS | OURS_OUTSIDE_SETTINGS for name in line.flags)
    if not line.flags.keys() & {"recipe", "config"}:
        _refuse_evaluation_only(line)
        if line.foreign:
            _note_defaults(line)
    for flag in FLAGS:
        if flag.name in line.flags:
            _apply(flag, line)
    words = arguments if line.flags == before else line.arguments()
    return words, [f"{', '.join(names)} {text}".strip() for text, names in line.notes.items()]


def _apply(flag: Flag, line: Line) -> None:
    values = line.flags[flag.name]
    if flag.name not in OURS and not flag.takes_value and values:
        raise mistake(f"--{flag.name} takes no value, but has {' '.join(values)}")
    if flag.status == "refused":
        raise UserError(f"OpenCLIP's --{flag.name} is not supported: {flag.text}", code="openclip.refused")
    if flag.name in RULES:
        RULES[flag.name](line, flag.name)
    elif flag.status == "ignored":
        del line.flags[flag.name]
        line.note(flag.name, f"is ignored: {flag.text}")
    elif flag.status == "translated":
        del line.flags[flag.name]
        for name, replaced in Line.of(flag.text.strip("`").split()).flags.items():
            line.set(name, *(values if flag.takes_value else replaced), because=flag.name)


def _complete(line: Line) -> None:
    """argparse lets OpenCLIP's users write --save-freq: a prefix of one flag alone is that flag."""
    known = OURS | OURS_OUTSIDE_SETTINGS | set(BY_NAME)
    for name in list(line.flags):
        matches = [flag for flag in known if flag.startswith(name)] if name not in known else []
        if len(matches) == 1 and matches[0] in BY_NAME:
            line.flags = {matches[0] if key == name else key: values for key, values in line.flags.items()}
            line.note(name, f"is read as --{matches[0]}")


def _refuse_evaluation_only(line: Line) -> None:
    if "train-data" in line.flags or line.value("dataset-type") == "synthetic":
        return
    if line.flags.keys() & {"val-data", "imagenet-val", "imagenet-v2"}:
        text = "without --train-data OpenCLIP only evaluates; use `leanclip evaluate`"
        raise UserError(text, code="openclip.evaluation_only")


def _note_defaults(line: Line) -> None:
    typed = line.flags.keys() | ({"loss"} if "siglip" in line.flags else set())
    if "global-batch-size" in typed:
        typed |= {"batch-size"}
    if others := [f"--{name} {value}" for name, value in DEFAULTS.items() if name not in typed]:
        line.notes[f"other settings have leanclip's defaults; for OpenCLIP's add {' '.join(others)}"] = []


def with_table(page: str) -> str:
    """The page with a new table between its markers."""
    rows = [f"| `--{flag.name}` | {flag.status} | {_cell(flag.text)} |" for flag in FLAGS]
    table = "\n".join(["| OpenCLIP's flag | | in leanclip |", "|---|---|---|", *rows])
    before, rest = page.split(START)
    return f"{before}{START}\n{table}\n{END}{rest.split(END)[1]}"


def _cell(text: str) -> str:
    """The text with flags as code."""
    return text if "`" in text else re.sub(r"(?<![\w-])(--[a-z][a-z-]*)", r"`\1`", text)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_table(path.read_text()))

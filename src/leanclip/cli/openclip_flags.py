"""OpenCLIP's command lines: every flag of open_clip_train 3.3.0, and what `leanclip train` makes of it.

FLAGS is the one source: `from_openclip` rewrites a command line by it, and
`python -m leanclip.cli.openclip_flags docs/from-openclip.md` writes it as a table into the documentation.
"""

import ast
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal, NamedTuple

from leanclip.distributed import detect_launch
from leanclip.errors import UserError
from leanclip.losses import LOSSES
from leanclip.losses.registry import spec_of
from leanclip.runs import TrainConfig

Status = Literal["honoured", "translated", "ignored", "refused"]
START, END = "<!-- table: python -m leanclip.cli.openclip_flags docs/from-openclip.md -->", "<!-- end of table -->"

# The flags without a value that we do not have by the same name.
SWITCHES = {
    "dataset-resampled", "log-local", "skip-scheduler", "save-most-recent", "pretrained-image", "siglip", "trace",
    "lock-image-freeze-bn-stats", "lock-text-freeze-layer-norm", "local-loss", "gather-with-grad", "torchscript",
    "torchcompile", "debug", "copy-codebase", "horovod", "ddp-static-graph", "no-set-device-rank",
    "delete-previous-checkpoint",
}  # fmt: skip
# Flags of ours that may stand alone, for this value.
BARE = {"grad-checkpointing": "True", "compile": "on", "graph": "on"}
# What OpenCLIP has where nothing is given, as far as it is another value than ours.
DEFAULTS = {
    "loss": "infonce", "model": "RN50", "batch-size": "64", "lr": "5e-4", "wd": "0.2", "warmup": "10000",
    "precision": "amp", "workers": "4", "save-frequency": "1", "val-frequency": "1",
}  # fmt: skip


@dataclass
class Line:
    """A command line by flag, without dashes in front and with dashes inside; the last of several wins."""

    given: dict[str, list[str]]
    loose: list[str]  # words before the first flag: mistakes, which the parser names
    notes: dict[str, list[str]] = field(default_factory=dict)  # what is said, of which flags
    foreign: bool = False  # has flags that only OpenCLIP has

    @classmethod
    def of(cls, arguments: list[str]) -> "Line":
        given: dict[str, list[str]] = {}
        loose: list[str] = []
        into = loose
        for word in arguments:
            if re.match(r"--[A-Za-z]", word):
                name, equals, value = word.removeprefix("--").partition("=")
                name = name.replace("_", "-")
                given.pop(name, None)
                into = given[name] = [value] if equals else []
            else:
                into.append(word)
        return cls(given, loose)

    def arguments(self) -> list[str]:
        words = list(self.loose)
        for name, values in self.given.items():
            joined = len(values) == 1 and values[0].startswith("-")  # a value that looks like a flag
            words += [f"--{name}={values[0]}"] if joined else [f"--{name}", *values]
        return words

    def note(self, name: str, text: str) -> None:
        self.notes.setdefault(text, []).append(f"--{name}")

    def one(self, name: str) -> str | None:
        values = self.given.get(name)
        return values[0] if values else None

    def take(self, name: str) -> str:
        """The value of a flag, which leaves the line."""
        values = self.given.pop(name)
        if len(values) != 1:
            raise UserError(f"--{name} takes one value, not {len(values)}")
        return values[0]

    def number(self, name: str, default: int) -> int:
        """The value of a flag as a whole number, which may be written 4e8."""
        value = self.one(name)
        try:
            return default if value is None else int(float(value))
        except ValueError:
            raise UserError(f"--{name} {value}: expected a number") from None


class Flag(NamedTuple):
    """A flag of OpenCLIP's. `text` says what becomes of it; `rule` rewrites it where it is translated."""

    name: str
    status: Status
    text: str
    rule: Callable[[Line], None] | None = None


def _same(name: str, text: str = "the same flag", rule: Callable[[Line], None] | None = None) -> Flag:
    return Flag(name, "honoured", text, rule)


# ---- The rules of translated flags. Each takes its flag out of the line, puts ours in, and says so.


def _train_data(line: Line) -> None:
    """webdataset's pipes become the URLs inside them, which are read directly."""
    for name in ("train-data", "val-data"):
        data = line.one(name) or ""
        if "pipe:" in data:
            plain = [_without_pipe(part) for part in data.split("::")]
            line.given[name] = ["::".join(plain)]
            line.note(name, "is read without the command in its pipe:")


def _without_pipe(data: str) -> str:
    if not data.startswith("pipe:"):
        return data
    urls = [word for word in data.split() if re.match(r"(s3|gs|gcs|https?|hdfs)://", word)]
    if len(urls) != 1:
        raise UserError(f"{data}: commands in a pipe: are not run; give files or URLs (s3://, gs://, https://)")
    return urls[0]


def _sample_count(line: Line) -> None:
    line.given["train-num-samples"] = [str(line.number("train-num-samples", 0))]


def _dataset_type(line: Line) -> None:
    kind, data = line.take("dataset-type"), line.one("train-data") or ""
    if kind == "synthetic":
        count = line.number("train-num-samples", 100)
        line.given.pop("train-num-samples", None)
        line.given["train-data"] = [f"synthetic:{count}"]
        line.note("dataset-type", f"becomes --train-data synthetic:{count}")
    elif kind not in ("webdataset", "csv", "auto"):
        raise UserError(f"--dataset-type {kind}: OpenCLIP knows webdataset, csv, synthetic and auto")
    elif kind != "auto" and data and data.lower().endswith((".csv", ".tsv")) != (kind == "csv"):
        raise UserError(f"--dataset-type {kind} and --train-data {data}: the name of a table ends in .csv or .tsv")
    else:
        line.note("dataset-type", "is not needed: the name of the data says what they are")


def _dataset_resampled(line: Line) -> None:
    """A run with replacement is as long as its virtual epochs, which are not passes over the data."""
    del line.given["dataset-resampled"]
    text = "is not needed: every epoch visits every sample once, in another order"
    count, epochs = line.number("train-num-samples", 0), line.number("epochs", TrainConfig().run.epochs)
    batch = line.number("batch-size", 0) * line.number("accum-freq", 1) * detect_launch().size
    if count and batch and "max-steps" not in line.given:
        steps = epochs * max(1, count // batch)
        line.given["max-steps"] = [str(steps)]
        line.note("dataset-resampled", f"{text}; --max-steps {steps} ends the run after {epochs} times {count:,}")
    else:
        line.note("dataset-resampled", text)


def _accum_freq(line: Line) -> None:
    """OpenCLIP multiplies the batch by it, and computes it in pieces of the old batch size."""
    times, batch = line.number("accum-freq", 1), line.number("batch-size", int(DEFAULTS["batch-size"]))
    del line.given["accum-freq"]
    if times < 1:
        raise UserError(f"--accum-freq {times}: it must be at least 1")
    if times > 1:
        line.given |= {"batch-size": [str(times * batch)], "micro-batch": [str(batch)]}
        line.note("accum-freq", f"becomes --batch-size {times * batch} --micro-batch {batch}")


def _precision(line: Line) -> None:
    asked = line.one("precision") or ""
    ours = {"bf16": "amp_bf16", "pure_bf16": "amp_bf16", "fp16": "amp", "pure_fp16": "amp"}.get(asked)
    if ours is not None:
        line.given["precision"] = [ours]
        line.note("precision", f"{asked} becomes {ours}: weights stay in float32")


def _eps(line: Line) -> None:
    """Ours is the loss's. OpenCLIP's is meant on a line of OpenCLIP's, and where the loss has none."""
    loss = line.one("loss")
    takes = loss is None or (loss in LOSSES and spec_of(loss).defaults.eps is not None)
    if not takes or (line.foreign and loss is None):
        line.given["eps-opt"] = [line.take("eps")]
        line.note("eps", "becomes --eps-opt: leanclip's own --eps belongs to the loss")


def _opt(line: Line) -> None:
    name = line.one("opt") or ""
    if name.startswith("timm/"):
        line.given["opt"] = [name.removeprefix("timm/")]
        line.note("opt", f"becomes --opt {name.removeprefix('timm/')}")


def _skip_scheduler(line: Line) -> None:
    del line.given["skip-scheduler"]
    line.given |= {"lr-scheduler": ["const"], "warmup": ["0"]}
    line.note("skip-scheduler", "becomes --lr-scheduler const --warmup 0")


def _epochs_cooldown(line: Line) -> None:
    if line.one("lr-scheduler") != "const-cooldown":
        del line.given["epochs-cooldown"]
        line.note("epochs-cooldown", "has no effect without --lr-scheduler const-cooldown")


def _cooldown_end(line: Line) -> None:
    value = line.take("lr-cooldown-end")
    if line.one("lr-scheduler") == "const-cooldown":
        line.given["lr-floor"] = [value]
        line.note("lr-cooldown-end", f"becomes --lr-floor {value}")


def _resume(line: Line) -> None:
    """`latest` where there is nothing yet starts a run, so that a job script can be given again and again."""
    if line.one("resume") != "latest" or not line.foreign:
        return
    name = line.one("name")
    checkpoints = Path(line.one("logs") or "logs") / (name or "") / "checkpoints"
    if name is None:
        del line.given["resume"]
        line.note("resume", "latest goes on with the run of a --name; this one starts from the beginning")
        return
    saved = sorted(checkpoints.glob("epoch_*.pt"), key=_epoch_of)
    if saved and not any(checkpoints.glob("step_*")):
        line.given["resume"] = [str(saved[-1])]
        line.note("resume", f"latest is OpenCLIP's {saved[-1]}")
    else:
        line.given["resume"] = ["auto"]
        line.note("resume", "latest becomes auto: without a checkpoint the run starts from the beginning")


def _delete_previous(line: Line) -> None:
    del line.given["delete-previous-checkpoint"]
    line.given["keep-last"] = ["1"]
    line.note("delete-previous-checkpoint", "becomes --keep-last 1")


def _epoch_of(path: Path) -> float:
    number = path.stem.removeprefix("epoch_")
    return float(number) if number.isdigit() else float("inf")  # epoch_latest


def _pretrained(line: Line) -> None:
    if line.given["pretrained"] in ([""], []):
        del line.given["pretrained"]


def _siglip(line: Line) -> None:
    del line.given["siglip"]
    if line.one("loss") not in (None, "siglip"):
        raise UserError(f"--siglip and --loss {line.one('loss')} say different things; give one")
    line.given["loss"] = ["siglip"]
    line.note("siglip", "becomes --loss siglip")


def _log_every(line: Line) -> None:
    line.given["log-every"] = [line.take("log-every-n-steps")]
    line.note("log-every-n-steps", f"becomes --log-every {line.one('log-every')}")


def _image_size(line: Line) -> None:
    values = line.given["force-image-size"]
    if len(set(values)) > 1:
        raise UserError(f"--force-image-size {' '.join(values)}: images are square here; give one number")
    line.given["force-image-size"] = values[:1]


def _three(name: str) -> Callable[[Line], None]:
    def rule(line: Line) -> None:
        if len(line.given[name]) == 1:  # one number for all three colours
            line.given[name] = line.given[name] * 3

    return rule


def _logs(line: Line) -> None:
    if (line.one("logs") or "").lower() == "none":
        raise UserError("--logs none: a run needs a directory, for its checkpoints if nothing else; give one")


def _aug_cfg(line: Line) -> None:
    """scale='(0.9, 1.0)' and the like, one word each."""
    words, ours = line.given.pop("aug-cfg"), []
    known = {
        "scale": "aug-scale",
        "color_jitter": "aug-color-jitter",
        "color_jitter_prob": "aug-color-jitter-prob",
        "gray_scale_prob": "aug-gray-scale-prob",
    }
    for word in words:
        key, _, text = word.partition("=")
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            raise UserError(f"--aug-cfg {word}: expected KEY=VALUE, such as scale='(0.9, 1.0)'") from None
        if value in (None, False):
            continue
        if key not in known:
            raise UserError(
                f"--aug-cfg {key}: leanclip has {', '.join(known)}, not what OpenCLIP takes from timm; leave it out"
            )
        values = [str(item) for item in (value if isinstance(value, tuple | list) else (value,))]
        line.given[known[key]] = values
        ours.append(f"--{known[key]} {' '.join(values)}")
    if ours:
        line.note("aug-cfg", f"becomes {' '.join(ours)}")


FLAGS = (
    _same("train-data", "the same flag; `pipe:` commands become the URL inside them", _train_data),
    _same("train-data-upsampling-factors"),
    _same("val-data"),
    _same("train-num-samples", "samples are counted; a note says when the number differs", _sample_count),
    Flag("val-num-samples", "ignored", "is not needed: samples are counted"),
    Flag(
        "dataset-type",
        "translated",
        "the name of the data says their form; `synthetic` becomes `--train-data synthetic:N`",
        _dataset_type,
    ),
    Flag(
        "dataset-resampled",
        "translated",
        "every epoch visits every sample once; with `--train-num-samples`, `--max-steps` keeps the run's length",
        _dataset_resampled,
    ),
    _same("csv-separator", "the same flag; without it the separator is found"),
    _same("csv-img-key"),
    _same("csv-caption-key"),
    _same("imagenet-val"),
    _same("imagenet-v2"),
    Flag("cache-dir", "refused", "set HF_HUB_CACHE in the environment: all that downloads obeys it"),
    _same("logs", "the same flag; `none` is refused, a run needs a directory", _logs),
    Flag("log-local", "ignored", "is not needed: the first process writes the run's files"),
    _same("name"),
    _same("workers"),
    _same("batch-size", "the same flag, per process; `--global-batch-size` says it for all"),
    _same("epochs"),
    _same("epochs-cooldown", "the same flag", _epochs_cooldown),
    _same("lr"),
    _same("beta1"),
    _same("beta2"),
    Flag("eps", "translated", "`--eps-opt`; without OpenCLIP's flags on the line, `--eps` is the loss's", _eps),
    _same("wd"),
    _same("momentum"),
    _same("warmup"),
    _same("opt", "the same flag; `timm/NAME` becomes `NAME`", _opt),
    _same("use-bn-sync"),
    Flag("skip-scheduler", "translated", "`--lr-scheduler const --warmup 0`", _skip_scheduler),
    _same("lr-scheduler"),
    Flag("lr-cooldown-end", "translated", "`--lr-floor`", _cooldown_end),
    _same("lr-cooldown-power"),
    _same("save-frequency", "the same flag; `--save-every` says it in steps"),
    Flag("save-most-recent", "ignored", "is not needed: checkpoints/last is always the newest, --keep-last stay"),
    Flag("zeroshot-frequency", "ignored", "is not needed: every evaluation does all, see --val-frequency"),
    _same("val-frequency", "the same flag; `--eval-every` says it in steps"),
    _same(
        "resume",
        "the same flag; OpenCLIP's `epoch_N.pt` too, and `latest` before the first checkpoint starts the run",
        _resume,
    ),
    _same("precision", "the same flag; `bf16` and `fp16`, pure or not, become `amp_bf16` and `amp`", _precision),
    _same("model"),
    _same("pretrained", "the same flag", _pretrained),
    Flag(
        "pretrained-image", "refused", "image towers do not start from ImageNet; start both towers with --pretrained"
    ),
    _same("lock-image"),
    _same("lock-image-unlocked-groups"),
    Flag("lock-image-freeze-bn-stats", "ignored", "is always so in what is locked"),
    _same("image-mean", "the same flag", _three("image-mean")),
    _same("image-std", "the same flag", _three("image-std")),
    _same("image-interpolation"),
    _same("image-resize-mode"),
    Flag(
        "aug-cfg",
        "translated",
        "`--aug-scale`, `--aug-color-jitter`, `--aug-color-jitter-prob`, `--aug-gray-scale-prob`; others are refused",
        _aug_cfg,
    ),
    _same("grad-checkpointing", "the same flag; it takes a number of blocks too"),
    Flag("local-loss", "ignored", "is always so: no process holds the whole matrix"),
    Flag("gather-with-grad", "ignored", "is always so: gradients are exact on any number of processes"),
    _same("force-context-length"),
    _same("force-image-size", "the same flag; images are square", _image_size),
    _same("force-quick-gelu"),
    _same("force-patch-dropout"),
    _same("force-custom-text"),
    Flag("torchscript", "ignored", "changes the speed only; the model runs as it is"),
    Flag("torchcompile", "ignored", "is so by itself on a GPU, in runs where it pays; --compile on insists"),
    Flag("trace", "refused", "a traced model cannot be trained; leave it out"),
    Flag(
        "accum-freq", "translated", "`--batch-size` times it, with the old batch size as `--micro-batch`", _accum_freq
    ),
    _same("device"),
    Flag("dist-url", "ignored", "is not needed: torchrun or srun say where the processes meet"),
    Flag("dist-backend", "ignored", "is not needed: the device decides between NCCL and gloo"),
    _same("report-to"),
    _same("wandb-notes"),
    _same("wandb-project-name"),
    Flag("debug", "ignored", "is not needed: there is one amount of messages"),
    Flag("copy-codebase", "ignored", "is not needed: config.toml and run.json say what was run"),
    Flag("horovod", "refused", "processes are started with torchrun or srun; leave it out"),
    Flag("ddp-static-graph", "ignored", "changes the speed only"),
    Flag("no-set-device-rank", "ignored", "is not needed: a process that sees one GPU takes that one"),
    _same("seed"),
    _same("grad-clip-norm"),
    _same("lock-text"),
    _same("lock-text-unlocked-layers"),
    Flag("lock-text-freeze-layer-norm", "ignored", "is always so in what is locked"),
    Flag("log-every-n-steps", "translated", "`--log-every`", _log_every),
    Flag("coca-caption-loss-weight", "refused", "captioning (CoCa) is not trained here"),
    Flag("coca-contrastive-loss-weight", "refused", "captioning (CoCa) is not trained here"),
    Flag("remote-sync", "refused", "copy the run's directory with a tool of your choice, as aws s3 sync"),
    Flag("remote-sync-frequency", "ignored", "has no effect without --remote-sync"),
    Flag("remote-sync-protocol", "ignored", "has no effect without --remote-sync"),
    Flag("delete-previous-checkpoint", "translated", "`--keep-last 1`", _delete_previous),
    Flag("distill-model", "refused", "distillation is not offered"),
    Flag("distill-pretrained", "refused", "distillation is not offered"),
    Flag("use-bnb-linear", "refused", "layers of bitsandbytes are not offered; to save memory, see --micro-batch"),
    Flag("siglip", "translated", "`--loss siglip`", _siglip),
    Flag("loss-dist-impl", "ignored", "is not needed: there is one way, and it is exact"),
)
BY_NAME = {flag.name: flag for flag in FLAGS}
OURS = {
    entry.name.replace("_", "-")
    for part in fields(TrainConfig())
    for entry in fields(getattr(TrainConfig(), part.name))
}
STARTING = {"recipe", "config", "dry-run", "profile", "help"}  # the command's own


def from_openclip(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The command line in leanclip's flags, and what is to be said about it.

    A line without any of OpenCLIP's own flags comes back as it is, but for values that OpenCLIP spells otherwise.
    """
    line = Line.of(arguments)
    for name, value in BARE.items():
        if line.given.get(name) == []:
            line.given[name] = [value]
            arguments = line.arguments()
    before = dict(line.given)
    _complete(line)
    line.foreign = any(name in BY_NAME and name not in OURS | STARTING for name in line.given)
    if not line.given.keys() & {"recipe", "config"}:
        _evaluation_only(line)
        if line.foreign:
            _tell_defaults(line)
    for flag in FLAGS:
        if flag.name not in line.given:
            continue
        if flag.name in SWITCHES and line.given[flag.name]:
            raise UserError(f"--{flag.name} takes no value, and got {' '.join(line.given[flag.name])}")
        if flag.status == "refused" and flag.name not in OURS:
            raise UserError(f"OpenCLIP's --{flag.name}: {flag.text}")
        if flag.rule is not None:
            flag.rule(line)
        elif flag.name not in OURS:
            del line.given[flag.name]
            line.note(
                flag.name, flag.text if flag.status == "ignored" else "is not known to this version, and not used"
            )
    words = arguments if line.given == before else line.arguments()
    return words, [f"{', '.join(names)} {text}".strip() for text, names in line.notes.items()]


def _complete(line: Line) -> None:
    """argparse lets OpenCLIP's users write --save-freq: a beginning that fits one flag alone is that flag."""
    known = OURS | STARTING | set(BY_NAME)
    for name in list(line.given):
        whole = [flag for flag in known if flag.startswith(name)] if name not in known else []
        if len(whole) == 1 and whole[0] in BY_NAME:
            line.given = {whole[0] if key == name else key: values for key, values in line.given.items()}
            line.note(name, f"is read as --{whole[0]}")


def _evaluation_only(line: Line) -> None:
    if "train-data" in line.given or line.one("dataset-type") == "synthetic":
        return
    if line.given.keys() & {"val-data", "imagenet-val", "imagenet-v2"}:
        raise UserError("without --train-data OpenCLIP only evaluates; that is `leanclip evaluate` here")


def _tell_defaults(line: Line) -> None:
    given = line.given.keys() | ({"loss"} if "siglip" in line.given else set())
    if "global-batch-size" in given:
        given |= {"batch-size"}
    other = [f"--{name} {value}" for name, value in DEFAULTS.items() if name not in given]
    if other:
        text = f"what you leave open is leanclip's, not OpenCLIP's; for OpenCLIP's add {' '.join(other)}"
        line.notes[text] = []


def table() -> str:
    """The flags as a table for the documentation."""
    rows = [f"| `--{flag.name}` | {flag.status} | {_cell(flag.text)} |" for flag in FLAGS]
    return "\n".join(["| OpenCLIP's flag | | in leanclip |", "|---|---|---|", *rows])


def _cell(text: str) -> str:
    """With flags as code, and a sentence about the flag without the flag as its subject."""
    text = re.sub(r"(?<![`\w-])(--[a-z][a-z-]*)", r"`\1`", text) if "`" not in text else text
    return re.sub(r"^is ", "", text)


def with_table(page: str) -> str:
    """The page with the table between its markers made anew."""
    before, rest = page.split(START)
    return f"{before}{START}\n{table()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_table(path.read_text()))

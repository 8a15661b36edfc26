"""Wall clock to a target: seconds from the start of the command until a recall is reached, open_clip's and ours.

    python benchmarks/evidence/wall_clock.py --train 'coco_64/train-*' 'flickr8k/train-*' --val 'flickr8k/val-*'
    python benchmarks/evidence/wall_clock.py --quick        # bundled emoji, a tiny model, any machine, nothing kept
    python benchmarks/evidence/wall_clock.py --write        # plot and paragraph from the rows, measure nothing

Same shards (each caption a sample of its own, 64 px), same model, batch, weight decay, betas, share of the steps that
is warm-up, crops and precision, the same learning rates tried by both. The middle rate of each is run alone on the
machine, with the clock; the others side by side, for their recall only; and then the best of each alone, once for
each seed (with --only search side by side as well). Rates that were tried in an earlier race, with any length, need
not be tried again (--only alone). --leanclip-epochs gives leanclip another length than open_clip's: what counts is
the time until a recall is reached.

open_clip runs its own command, `open_clip_train.main`, with --torchcompile, and evaluates after every epoch, as
`leanclip train` does here, which decides by itself whether to compile. What is compiled has leanclip's barriers in
both (stopwatch.py says why). Every run starts with empty caches of compiled models and kernels; one with the clock
also without an index of its shards. The bytecode of the packages is there, as an installation leaves it. An epoch of
open_clip's is rounded up to as many whole batches for each worker, one of leanclip's down to whole batches.

The clock starts with the process. Time inside evaluations is left out on both sides, but for what leanclip's first
one, before the first step, takes longer than the others: that is start-up. Two parts are also shown apart: `startup`,
until the first training step begins (imports, model, data; leanclip also asks what fits), and `compile`, what the
first epoch took longer than the median of the others. race_report.py says what is compared. A run whose last epoch is
in the CSV file is not run again.
"""

import argparse
import glob
import io
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import photos
import race_report
import table
import torch
from PIL import Image

HERE = Path(__file__).parent
EMOJI = HERE.parents[1] / "src/leanclip/data/emoji"
FIELDS = (
    "trainer", "loss", "lr", "seed", "model", "batch", "epochs", "samples", "workers", "run", "alone", "epoch",
    "seconds", "startup_seconds", "evaluation_seconds", "text_to_image_recall_at_10", "image_to_text_recall_at_10",
    "trainer_command", *table.PROVENANCE,
)  # fmt: skip
TRAINERS = ("open_clip", "leanclip")
TOGETHER = 4  # runs side by side, each with as many loading processes as one alone
TINY = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
}


@dataclass(frozen=True)
class Trial:
    trainer: str
    loss: str
    lr: float
    seed: int

    def __str__(self) -> str:
        return f"{self.trainer} {self.loss}, lr {self.lr:g}, seed {self.seed}"

    def epochs(self, arguments: argparse.Namespace) -> int:
        return arguments.epochs if self.trainer == "open_clip" else arguments.leanclip_epochs or arguments.epochs


@dataclass(frozen=True)
class Data:
    train: list[Path]
    val: Path
    samples: int


def pairs(patterns: list[str], pixels: int, *, every_caption: bool) -> Iterator[tuple[bytes, str]]:
    """Images, no larger than `pixels`, with one caption each: of several the first, or each in turn."""
    for sample in photos.samples(sorted(Path(path) for pattern in patterns for path in glob.glob(pattern))):
        captions, image = photos.captions(sample), smaller(sample["jpg"], pixels)
        for caption in captions if every_caption else captions[:1]:
            yield image, caption


def smaller(jpeg: bytes, pixels: int) -> bytes:
    image = Image.open(io.BytesIO(jpeg))
    if max(image.size) <= pixels:
        return jpeg
    written = io.BytesIO()
    image.convert("RGB").resize((pixels, pixels), Image.Resampling.BICUBIC).save(written, "JPEG", quality=92)
    return written.getvalue()


def write_shard(path: Path, samples: list[tuple[bytes, str]]) -> None:
    with tarfile.open(path, "w") as archive:
        for number, (image, caption) in enumerate(samples):
            for kind, content in (("jpg", image), ("txt", caption.encode())):
                member = tarfile.TarInfo(f"{path.stem}-{number:06d}.{kind}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


def prepare(folder: Path, arguments: argparse.Namespace, pixels: int) -> Data:
    """Shards in random order, as many for each worker: open_clip shuffles inside those that a worker reads."""
    train = list(pairs(arguments.train, pixels, every_caption=True))[: arguments.samples]
    val = list(pairs(arguments.val, pixels, every_caption=False))
    if not train or not val:
        sys.exit(f"no samples in {arguments.train if not train else arguments.val}")
    random.Random(0).shuffle(train)
    count = 2 * max(1, arguments.workers)
    paths = [folder / f"train-{number:03d}.tar" for number in range(count)]
    for number, path in enumerate(paths):
        write_shard(path, train[number::count])
    write_shard(folder / "val.tar", val)
    return Data(paths, folder / "val.tar", len(train))


def flags(trial: Trial, arguments: argparse.Namespace, data: Data, logs: Path) -> list[str]:
    cuda = torch.cuda.is_available()
    epochs = trial.epochs(arguments)
    steps = data.samples // arguments.batch * epochs
    common = {
        "train-data": "::".join(map(str, data.train)), "val-data": data.val, "batch-size": arguments.batch,
        "epochs": epochs, "lr": trial.lr, "wd": arguments.wd, "warmup": max(1, steps // 10),
        "beta1": 0.9, "beta2": 0.98, "workers": arguments.workers, "seed": trial.seed,
        "precision": "amp_bf16" if cuda else "fp32", "logs": logs, "name": "run", "val-frequency": 1,
        "device": "cuda" if cuda else "cpu", "grad-clip-norm": 1.0,
    }  # fmt: skip
    if trial.trainer == "open_clip":
        own = {"dataset-type": "webdataset", "train-num-samples": data.samples, "eps": 1e-6, "save-frequency": 0}
        switches = ["--torchcompile"] if arguments.compile else []
        switches += ["--aug-cfg", f"scale=({arguments.crop},1.0)"]
    else:
        own = {"loss": trial.loss, "eps-opt": 1e-6, "save-every": 0, "report-to": "none"}
        own["compile"] = arguments.leanclip_compile if arguments.compile else "off"
        switches = ["--aug-scale", str(arguments.crop), "1.0"]
    named = [word for name, value in (common | own).items() for word in (f"--{name}", str(value))]
    return named + switches


Row = dict[str, Any]


def run(trial: Trial, arguments: argparse.Namespace, data: Data, folder: Path, *, alone: bool) -> list[Row]:
    """One run in a process of its own; a row for each of its epochs, with times only where it was alone."""
    work = Path(tempfile.mkdtemp(dir=folder))
    given = flags(trial, arguments, data, work / "logs")
    command = [sys.executable, str(HERE / "stopwatch.py"), trial.trainer, str(work / "events"), str(arguments.model)]
    for index in folder.glob("**/.leanclip-index*") if alone else ():
        shutil.rmtree(index) if index.is_dir() else index.unlink()
    caches = work / "caches"
    places = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "LEANCLIP_CACHE")
    environment = with_bytecode() | {name: str(caches / name.lower()) for name in places}
    began = time.time()
    with (work / "output").open("w") as output:
        done = subprocess.run([*command, *given], stdout=output, stderr=output, env=environment, check=False)
    seen = work / "events"
    events = [json.loads(line) for line in seen.read_text().splitlines()] if seen.exists() else []
    if done.returncode or not events:
        raise RuntimeError(f"{trial} ended with code {done.returncode}:\n{(work / 'output').read_text()[-3000:]}")
    if alone:
        print("  " + last_word(work / "output"), flush=True)
    name = uuid.uuid4().hex[:8]
    if arguments.outputs:
        arguments.outputs.mkdir(parents=True, exist_ok=True)
        shutil.copy(work / "output", arguments.outputs / f"{name}.txt")
    shutil.rmtree(work)
    found, evaluating, startup = [], 0.0, 0.0
    looks = list(zip(events[::2], events[1::2], strict=True))
    usual = statistics.median(end["at"] - begin["at"] for begin, end in looks if end["epoch"])
    for begin, end in looks:
        seconds, took = begin["at"] - began - evaluating, end["at"] - begin["at"]
        if not end["epoch"]:
            evaluating = min(took, usual)  # what it took longer was the library getting ready
            startup = seconds + took - evaluating
            continue
        evaluating += took
        found.append(
            {
                "trainer": trial.trainer, "loss": trial.loss, "lr": trial.lr, "seed": trial.seed,
                "model": arguments.model.stem, "batch": arguments.batch, "epochs": trial.epochs(arguments),
                "samples": data.samples, "workers": arguments.workers, "run": name, "alone": alone,
                "epoch": round(end["epoch"]),
                "seconds": round(seconds, 3) if alone else "",
                "startup_seconds": round(startup, 3) if alone else "",
                "evaluation_seconds": round(evaluating, 3) if alone else "",
                "text_to_image_recall_at_10": round(end["text_to_image"], 5),
                "image_to_text_recall_at_10": round(end["image_to_text"], 5),
                "trainer_command": shown(trial, arguments.model, given, data), **table.provenance(),
            }
        )  # fmt: skip
    return found


def with_bytecode() -> dict[str, str]:
    """An environment whose Python keeps the bytecode of what it imports."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def import_once() -> None:
    """What both trainers load, and what compiling loads later."""
    for modules in (
        "leanclip.cli.train, leanclip.training.loop",
        "open_clip_train.main",
        "torch._inductor.compile_fx",
    ):
        subprocess.run(
            [sys.executable, "-c", f"import {modules}"], env=with_bytecode(), capture_output=True, check=False
        )


def last_word(output: Path) -> str:
    """The last line of a trainer that says how fast it is."""
    lines = [line.strip() for line in output.read_text().splitlines() if "samples/s" in line or "/s/gpu" in line]
    return lines[-1] if lines else "(it said nothing of its speed)"


def shown(trial: Trial, model: Path, given: list[str], data: Data) -> str:
    """The trainer's command, without this machine's folders."""
    start = f"leanclip train --model {model.name}"
    if trial.trainer == "open_clip":
        start = f"python -m open_clip_train.main --model {model.stem}"
    line = " ".join([start, *given]).replace("::".join(map(str, data.train)), "train-*.tar")
    return line.replace(str(data.val), "val.tar").replace(given[given.index("--logs") + 1], "logs")


def trials(arguments: argparse.Namespace) -> tuple[list[Trial], list[Trial]]:
    """Those with the middle learning rate, and the others, with the first seed."""
    seed = arguments.seeds[0]
    found = [
        [
            Trial("open_clip", "infonce", rate, seed),
            *(Trial("leanclip", loss, rate, seed) for loss in arguments.losses),
        ]
        for rate in arguments.lr
    ]
    wanted = [[trial for trial in several if trial.trainer in arguments.trainers] for several in found]
    middle = wanted.pop(len(wanted) // 2)
    return middle, [trial for several in wanted for trial in several]


@dataclass
class Race:
    arguments: argparse.Namespace
    data: Data
    folder: Path
    output: Path
    failed: int = 0

    def __post_init__(self) -> None:
        self.began = time.monotonic()
        self.longest: dict[str, float] = {}  # seconds, of each trainer
        self.writing = threading.Lock()

    def there(self, trial: Trial, *, alone: bool) -> bool:
        """Whether this race has a whole run of it, with the clock if it should be alone."""
        return any(curve.alone or not alone for curve in self.curves(trial))

    def curves(self, trial: Trial) -> list[race_report.Curve]:
        """Its whole runs in this race."""
        command = self.command(trial)
        rows = [row for row in table.rows(self.output) if row["trainer_command"] == command]
        found = race_report.curves([row for row in rows if int(row["samples"]) == self.data.samples])
        return [curve for curve in found if curve.whole]

    def command(self, trial: Trial) -> str:
        return shown(trial, self.arguments.model, flags(trial, self.arguments, self.data, Path("logs")), self.data)

    def alone(self, trial: Trial) -> None:
        """With the clock, unless such a run is there."""
        if self.there(trial, alone=True):
            print(f"{trial}: already there", flush=True)
            return
        if self.late(trial):
            return
        start = time.monotonic()
        last = self.run(trial, alone=True)
        self.longest[trial.trainer] = max(time.monotonic() - start, self.longest.get(trial.trainer, 0.0))
        if last is not None:
            print(
                f"{trial}: {last['text_to_image_recall_at_10']:.1%} text-to-image recall@10 after"
                f" {last['seconds']:.1f} s of which startup {last['startup_seconds']:.1f};"
                f" evaluations took {last['evaluation_seconds']:.1f} s more",
                flush=True,
            )

    def late(self, trial: Trial) -> bool:
        over = time.monotonic() + self.longest.get(trial.trainer, 0.0) - self.began > self.arguments.limit
        if over:
            print(f"{trial}: not begun, it would not be over within {self.arguments.limit:g} s", flush=True)
        return over

    def together(self, wanted: list[Trial]) -> None:
        """For their recall."""
        with ThreadPoolExecutor(TOGETHER) as threads:
            for future in [
                threads.submit(self.beside, trial) for trial in wanted if not self.there(trial, alone=False)
            ]:
                future.result()

    def beside(self, trial: Trial) -> None:
        last = None if self.late(trial) else self.run(trial)
        if last is not None:
            print(f"{trial}: {last['text_to_image_recall_at_10']:.1%} text-to-image recall@10", flush=True)

    def run(self, trial: Trial, *, alone: bool = False) -> Row | None:
        """Its last row, with all of them written down."""
        try:
            found = run(trial, self.arguments, self.data, self.folder, alone=alone)
        except RuntimeError as error:
            print(error, file=sys.stderr, flush=True)
            self.failed += 1
            return None
        with self.writing:
            for row in found:
                table.append(self.output, FIELDS, row)
        return found[-1]

    def best(self, wanted: list[Trial]) -> list[Trial]:
        """By trainer and loss the one with the best final recall, in this race or an earlier one, with every seed."""
        rates = race_report.best_rates(race_report.curves(race_report.known(self.output)))
        chosen = [trial for trial in wanted if rates.get((trial.trainer, trial.loss)) == trial.lr]
        chosen.sort(key=lambda trial: TRAINERS.index(trial.trainer))
        return [replace(trial, seed=seed) for seed in self.arguments.seeds for trial in chosen]


def measure(arguments: argparse.Namespace, output: Path) -> int:
    pixels = json.loads(arguments.model.read_text())["vision_cfg"]["image_size"]
    middle, others = trials(arguments)
    with tempfile.TemporaryDirectory() as name:
        race = Race(arguments, prepare(Path(name), arguments, pixels), Path(name), output)
        print(f"{race.data.samples:,} training samples in {len(race.data.train)} shards", flush=True)
        if not arguments.quick:
            import_once()
        if arguments.only != "search":
            for trial in middle:
                race.alone(trial)
        if arguments.only != "alone":
            race.together([*middle, *others])
        best = race.best([*middle, *others])
        if arguments.only == "search":
            race.together(best)
        for trial in best if arguments.only != "search" else ():
            race.alone(trial)
    return race.failed


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", nargs="+", help="patterns of tar files: .jpg with .txt, or captions in .json")
    parser.add_argument("--val", nargs="+", help="likewise; the first caption of an image counts")
    parser.add_argument("--model", type=Path, default=HERE / "small.json", help="in open_clip's format")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--lr", type=float, nargs="+", default=[2.5e-4, 5e-4, 1e-3], help="each is tried by everyone")
    parser.add_argument("--losses", nargs="+", default=["infonce", "fastclip-v3"], help="of leanclip")
    parser.add_argument("--leanclip-epochs", type=int, help="where they are others than open_clip's --epochs")
    parser.add_argument("--wd", type=float, default=0.1)
    parser.add_argument("--crop", type=float, default=0.5, help="smallest share of an image that a random crop keeps")
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the runs with the clock")
    parser.add_argument("--samples", type=int, help="no more than this many")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--leanclip-compile", choices=("auto", "on", "off"), default="auto", help="auto: its default")
    parser.add_argument(
        "--limit", type=float, default=math.inf, help="seconds; no run begins that would be over later"
    )
    parser.add_argument("--trainers", nargs="+", choices=TRAINERS, default=TRAINERS, help="that are run this time")
    parser.add_argument("--only", choices=("alone", "search"), help="with the clock, or side by side; else both")
    parser.add_argument("--output", type=Path, default=table.RESULTS / "wall_clock.csv")
    parser.add_argument("--outputs", type=Path, help="a folder for what each trainer printed, by the name of its run")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", action="store_true", help="no run: the plot and the paragraph from the rows")
    arguments = parser.parse_args(given)
    if arguments.write:
        race_report.write(arguments.output)
        return 0
    if arguments.quick:
        with tempfile.TemporaryDirectory() as name:
            arguments.model, arguments.output = Path(name) / "tiny.json", Path(name) / "wall_clock.csv"
            arguments.model.write_text(json.dumps(TINY))
            arguments.train, arguments.val = [str(EMOJI / "train-*.tar")], [str(EMOJI / "val-*.tar")]
            arguments.batch, arguments.epochs, arguments.lr, arguments.losses = 64, 2, [1e-3], ["infonce"]
            arguments.workers, arguments.samples, arguments.compile, arguments.seeds = 1, 256, False, [0]
            failed = measure(arguments, arguments.output)
            if not failed:
                race_report.write(arguments.output)
            return failed
    if not (arguments.train and arguments.val):
        parser.error("--train and --val are needed; see --help")
    failed = measure(arguments, arguments.output)
    if arguments.only != "search":
        race_report.write(arguments.output)
    return failed


if __name__ == "__main__":
    sys.exit(main())

"""Seconds from the start of the command until a recall is reached, with open_clip's trainer and with leanclip's.

    python benchmarks/evidence/time_to_recall.py --train 'coco_64/train-*' 'flickr8k/train-*' --val 'flickr8k/val-*'
    python benchmarks/evidence/time_to_recall.py --quick    # bundled emoji, a tiny model, any machine, keeps nothing

Both trainers have the same shards (each caption is a sample, 64 px), model, batch, weight decay, betas, share of
warm-up steps, crops and precision, and try the same learning rates with the first seed; the best rate of each is run
with all seeds. Every run has the machine to itself. --leanclip-epochs gives leanclip another length: the time until a
recall is reached counts.

open_clip runs its own command, `open_clip_train.main`, with --torchcompile, and evaluates after every epoch, as
`leanclip train` does here, which chooses by itself whether to compile. The compiled kernels of both have leanclip's
barriers (timed_trainer.py). Every run starts with empty caches of compiled models and kernels and without an index
of its shards; the bytecode of the packages exists, as after an installation. An epoch of open_clip is rounded up to
whole batches for each worker, one of leanclip down to whole batches.

The clock starts with the process. The time of evaluations is left out for both; the first evaluation of leanclip,
before training, counts as start-up as far as it takes longer than the median one. A run in the CSV file is not run
again. time_to_recall_report.py makes the tables.
"""

import glob
import io
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import measurements
import photo_dataset
import time_to_recall_report
import torch
from command_line import Flag, command_line, temporary_folder
from PIL import Image

from leanclip.data.datasets import BUNDLED

CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "LEANCLIP_CACHE")
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


def pairs(patterns: list[str], size: int, *, every_caption: bool) -> Iterator[tuple[bytes, str]]:
    """Images, not larger than `size`, with one caption each: the first, or each in turn."""
    for sample in photo_dataset.samples(sorted(Path(path) for pattern in patterns for path in glob.glob(pattern))):
        captions, jpeg = photo_dataset.captions(sample), sample["jpg"]
        image = Image.open(io.BytesIO(jpeg))
        if max(image.size) > size:
            buffer = io.BytesIO()
            image.convert("RGB").resize((size, size), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=92)
            jpeg = buffer.getvalue()
        for caption in captions if every_caption else captions[:1]:
            yield jpeg, caption


def write_shard(path: Path, samples: list[tuple[bytes, str]]) -> None:
    with tarfile.open(path, "w") as archive:
        for number, (image, caption) in enumerate(samples):
            for ending, content in (("jpg", image), ("txt", caption.encode())):
                member = tarfile.TarInfo(f"{path.stem}-{number:06d}.{ending}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


def write_data(folder: Path, arguments: Any) -> int:
    """Writes shards in random order, as many for each worker: open_clip shuffles inside those that a worker reads.
    Returns the number of training samples."""
    size = json.loads(arguments.model.read_text())["vision_cfg"]["image_size"]
    train = list(pairs(arguments.train, size, every_caption=True))[: arguments.samples]
    val = list(pairs(arguments.val, size, every_caption=False))
    if not train or not val:
        sys.exit(f"no samples in {arguments.val if train else arguments.train}")
    random.Random(0).shuffle(train)
    count = 2 * max(1, arguments.workers)
    for number in range(count):
        write_shard(folder / f"train-{number:03d}.tar", train[number::count])
    write_shard(folder / "val.tar", val)
    return len(train)


def flags(trial: Trial, arguments: Any, samples: int) -> list[str]:
    """For a process in the folder of the shards."""
    cuda, ours = torch.cuda.is_available(), trial.trainer == "leanclip"
    epochs = (ours and arguments.leanclip_epochs) or arguments.epochs
    shards = [f"train-{number:03d}.tar" for number in range(2 * max(1, arguments.workers))]
    steps = samples // arguments.batch * epochs
    common = {
        "train-data": "::".join(shards), "val-data": "val.tar", "batch-size": arguments.batch,
        "epochs": epochs, "lr": trial.lr, "wd": arguments.wd, "warmup": max(1, steps // 10),
        "beta1": 0.9, "beta2": 0.98, "workers": arguments.workers, "seed": trial.seed,
        "precision": "amp_bf16" if cuda else "fp32", "logs": "logs", "name": "run", "val-frequency": 1,
        "device": "cuda" if cuda else "cpu", "grad-clip-norm": 1.0,
    }  # fmt: skip
    if ours:
        special = {"loss": trial.loss, "eps-opt": 1e-6, "save-every": 0, "report-to": "none"}
        special["compile"] = "auto" if arguments.compile else "off"
        switches = ["--aug-scale", str(arguments.crop), "1.0"]
    else:
        special = {"dataset-type": "webdataset", "train-num-samples": samples, "eps": 1e-6, "save-frequency": 0}
        switches = [*(["--torchcompile"] if arguments.compile else []), "--aug-cfg", f"scale=({arguments.crop},1.0)"]
    return [word for name, value in (common | special).items() for word in (f"--{name}", str(value))] + switches


def run(trial: Trial, arguments: Any, samples: int, folder: Path) -> list[dict[str, Any]]:
    """One run in a process of its own; a row for each epoch."""
    for name in ("logs", "caches", "events"):
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    for index in folder.glob("**/.leanclip-index*"):
        shutil.rmtree(index) if index.is_dir() else index.unlink()
    command, events = flags(trial, arguments, samples), folder / "events"
    script = Path(__file__).resolve().with_name("timed_trainer.py")
    environment = os.environ | {name: str(folder / "caches" / name.lower()) for name in CACHES}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    process = [sys.executable, str(script), trial.trainer, str(events), str(arguments.model.resolve()), *command]
    began = time.time()
    done = subprocess.run(process, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode or not events.exists():
        raise RuntimeError(f"{trial} ended with code {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    common = {
        "trainer": trial.trainer, "loss": trial.loss, "lr": trial.lr, "seed": trial.seed,
        "model": arguments.model.stem, "batch": arguments.batch, "epochs": command[command.index("--epochs") + 1],
        "samples": samples, "workers": arguments.workers, "run": uuid.uuid4().hex[:8], "alone": True,
    }  # fmt: skip
    origin = {"trainer_command": " ".join([trial.trainer, *command]), **measurements.provenance()}
    times = epoch_times([json.loads(line) for line in events.read_text().splitlines()], began)
    return [common | epoch | origin for epoch in times]


def epoch_times(events: list[dict[str, float]], began: float) -> list[dict[str, float]]:
    """Of each epoch the seconds until its end, without the evaluations before it, and the recalls."""
    evaluations = list(zip(events[::2], events[1::2], strict=True))
    median = statistics.median(end["at"] - begin["at"] for begin, end in evaluations if end["epoch"])
    epochs, evaluating, startup = [], 0.0, 0.0
    for begin, end in evaluations:
        seconds, duration = begin["at"] - began - evaluating, end["at"] - begin["at"]
        if not end["epoch"]:
            evaluating = min(duration, median)  # the rest is start-up
            startup = seconds + duration - evaluating
            continue
        evaluating += duration
        figures = {"seconds": seconds, "startup_seconds": startup, "evaluation_seconds": evaluating}
        epochs.append(
            {"epoch": round(end["epoch"])}
            | {name: round(value, 3) for name, value in figures.items()}
            | {f"{name}_recall_at_10": round(end[name], 5) for name in ("text_to_image", "image_to_text")}
        )
    return epochs


def import_once() -> None:
    """Writes the bytecode of both trainers and of the compiler."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    for modules in (
        "leanclip.cli.train, leanclip.training.loop",
        "open_clip_train.main",
        "torch._inductor.compile_fx",
    ):
        subprocess.run([sys.executable, "-c", f"import {modules}"], env=environment, capture_output=True, check=False)


def measure(arguments: Any) -> None:
    lines = [("open_clip", "infonce"), *(("leanclip", loss) for loss in arguments.losses)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        samples = write_data(folder, arguments)

        def final_recall(trial: Trial) -> float:
            command = " ".join([trial.trainer, *flags(trial, arguments, samples)])
            stored = [row for row in measurements.rows(arguments.output) if row["trainer_command"] == command]
            if not stored:
                for row in run(trial, arguments, samples, folder):
                    measurements.append(arguments.output, row)
            stored = [row for row in measurements.rows(arguments.output) if row["trainer_command"] == command]
            recall = float(stored[-1]["text_to_image_recall_at_10"])
            print(f"{trial}: text-to-image recall@10 {recall:.1%} after {stored[-1]['seconds']} s", flush=True)
            return recall

        for trainer, loss in lines:
            trials = [Trial(trainer, loss, lr, arguments.seeds[0]) for lr in arguments.lr]
            best = max(trials, key=final_recall)
            for seed in arguments.seeds[1:]:
                final_recall(replace(best, seed=seed))


def main(argv: list[str] | None = None) -> None:
    folder = temporary_folder()
    quick = {
        "model": folder / "tiny.json", "train": [str(BUNDLED / "train-*.tar")], "val": [str(BUNDLED / "val-*.tar")],
        "batch": 64, "epochs": 2, "lr": [1e-3], "losses": ["infonce"], "workers": 1, "samples": 256, "compile": False,
        "seeds": [0],
    }  # fmt: skip
    arguments = command_line(
        __doc__, argv, quick=quick, train=Flag([], "patterns of tar files: .jpg with .txt, or captions in .json"),
        val=Flag([], "likewise; the first caption of an image counts"),
        model=Flag(photo_dataset.MODEL, "in open_clip's format"), batch=128, epochs=8,
        lr=Flag([2.5e-4, 5e-4, 1e-3], "tried by both trainers"),
        losses=Flag(["infonce", "fastclip-v3"], "of leanclip"),
        leanclip_epochs=Flag(None, "if they differ from --epochs", kind=int), wd=0.1,
        crop=Flag(0.5, "smallest share of an image that a random crop keeps"), workers=16, seeds=[0, 1, 2],
        samples=Flag(None, "at most", kind=int), compile=True, output=measurements.RESULTS / "wall_clock.csv",
    )  # fmt: skip
    if not (arguments.train and arguments.val):
        sys.exit("--train and --val are needed; see --help")
    if arguments.quick:
        arguments.model.write_text(json.dumps(TINY))
    else:
        import_once()
    measure(arguments)
    measurements.show(time_to_recall_report.tables(arguments.output))


if __name__ == "__main__":
    main()

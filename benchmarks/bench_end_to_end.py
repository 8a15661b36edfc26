"""`leanclip train` on JPEG shards against what bounds it: the rate of the loader alone, and of the step alone.

    python benchmarks/bench_end_to_end.py --photos photos.tar    # real photographs, enlarged to 500 x 375
    python benchmarks/bench_end_to_end.py                        # noise with a photograph's spectrum instead
    python benchmarks/bench_end_to_end.py --batch 2048 --decode gpu cpu --cores 16 4 --only train
    python benchmarks/bench_end_to_end.py --quick                # a tiny run on a CPU; nothing is kept

The loader alone: its batches are fetched and thrown away. The step alone: the same batch again and again, on the
device. Training is the command itself, in a process of its own, without checkpoints (bench_save.py is about those).
With --decode and --cores, for each way to decode and each number of cores, with as many workers: the others are taken
from the process. Rates are taken once the loader's store of batches, which fills while the first steps are slow, is
used up. Rows go to benchmarks/results/end_to_end.csv.
"""

import datetime
import io
import itertools
import json
import os
import random
import subprocess
import sys
import tarfile
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import bench_step
import torch
from evidence.command_line import Flag, command_line
from evidence.measurements import append
from evidence.photographs import photograph
from PIL import Image
from steps import WORDS, device_name

import leanclip
from leanclip.data import DataConfig, TrainingLoader, open_datasets, training_transform
from leanclip.data.loader import PREFETCH_BATCHES
from leanclip.models import ModelConfig, create_model
from leanclip.worker_pool import Tick, run_tasks

RESULTS = Path(__file__).parent / "results" / "end_to_end.csv"
REPEATS = 16  # visits of every sample in an epoch, which is to be longer than a measurement


def contents(photos: Path | None, size: tuple[int, int], different: int) -> list[bytes]:
    """JPEGs, a third of them upright, of quality 90 (88 for noise)."""
    if photos is None:
        draw = partial(noise, size)
        return list(run_tasks(draw, range(different), workers=len(os.sched_getaffinity(0)), progress=lambda _: None))
    jpegs = []
    with tarfile.open(photos) as archive:
        for member in archive:
            if len(jpegs) < different and member.name.endswith(".jpg"):
                file = archive.extractfile(member)
                assert file is not None
                target_size = size if len(jpegs) % 3 else (size[1], size[0])
                image = Image.open(file).convert("RGB").resize(target_size, Image.Resampling.BICUBIC)
                grain = Image.effect_noise(target_size, 24).convert(
                    "RGB"
                )  # an enlarged photograph has no fine detail
                target = io.BytesIO()
                Image.blend(image, grain, 0.12).save(target, "JPEG", quality=90)
                jpegs.append(target.getvalue())
    return jpegs


def noise(size: tuple[int, int], number: int, _: Tick) -> bytes:
    return photograph(*(size if number % 3 else size[::-1]), seed=number)


def write_shards(directory: Path, jpegs: list[bytes], samples: int, shards: int = 8) -> str:
    for shard in range(shards):
        with tarfile.open(directory / f"{shard:05d}.tar", "w") as archive:
            for number in range(shard, samples, shards):
                draw = random.Random(number)
                caption = " ".join(draw.choices(WORDS.split(), k=draw.randint(6, 21))).encode()
                for ending, content in (("jpg", jpegs[number % len(jpegs)]), ("txt", caption)):
                    entry = tarfile.TarInfo(f"{number:09d}.{ending}")
                    entry.size = len(content)
                    archive.addfile(entry, io.BytesIO(content))
    return str(directory / f"{{00000..{shards - 1:05d}}}.tar")


def loader_rate(pattern: str, model: str, batch: int, workers: int, steps: int, decode: str) -> float:
    """Samples per second, after as many batches as the workers keep in store."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train = open_datasets(DataConfig(train_data=pattern, train_data_upsampling_factors=str(REPEATS)), seed=0).train
    towers = create_model(ModelConfig(model=model))
    loader = TrainingLoader(
        train.source, train.visits, batch=batch, transform=training_transform(towers.preprocess),
        tokenizer=towers.tokenizer, seed=0, workers=workers, pin_memory=torch.cuda.is_available(),
        end_of_text=towers.end_of_text, resize_on=None if decode == "cpu" else device,
    )  # fmt: skip
    skip, began = PREFETCH_BATCHES * workers, 0.0
    for number, _ in enumerate(loader.epoch(0), 1):
        if number in (skip + 1, skip + 1 + steps) and device.type == "cuda":
            torch.cuda.synchronize()
        if number == skip + 1:
            began = time.perf_counter()
        if number == skip + 1 + steps:
            return steps * batch / (time.perf_counter() - began)
    raise ValueError(f"{len(train.visits)} visits are too few for {skip + 1 + steps} batches of {batch}")


def train(
    pattern: str, model: str, batch: int, workers: int, steps: int, folder: Path, compile: str, decode: str
) -> tuple[float, float]:
    """Samples per second of the last third of a run's steps, and the share of them spent waiting for data."""
    command = [
        sys.executable, "-m", "leanclip", "train", "--train-data", pattern, "--model", model, "--loss", "infonce",
        "--global-batch-size", str(batch), "--workers", str(workers), "--max-steps", str(steps), "--epochs", "99",
        "--eval-every", "0", "--report-to", "none", "--log-every", str(max(1, steps // 3)), "--logs", str(folder),
        "--name", "run", "--micro-batch", str(batch), "--train-data-upsampling-factors", str(REPEATS),
        "--compile", compile, "--save-every", "0", "--decode", decode,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    steps_logged = [line for line in lines if line["kind"] == "train"]
    return steps_logged[-1]["samples_per_second"], steps_logged[-1]["data_wait"]


def parsed() -> Any:
    every_core = [len(os.sched_getaffinity(0))]
    quick = {
        "model": ["leanclip-tiny"], "batch": 8, "cores": [1], "steps": 3, "different": 8, "size": [64, 48],
        "compile": "off", "decode": ["cpu"],
    }  # fmt: skip
    return command_line(
        __doc__, quick=quick, photos=Flag(None, "a tar with .jpg files", kind=Path), model=["ViT-B-32"], batch=512,
        compile=Flag("on", choices=("on", "off")), decode=Flag(["gpu"], choices=("cpu", "gpu")), cores=every_core,
        steps=Flag(None, "of training; the last third is timed. Default: 3 for each core", kind=int),
        size=[500, 375], different=Flag(4096, "images; each is in several samples"),
        only=Flag(["loader", "train", "step"], choices=("loader", "train", "step")), output=RESULTS,
    )  # fmt: skip


def main() -> None:
    arguments = parsed()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        jpegs = contents(arguments.photos, (arguments.size[0], arguments.size[1]), arguments.different)
        pattern = write_shards(folder, jpegs, 48 if arguments.quick else 16_384)
        size = sum(len(jpeg) for jpeg in jpegs) / len(jpegs) / 1e3
        print(f"{len(jpegs):,} different images of {size:.1f} kB", flush=True)
        every_core = os.sched_getaffinity(0)
        for model in arguments.model:
            timed = "step" in arguments.only and not arguments.quick
            alone = step_rate(model, arguments, device) if timed else None
            for cores, decode in itertools.product(arguments.cores, arguments.decode):
                os.sched_setaffinity(0, sorted(every_core)[:cores])
                row = measured(pattern, model, arguments, cores, decode, alone, folder) | {
                    "date": datetime.date.today().isoformat(), "version": leanclip.__version__,
                    "torch": torch.__version__, "cores": cores, "model": model, "batch": arguments.batch,
                    "device": device_name(), "workers": cores,
                    "jpeg": "x".join(map(str, arguments.size)), "kilobytes_per_jpeg": round(size, 1),
                    "compile": arguments.compile, "decode": decode, "different": len(jpegs),
                }  # fmt: skip
                append(arguments.output, row)
            os.sched_setaffinity(0, every_core)


def measured(
    pattern: str,
    model: str,
    arguments: Any,
    cores: int,
    decode: str,
    alone: float | None,
    folder: Path,
) -> dict[str, float]:
    """The rates of a row; those that are not asked for are left out."""
    rates = {} if alone is None else {"step_per_second": round(alone, 1)}
    title = f"{model}, {cores} cores, decode {decode}"
    if "loader" in arguments.only:
        batches = 3 if arguments.quick else 3 * cores  # whole rounds of the workers
        rate = loader_rate(pattern, model, arguments.batch, cores, batches, decode)
        rates["loader_per_second"] = round(rate, 1)
        print(f"{title}: loader alone {rate:,.0f} samples/s", flush=True)
    if "train" in arguments.only:
        logs = folder / f"logs-{model}-{cores}-{decode}"
        steps = arguments.steps or 3 * cores
        rate, waited = train(pattern, model, arguments.batch, cores, steps, logs, arguments.compile, decode)
        rates |= {"train_per_second": round(rate, 1), "data_wait": round(waited, 3)}
        print(f"{title}: training {rate:,.0f} samples/s, data wait {waited:.0%}", flush=True)
    if {"loader_per_second", "train_per_second"} <= rates.keys() and (alone or arguments.quick):
        rates.setdefault("step_per_second", rates["loader_per_second"])  # a quick run has no step alone
        smaller = min(rates["loader_per_second"], rates["step_per_second"])
        rates["share_of_smaller"] = round(rates["train_per_second"] / smaller, 3)
        print(
            f"{title}: step alone {rates['step_per_second']:,.0f} samples/s; training"
            f" {rates['share_of_smaller']:.0%} of the smaller",
            flush=True,
        )
    return rates


def step_rate(model: str, arguments: Any, device: torch.device) -> float:
    """Samples per second of a step whose batch lies on the device."""
    case = bench_step.Case(model, model, arguments.batch)
    data = bench_step.Data(case, bench_step.config_of(case), device)
    provider = "leanclip" if arguments.compile == "on" else "leanclip eager"
    figures = bench_step.measure(bench_step.step_of(provider, case, data), device, seconds=2.0)
    bench_step.free()
    return arguments.batch / figures["ms_per_step"] * 1e3


if __name__ == "__main__":
    main()

"""Locked towers whose features are cached: the rate of a run against uncached, and against its step alone.

    python benchmarks/bench_locked_towers.py             # ViT-B-16 from JPEGs of 500 x 375, on a GPU; about 90 s
    python benchmarks/bench_locked_towers.py --quick     # a tiny model, on a CPU; nothing is kept

`heads` locks both towers, `lit` the image tower. The rates are those of whole runs: loader, step and log; `resident`
repeats the step on one batch that is already on the device. `feature_seconds` is what the tables cost; lit reads the
images' from the cache that heads has filled.
Rows go to benchmarks/results/locked_towers.csv.
"""

import gc
import json
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from evidence.command_line import command_line
from evidence.measurements import append
from steps import device_name, synchronize

import leanclip
from leanclip.config import override
from leanclip.data import on_device
from leanclip.data.feature_table import FeatureTable
from leanclip.models import ModelConfig, create_model
from leanclip.runs import RunDirectory, TrainConfig
from leanclip.training import Job, set_up, train
from leanclip.training.step import training_step

RESULTS = Path(__file__).parent / "results" / "locked_towers.csv"
TINY = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 16, "heads": 1, "layers": 1},
}
LOCKS = {"heads": {"lock_image": True, "lock_text": True}, "lit": {"lock_image": True}}
WARM_UP = 0.25  # of the steps, which are not timed


@dataclass(frozen=True)
class Setting:
    model: str
    batch: int
    samples: int
    views: int
    workers: int
    steps: dict[str, int]  # of the runs


def job_of(setting: Setting, folder: Path, case: str, *, cached: bool) -> Job:
    steps = setting.steps[case if cached else "uncached"]
    values: dict[str, Any] = {
        "train_data": f"synthetic:{setting.samples}:jpeg", "model": setting.model,
        "pretrained": str(folder / "start.pt"), "global_batch_size": setting.batch, "workers": setting.workers,
        "epochs": 10**6, "cache_locked": setting.views if cached else 0,
        "loss": "fastclip-v1", "tau": 0.05, "lr": 1e-4, "warmup": 0, "eval_every": 0, "save_every": 10**9,
        "report_to": "none",
        "max_steps": steps, "log_every": int(WARM_UP * steps),
        "logs": str(folder), "name": f"{case}-{cached}", "discard_start": True, "compile": "off",
    }  # fmt: skip
    return set_up(override(TrainConfig(), values | LOCKS[case], "benchmark"))


def rate_of_run(job: Job) -> float:
    """Samples per second after the warm-up, by the log."""
    directory = RunDirectory(Path(job.config.run.logs) / str(job.config.run.name))
    directory.prepare(overwrite=False)
    train(job, directory)
    lines = [json.loads(line) for line in directory.metrics.read_text().splitlines()]
    first, *_, last = (line for line in lines if line["kind"] == "train")
    return (last["samples"] - first["samples"]) / (last["seconds"] - first["seconds"])


def rate_of_step(job: Job, steps: int) -> float:
    """Samples per second of the step alone."""
    batch = next(on_device(job.loader.epoch(0), job.device, job.dtype, job.pack))
    job.model.train()
    job.context.loss.train()
    warm_up, began = int(WARM_UP * steps), 0.0
    for step in range(steps):
        if step == warm_up:
            synchronize(job.device)
            began = time.perf_counter()
        job.context.loss.set_epoch(0, 1)
        training_step(job.context, batch)
    synchronize(job.device)
    return job.loader.batch * (steps - warm_up) / (time.perf_counter() - began)


def measure(setting: Setting, folder: Path, case: str) -> dict[str, Any]:
    uncached = rate_of_run(job_of(setting, folder, case, cached=False))
    gc.collect()
    cached_job = job_of(setting, folder, case, cached=True)
    tables = [table for table in cached_job.features if isinstance(table, FeatureTable)]
    resident = rate_of_step(cached_job, setting.steps[case])
    cached = rate_of_run(cached_job)
    return {
        "case": case, "batch": setting.batch, "samples": setting.samples, "views": setting.views,
        "workers": setting.workers, "cuda_graph": cached_job.context.cuda_graphs is not None,
        "on_gpu_mib": round(sum(table.nbytes for table in tables if table.on_device) / 2**20, 1),
        "feature_seconds": round(sum(table.seconds or 0 for table in tables), 1), "uncached": round(uncached),
        "cached": round(cached), "resident": round(resident), "times_uncached": round(cached / uncached, 1),
        "share_of_resident": round(cached / resident, 3),
    }  # fmt: skip


def main() -> None:
    arguments = command_line(__doc__, output=RESULTS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["LEANCLIP_CACHE"] = name
        (folder / "tiny.json").write_text(json.dumps(TINY))
        steps = {"uncached": 16, "heads": 1600, "lit": 240}
        setting = Setting("ViT-B-16", 2048, 16_384, 2, os.cpu_count() or 1, steps)
        if arguments.quick:
            steps = {"uncached": 8, "heads": 40, "lit": 16}
            setting = Setting(str(folder / "tiny.json"), 16, 64, 2, 0, steps)
        torch.save(create_model(ModelConfig(model=setting.model)).clip.state_dict(), folder / "start.pt")
        for case in LOCKS:
            row = {"version": leanclip.__version__, "device": device_name(), "model": Path(setting.model).stem}
            row |= measure(setting, folder, case)
            print(row)
            append(arguments.output, row)
            gc.collect()


if __name__ == "__main__":
    main()

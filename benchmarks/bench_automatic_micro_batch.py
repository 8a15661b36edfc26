"""The automatic micro-batch: how long it takes to measure, how near it is to the largest that fits, equal losses.

    python benchmarks/bench_automatic_micro_batch.py             # ViT-B-32 and ViT-B-16, on a GPU
    python benchmarks/bench_automatic_micro_batch.py --quick     # a small model, on a CPU, where nothing is measured

Rows go to benchmarks/results/automatic_micro_batch.csv. The largest that fits is found by real training steps.
"""

import gc
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from evidence.command_line import command_line
from evidence.measurements import append
from steps import device_name

import leanclip
from leanclip.config import override
from leanclip.data import Batch
from leanclip.runs import TrainConfig
from leanclip.training import Job, set_up, setup
from leanclip.training.step import training_step

RESULTS = Path(__file__).parent / "results" / "automatic_micro_batch.csv"
CASES = (("ViT-B-32", 16_384), ("ViT-B-16", 4096))
STEPS = 2


def job_of(model: str, batch: int, micro_batch: int | None = None) -> Job:
    values: dict[str, Any] = {
        "train_data": f"synthetic:{batch}", "model": model, "global_batch_size": batch, "epochs": 1, "workers": 8,
        "loss": "infonce", "compile": "on" if torch.cuda.is_available() else "off", "name": "unused",
    }  # fmt: skip
    return set_up(
        override(TrainConfig(), values | ({"micro_batch": micro_batch} if micro_batch else {}), "benchmark")
    )


def losses(job: Job, batch: Batch) -> list[float]:
    packed = job.pack(batch)
    return [training_step(job.context, packed).loss.item() for _ in range(STEPS)]


def fits(job: Job, batch: Batch, size: int) -> bool:
    count = -(-job.context.global_batch // size)
    job = replace(job, context=replace(job.context, micro_batches=count))
    try:
        losses(job, batch)
        return True
    except torch.cuda.OutOfMemoryError:
        return False
    finally:
        job.context.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.empty_cache()


def measure(model: str, size: int) -> dict[str, Any]:
    probe, seconds = setup.probe_micro_batch, [0.0]

    def timed(*arguments: Any, **options: Any) -> Any:
        began = time.perf_counter()
        try:
            return probe(*arguments, **options)
        finally:
            seconds[0] = time.perf_counter() - began

    setup.probe_micro_batch = timed
    job_of(model, size)
    first = seconds[0]
    automatic = job_of(model, size)  # its kernels are in the compiler's cache, as in every run but the first
    setup.probe_micro_batch = probe
    chosen = -(-size // automatic.context.micro_batches)
    batch = next(automatic.loader.epoch(0)).to(automatic.device, automatic.dtype)
    row = automatic.model.tokenizer([""]).to(automatic.device)  # run as long as the model takes, as when it is chosen
    batch = replace(batch, tokens=row.expand(size, -1), lengths=torch.full((size,), row.shape[1]))
    equal = losses(automatic, batch) == losses(job_of(model, size, chosen), batch)
    low, high = chosen, min(size, 2 * chosen)
    while torch.cuda.is_available() and high - low > max(8, chosen // 64):
        middle = (low + high) // 16 * 8
        low, high = (middle, high) if fits(automatic, batch, middle) else (low, middle)
    return {
        "batch": size,
        "chosen": chosen,
        "largest": low,
        "first_seconds": round(first, 2),
        "seconds": round(seconds[0], 2),
        "equal_losses": equal,
    }


def main() -> None:
    arguments = command_line(__doc__, output=RESULTS)
    for model, batch in (("leanclip-tiny", 32),) if arguments.quick else CASES:
        row = {"version": leanclip.__version__, "device": device_name(), "model": model} | measure(model, batch)
        print(row)
        append(arguments.output, row)


if __name__ == "__main__":
    main()

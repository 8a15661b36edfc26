"""The cost of checkpoints: time inside the save calls, and how much slower the loop gets.

    python benchmarks/bench_save.py                      # ViT-B-32, 10 million samples, a save every 50 steps
    python benchmarks/bench_save.py --quick              # a small model, on a CPU too; no row is kept

The job is set up as by `leanclip train`, but repeats one batch on the device. The same number of steps is taken
without and with saves. Rows go to benchmarks/results/save.csv.
"""

import shutil
import tempfile
import time
from pathlib import Path

import torch
from evidence.command_line import command_line
from evidence.measurements import append
from steps import device_name, synchronize

import leanclip
from leanclip.checkpointing.checkpoint import Checkpoints, Position
from leanclip.config import override
from leanclip.data import Batch
from leanclip.runs import TrainConfig
from leanclip.training import Job, set_up
from leanclip.training.step import training_step

RESULTS = Path(__file__).parent / "results" / "save.csv"


def first_batch(job: Job) -> Batch:
    """One batch of the run, on the device."""
    return next(iter(job.loader.epoch(0))).to(job.device, job.dtype)


def take(job: Job, batch: Batch, steps: int) -> None:
    for _ in range(steps):
        draw = torch.randint(len(job.data.train.source), (len(batch),))
        ids = Batch(images=batch.images, tokens=batch.tokens, sample_ids=draw).to(job.device, job.dtype)
        assert not training_step(job.context, ids).skipped


def seconds(job: Job, began: float) -> float:
    synchronize(job.device)
    return time.perf_counter() - began


def measure(values: dict[str, object], steps: int, save_every: int) -> dict[str, object]:
    job = set_up(override(TrainConfig(), values, "benchmark"))
    job.model.train()
    job.context.loss.set_epoch(0, 1)
    batch = first_batch(job)
    take(job, batch, 3)  # warms up, compiles, and fills the optimizer's state
    synchronize(job.device)
    began = time.perf_counter()
    take(job, batch, steps)
    without = seconds(job, began)

    folder = Path(tempfile.mkdtemp(prefix="leanclip-save-"))
    facts = {"settings": {}, "architecture": {}, "samples": 0, "manifest": None}
    checkpoints = Checkpoints(folder, job.state, facts=facts, keep_last=1)
    checkpoints.prepare()  # as the loop does after its first step
    inside: list[float] = []
    written: list[float] = []
    began = time.perf_counter()
    for step in range(save_every, steps + 1, save_every):
        take(job, batch, save_every)
        entered = time.perf_counter()
        position = Position(step=step, epoch=0, epoch_step=step, samples=0, seconds=0.0, best=None)
        checkpoints.save(position, {})
        inside.append(time.perf_counter() - entered)
        assert checkpoints._writing is not None
        checkpoints._writing.add_done_callback(lambda _, at=entered: written.append(time.perf_counter() - at))
    with_saves = seconds(job, began)
    checkpoints.finish()
    newest = (folder / "last").resolve()
    size = sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())
    shutil.rmtree(folder)
    return {
        "model": Path(str(values["model"])).stem, "loss": values["loss"], "batch": job.loader.batch,
        "samples": len(job.data.train.source), "steps": steps, "save_every": save_every, "saves": len(inside),
        "checkpoint_gb": round(size / 1e9, 3), "seconds_without": round(without, 3),
        "seconds_with": round(with_saves, 3), "seconds_in_saves": round(sum(inside), 4),
        "first_save": round(inside[0], 4), "later_saves": round(sum(inside[1:]) / max(1, len(inside) - 1), 4),
        "share_in_saves": round(sum(inside) / with_saves, 5), "seconds_to_write": round(max(written), 2),
    }  # fmt: skip


def main() -> None:
    quick = {"model": "leanclip-tiny", "batch": 16, "samples": 1000, "steps": 4, "save_every": 2}
    arguments = command_line(
        __doc__, quick=quick, model="ViT-B-32", loss="fastclip-v3", batch=2048, samples=10_000_000, steps=200,
        save_every=50, output=RESULTS,
    )  # fmt: skip
    values = {
        "train_data": f"synthetic:{arguments.samples}", "model": arguments.model, "loss": arguments.loss,
        "global_batch_size": arguments.batch, "workers": 0, "lr": 1e-5, "name": "save", "report_to": "none",
    }  # fmt: skip
    row = {"version": leanclip.__version__, "torch": torch.__version__, "device": device_name()}
    row |= measure(values, arguments.steps, arguments.save_every)
    print("\n".join(f"{field:<18} {value}" for field, value in row.items()))
    append(arguments.output, row)


if __name__ == "__main__":
    main()

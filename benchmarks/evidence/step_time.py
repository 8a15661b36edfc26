"""The time of a training step of each loss on an otherwise idle device: it turns samples seen into GPU seconds.

    python benchmarks/evidence/step_time.py --photos FOLDER   # on an idle GPU, about two minutes
    python benchmarks/evidence/step_time.py --quick           # a test of the code on any machine; keeps nothing

Median, fastest and slowest of several groups of steps after a warm-up, without evaluations, for the losses and batch
sizes of compare_losses.py. Stored rows of step_time.csv are not measured again.
"""

import statistics
import time
from dataclasses import replace

import compare_losses
import measurements
import torch
from training_runs import Run, Workspace, store_from_command_line

from leanclip.training.step import training_step

WARM_UP, STEPS, GROUPS = 40, 20, 5


def measure(run: Run, place: Workspace, *, quick: bool) -> dict[str, float]:
    context, batches = place.begin(run)
    context.loss.set_epoch(0, run.epochs)

    def ms_per_step(steps: int) -> float:
        began = time.perf_counter()
        for _ in range(steps):
            training_step(context, next(batches))
        if place.device.type == "cuda":
            torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - began) / steps

    ms_per_step(1 if quick else WARM_UP)
    times = [ms_per_step(1 if quick else STEPS) for _ in range(2 if quick else GROUPS)]
    figures = {"ms": statistics.median(times), "low_ms": min(times), "high_ms": max(times)}
    return {name: round(value, 4) for name, value in figures.items()} | {"stretches": len(times)}


def main() -> None:
    store = store_from_command_line(__doc__)
    quick = store.steps is not None
    path = store.results / "step_time.csv"
    sizes = {compare_losses.BATCH: tuple(compare_losses.CHOICES), **compare_losses.LARGER}
    pairs = [(loss, batch) for batch, losses in sizes.items() for loss in losses]
    stored = {(row["loss"], int(row["batch"])) for row in measurements.rows(path)}
    for loss, batch in [("fastclip-v3", 16)] if quick else [pair for pair in pairs if pair not in stored]:
        run = replace(compare_losses.trials(loss)[0], batch=batch)  # the settings do not change the time of a step
        figures = measure(run, store.workspace, quick=quick)
        measurements.append(path, {"loss": loss, "batch": batch} | figures | measurements.provenance())
        print(f"{loss:<12} batch {batch:>5,}  {figures['ms']:.3f} ms per step", flush=True)


if __name__ == "__main__":
    main()

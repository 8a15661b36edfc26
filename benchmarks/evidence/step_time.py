"""How long a step of each loss takes, alone on the device: what turns samples seen into GPU seconds.

    python benchmarks/evidence/step_time.py --photos FOLDER   # on an idle GPU, about two minutes
    python benchmarks/evidence/step_time.py --quick           # tries the code, on a CPU too; nothing is kept

The step is the one of runs.py, for the losses and batch sizes of quality.py, without evaluations: the median, the
fastest and the slowest of several stretches of steps that follow a warm-up. Rows go to step_time.csv; those that are
there are not measured again.
"""

import statistics
import time
from dataclasses import replace

import quality
import table
import torch
from experiment import experiment
from runs import Place, Run, begin

from leanclip.training.step import training_step

FIELDS = ("loss", "batch", "ms", "low_ms", "high_ms", "stretches", *table.PROVENANCE)
WARM_UP, STRETCH, STRETCHES = 40, 20, 5  # steps, steps, times


def measure(run: Run, place: Place, *, quick: bool) -> dict[str, float]:
    context, batches = begin(run, place)
    context.loss.set_epoch(0, run.epochs)

    def stretch(steps: int) -> float:
        began = time.perf_counter()
        for _ in range(steps):
            training_step(context, next(batches))
        if place.device.type == "cuda":
            torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - began) / steps

    stretch(1 if quick else WARM_UP)
    found = [stretch(1 if quick else STRETCH) for _ in range(2 if quick else STRETCHES)]
    figures = {"ms": statistics.median(found), "low_ms": min(found), "high_ms": max(found)}
    return {name: round(value, 4) for name, value in figures.items()} | {"stretches": len(found)}


def main() -> None:
    asked = experiment(__doc__)
    path = asked.results / "step_time.csv"
    known = {(row["loss"], int(row["batch"])) for row in table.rows(path)}
    sizes = (
        {16: ("infonce", "fastclip-v3")} if asked.quick else {quality.BATCH: tuple(quality.CHOICES), **quality.LARGER}
    )
    for batch, loss in ((batch, loss) for batch, losses in sizes.items() for loss in losses):
        if (loss, batch) in known:
            continue
        run = replace(quality.trials(loss)[0], batch=batch)  # no setting changes what a step takes
        found = measure(run, asked.place(), quick=asked.quick)
        table.append(path, FIELDS, {"loss": loss, "batch": batch} | found | table.provenance())
        print(f"{loss:<12} batch {batch:>5,}  {found['ms']:.3f} ms a step", flush=True)


if __name__ == "__main__":
    main()

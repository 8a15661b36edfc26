"""Wrong captions where all weights are trained: two pretrained towers, and a model from scratch.

Registered before the first row. It continues wrong_captions.py: the same photographs, exchange of captions, test sets
and mean of four recall@10, last checkpoint, seeds 301 to 305. Arms infonce (learned temperature), v1, v3 and v1-auto,
at 0 and 20% exchanged.
- towers: projections as there, with the arm's loss and the values chosen there (v3: those of v1); then all weights by
  the recipe finetune, with the arm's loss and pair weights, 5 epochs, batch 256, lr 1e-5, 3e-5 or 1e-4.
- scratch: the small ViT of compare_losses.py, 32 epochs, batch 128, lr 2.5e-4, 5e-4 or 1e-3, crops of 50 to 100%.
  The best of the search there: infonce starts at tau 0.03, v1 has 0.05, v3 rho 6.5 and, for twice the epochs, half of
  its lr_tau.
The rate of each arm, start and share is chosen with seed 101 on the search's sets there; no further rates are tried.

    python benchmarks/evidence/wrong_captions_trained.py DATA IMAGE_WEIGHTS TEXT_DIRECTORY --start towers scratch
"""

import argparse
import itertools
import math
import multiprocessing
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import wrong_captions
from measurements import RESULTS, provenance, rows
from photo_dataset import MODEL
from wrong_captions import AUG_SCALE, DIRECTIONS, PRECISION, SEARCH_SEED, SEARCH_SETS, TEST_SETS, Inputs

import leanclip
from leanclip.evaluation_run import EvaluationConfig

FILE = RESULTS / "wrong_captions_trained.csv"
ARMS, SHARES, SEEDS = ("infonce", "v1", "v3", "v1-auto"), (0.2, 0.0), range(301, 306)
RATES = {"towers": (1e-5, 3e-5, 1e-4), "scratch": (2.5e-4, 5e-4, 1e-3)}
FROM_SCRATCH: dict[str, dict[str, Any]] = {
    "infonce": {"tau": 0.03}, "v1": {"tau": 0.05}, "v1-auto": {"tau": 0.05}, "v3": {"rho": 6.5, "lr_tau": 1e-4},
}  # fmt: skip


class Trial(NamedTuple):
    phase: str  # search or compare
    start: str  # towers or scratch
    arm: str
    lr: float
    exchanged: float
    seed: int

    def projections(self) -> wrong_captions.Trial:
        """The trial of the other study with this arm, draw and seed."""
        best = wrong_captions.chosen(self.arm, wrong_captions.stored())
        return best._replace(phase=self.phase, arm=self.arm, exchanged=self.exchanged, seed=self.seed)


def last_stage(trial: Trial, first: dict[str, Any], inputs: Inputs) -> leanclip.TrainedRun:
    """Training of all weights; `first` is common to what a trial trains."""
    settings = {
        "train_data": inputs.shards, "exchange_captions": trial.exchanged, "seed": trial.seed, "lr": trial.lr,
        "precision": PRECISION, "aug_scale": AUG_SCALE, "save_every": 10**6, "log_every": 1000, "compile": "off",
        "workers": 2, "discard_start": True, "pair_weights": "off", **wrong_captions.ARMS[trial.arm], **first,
    }  # fmt: skip
    if trial.start == "scratch":
        settings |= {"model": str(MODEL), "epochs": 32, "global_batch_size": 128, "wd": 0.1, "eps_opt": 1e-8}
        return leanclip.train(**settings | FROM_SCRATCH[trial.arm], name="run")
    heads = leanclip.train(**inputs.settings(trial.projections()) | first, name="heads")
    return leanclip.train(**settings, recipe="finetune", pretrained=str(heads.directory), name="run")


def run(trial: Trial, inputs: Inputs) -> dict[str, Any]:
    """One row."""
    torch.set_num_threads(1)
    begin, searching = time.perf_counter(), trial.phase == "search"
    with tempfile.TemporaryDirectory() as folder:
        projections = trial.projections()
        excluded = wrong_captions.left_out(projections, inputs)
        first: dict[str, Any] = {"logs": folder, "report_to": "none", "quiet": True}
        if len(excluded):
            listed = Path(folder) / "excluded.txt"
            listed.write_text("".join(f"id:{index}\n" for index in excluded))
            first["exclude"] = str(listed)
        trained = last_stage(trial, first, inputs)
        seconds = time.perf_counter() - begin
        sets = tuple(str(inputs.data / name) for name in (SEARCH_SETS if searching else TEST_SETS))
        results = leanclip.evaluate(trained, EvaluationConfig(val_data=sets, after_only=True))
        found = {
            f"{name} {direction[:13]}": float(result.metrics[direction])
            for name, result in zip(("flickr", "coco"), results, strict=True)
            for direction in DIRECTIONS
        }
        fits = [record["on"] for record in trained.metrics if record.get("kind") == "pair_weights"]
        detected = wrong_captions.detection(trained.checkpoint, projections, excluded)
    return {
        **trial._asdict(), **{name: f"{value:.4f}" for name, value in found.items()},
        "mean": f"{statistics.fmean(found.values()):.4f}", **detected,
        "fits_on": f"{sum(fits)} of {len(fits)}" if fits else "", "seconds": f"{seconds:.0f}", **provenance(),
    }  # fmt: skip


def stored() -> dict[Trial, dict[str, str]]:
    return {
        Trial(r["phase"], r["start"], r["arm"], float(r["lr"]), float(r["exchanged"]), int(r["seed"])): r
        for r in rows(FILE)
    }


def due(start: str) -> list[Trial]:
    """What can run now: the searches, and the comparison of each that is complete."""
    done, trials = stored(), []
    for arm, share in itertools.product(ARMS, SHARES):
        search = [Trial("search", start, arm, lr, share, SEARCH_SEED) for lr in RATES[start]]
        trials += search
        if all(trial in done for trial in search):
            best = max(search, key=lambda trial: float(done[trial]["mean"]))
            trials += [best._replace(phase="compare", seed=seed) for seed in SEEDS]
    return [trial for trial in trials if trial not in done]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs=3, metavar=("DATA", "IMAGE_WEIGHTS", "TEXT_DIRECTORY"))
    parser.add_argument("--start", nargs="+", required=True, choices=tuple(RATES))
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no run after this time")
    options = parser.parse_args()
    until = time.monotonic() + options.seconds
    inputs = Inputs(Path(options.inputs[0]), *options.inputs[1:])
    if "towers" in options.start:
        wrong_captions.fill_cache(inputs)
    with ProcessPoolExecutor(options.processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        for start in options.start:
            wrong_captions.run_all(
                lambda start=start: due(start), lambda trial: pool.submit(run, trial, inputs), FILE, until
            )
            print(f"{start}: {len(stored())} rows, {len(due(start))} trials left", flush=True)


if __name__ == "__main__":
    main()

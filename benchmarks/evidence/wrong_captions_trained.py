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

import itertools
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import wrong_captions
from measurements import RESULTS, provenance, rows
from photo_dataset import MODEL
from wrong_captions import (
    AUG_SCALE,
    DIRECTIONS,
    FROM_SCRATCH,
    PRECISION,
    SEARCH_SEED,
    SEARCH_SETS,
    TEST_SETS,
    Inputs,
)

import leanclip
from leanclip.evaluation_run import EvaluationConfig

FILE = RESULTS / "wrong_captions_trained.csv"
ARMS, SHARES, SEEDS = ("infonce", "v1", "v3", "v1-auto"), (0.2, 0.0), range(301, 306)
RATES = {"towers": (1e-5, 3e-5, 1e-4), FROM_SCRATCH: (2.5e-4, 5e-4, 1e-3)}
SCRATCH_SETTINGS: dict[str, dict[str, Any]] = {
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
    if trial.start == FROM_SCRATCH:
        settings |= {"model": str(MODEL), "epochs": 32, "global_batch_size": 128, "wd": 0.1, "eps_opt": 1e-8}
        return leanclip.train(**settings | SCRATCH_SETTINGS[trial.arm], name="run")
    heads = leanclip.train(**inputs.settings(trial.projections()) | first, name="heads")
    return leanclip.train(**settings, recipe="finetune", pretrained=str(heads.directory), name="run")


def run(trial: Trial, inputs: Inputs) -> list[dict[str, Any]]:
    """One row."""
    torch.set_num_threads(1)
    begin, searching = time.perf_counter(), trial.phase == "search"
    with tempfile.TemporaryDirectory() as folder:
        projections = trial.projections()
        excluded = wrong_captions.left_out(projections, inputs)
        trained = last_stage(trial, wrong_captions.common_settings(Path(folder), excluded), inputs)
        seconds = time.perf_counter() - begin
        sets = tuple(str(inputs.data / name) for name in (SEARCH_SETS if searching else TEST_SETS))
        results = leanclip.evaluate(trained, EvaluationConfig(val_data=sets, after_only=True))
        found = {
            f"{name} {direction[:13]}": float(result.metrics[direction])
            for name, result in zip(("flickr", "coco"), results, strict=True)
            for direction in DIRECTIONS
        }
        detected = wrong_captions.detection(trained.checkpoint, projections, excluded)
        detected["fits_on"] = wrong_captions.pair_fits(trained)
    row = {
        **trial._asdict(), **{name: f"{value:.4f}" for name, value in found.items()},
        "mean": f"{statistics.fmean(found.values()):.4f}", **detected,
        "seconds": f"{seconds:.0f}", **provenance(),
    }  # fmt: skip
    return [row]


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
    starts = {start: partial(due, start) for start in RATES}
    wrong_captions.run_study(__doc__, "--start", starts, run, FILE, processes=8)


if __name__ == "__main__":
    main()

"""Wrong captions: which loss, and whether weights that a run learns for its pairs, on 2 CPU cores.

Registered before the first row.

Data. Flickr8k's training photographs (6,000) and COCO's of all training shards but the last full one (24,023): 30,023
samples, one caption drawn at each visit. A share of the samples exchange their captions, drawn with the run's seed
(--exchange-captions). Towers. EfficientNet-Lite2 at 128 px, two views (crops of 50 to 100%), and all-MiniLM-L6-v2,
both locked and cached; open_clip's linear heads are trained. 16 epochs, batch 128, AdamW, weight decay 0.1, the rest
as `leanclip train` fills it in. Features and heads in bf16 autocast.

Search. At 20% exchanged, seed 101, on photographs of neither test set: Flickr8k val and the first 1,000 of the COCO
shard left out; mean of the four recall@10, last checkpoint. Six trials for each searched arm: learning rates 5e-4,
1e-3, 2e-3, two temperatures; while the best rate is at an edge, the next rate beyond it with both temperatures, at
most four times (twice until the seventh row, where the best rate of infonce lay beyond the grid); then, while the
best temperature is at an edge, the next one (half as much again, or two thirds) at the best rate, at most three times
(added after 24 rows, where 0.07 was the best of both constant temperatures of infonce). The rule is the same for all
arms, the candidate for the default (v1-auto) included. Arms that differ from a searched one in their pair weights
alone take its values.

Comparison. Flickr8k test and COCO val (1,000 photographs each), seeds 201 to 205, each with a draw of its own, last
checkpoint, mean of the four recall@10, paired by seed. Primaries at 20%: v1-auto against infonce (learned
temperature), against the best of infonce-constant, siglip and dcl-constant, and against the better of these with the
same pair weights. Then v1-auto and v1 at 0 and at 5%.

Smaller than it should be, for lack of a GPU: five seeds instead of ten, two views instead of four, six trials.

    python benchmarks/evidence/noise.py search DATA IMAGE_WEIGHTS TEXT_DIRECTORY [--part 1/2]
    python benchmarks/evidence/noise.py compare ...
    python benchmarks/evidence/noise.py table
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import torch
from line_chart import STYLE
from measurements import RESULTS, Table, append, provenance, rows
from stats import paired, percent

import leanclip
from leanclip.data import DataConfig, EvaluationTransform, Subset
from leanclip.data.synthetic import exchanged_captions
from leanclip.device import autocast_of
from leanclip.distributed import Ranks
from leanclip.evaluation import EvaluationSettings, embed, retrieval_metrics
from leanclip.evaluation.held_out import open_held_out
from leanclip.features.locked_towers import LockedTowers
from leanclip.models import TwoTower
from leanclip.suspects.scores import stored_scores

FILE = RESULTS / "noise.csv"
SAMPLES, PRECISION = 30_023, "amp_bf16"
ARMS: dict[str, dict[str, Any]] = {
    "infonce": {"loss": "infonce"},
    "infonce-constant": {"loss": "infonce", "learn_tau": False},
    "siglip": {"loss": "siglip"},
    "dcl-constant": {"loss": "dcl", "learn_tau": False},
    "v1-auto": {"loss": "fastclip-v1", "pair_weights": "auto"},
    "v1": {"loss": "fastclip-v1"},
    "infonce-constant-auto": {"loss": "infonce", "learn_tau": False, "pair_weights": "auto"},
    "dcl-constant-auto": {"loss": "dcl", "learn_tau": False, "pair_weights": "auto"},
}
SEARCHED = ("infonce", "infonce-constant", "siglip", "dcl-constant", "v1-auto")
VALUES_OF = {"v1": "v1-auto", "infonce-constant-auto": "infonce-constant", "dcl-constant-auto": "dcl-constant"}
RATES, MOST_EXTENSIONS, MOST_TEMPERATURES = (5e-4, 1e-3, 2e-3), 4, 3
TEMPERATURES = {"siglip": (0.05, 0.1)}  # where it starts; it is learned
USUAL_TEMPERATURES = (0.04, 0.07)
SEARCH_SEED, SEEDS = 101, range(201, 206)
SEARCH_SETS = ("flickr-val-000000.tar", "coco-train-000012.tar")
TEST_SETS = ("flickr-test-000000.tar", "coco-val-000000.tar")
SET_SIZE = 1000
DIRECTIONS = ("text_to_image_recall@10", "image_to_text_recall@10")


class Trial(NamedTuple):
    phase: str
    arm: str
    lr: float
    tau: float
    exchanged: float
    seed: int


class Inputs(NamedTuple):
    data: Path
    image: str
    text: str

    def settings(self, trial: Trial) -> dict[str, Any]:
        shards = ("flickr-train-{000000..000002}.tar", "coco-train-{000000..000011}.tar", "coco-train-000013.tar")
        return {
            "image_tower": "timm:tf_efficientnet_lite2", "pretrained_image": self.image, "force_image_size": 128,
            "text_tower": f"hf:{self.text}", "pretrained_text": self.text, "lock_image": True, "lock_text": True,
            "cache_locked": 2, "aug_scale": (0.5, 1.0), "precision": PRECISION, "epochs": 16, "wd": 0.1,
            "global_batch_size": 128, "train_data": "::".join(str(self.data / shard) for shard in shards),
            "workers": 0, "discard_start": True, "save_every": 10**6, "log_every": 100, "threads": 1,
            "exchange_captions": trial.exchanged, "lr": trial.lr, "tau": trial.tau, "seed": trial.seed,
            **ARMS[trial.arm],
        }  # fmt: skip


def run(trial: Trial, inputs: Inputs) -> dict[str, Any]:
    """One row."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        trained = leanclip.train(**inputs.settings(trial), name="run", logs=folder, report_to="none", quiet=True)
        seconds = time.perf_counter() - begin
        results: dict[str, float] = {}
        for name in SEARCH_SETS if trial.phase == "search" else TEST_SETS:
            results |= {f"{name.split('-')[0]} {d[:13]}": v for d, v in recalls(trained.model, inputs.data / name)}
        found = detection(trained.checkpoint, trial)
    return {
        **trial._asdict(), **{name: f"{value:.4f}" for name, value in results.items()},
        "mean": f"{statistics.fmean(results.values()):.4f}", **found, "seconds": f"{seconds:.0f}", **provenance(),
    }  # fmt: skip


def recalls(model: TwoTower, path: Path) -> Iterator[tuple[str, float]]:
    """Of the first samples of a shard, from cached features."""
    source = open_held_out(str(path), DataConfig()).source
    data = Subset(source, np.arange(min(SET_SIZE, len(source))))
    autocast = autocast_of(PRECISION, torch.device("cpu"))
    towers = LockedTowers(
        model=model, source=source, ids=data.ids, data_name=path.name, views=1, autocast=autocast, workers=0,
        transform=EvaluationTransform(model.preprocess), ranks=Ranks.current(), notify=lambda _: None,
    )  # fmt: skip
    features = towers.features(images=True, texts=True)
    settings = EvaluationSettings(device=torch.device("cpu"), autocast=autocast)
    embedded = embed(model, data, settings, features=features)
    metrics = retrieval_metrics(embedded.images, embedded.texts, embedded.image_of_text)
    return ((direction, float(metrics[direction])) for direction in DIRECTIONS)


def detection(checkpoint: Path, trial: Trial) -> dict[str, str]:
    """How well the scores find the exchanged pairs: AUROC, and the precision among as many as are wrong."""
    scores = stored_scores(checkpoint)
    if scores is None:
        return {"auroc": "", "precision": "", "share": ""}
    if not trial.exchanged:
        return {"auroc": "", "precision": "", "share": f"{scores.share:.4f}"}
    captions_of = exchanged_captions(np.arange(SAMPLES), SAMPLES, trial.exchanged, seed=trial.seed)
    wrong, order = captions_of != np.arange(SAMPLES), scores.score.argsort()
    rank = np.empty(SAMPLES)
    rank[order] = np.arange(1, SAMPLES + 1)
    number = int(wrong.sum())
    auroc = (rank[wrong].sum() - number * (number + 1) / 2) / (number * (SAMPLES - number))
    precision = wrong[order[-number:]].mean()
    return {"auroc": f"{auroc:.4f}", "precision": f"{precision:.4f}", "share": f"{scores.share:.4f}"}


def stored(path: Path = FILE) -> dict[Trial, dict[str, str]]:
    return {
        Trial(r["phase"], r["arm"], float(r["lr"]), float(r["tau"]), float(r["exchanged"]), int(r["seed"])): r
        for r in rows(path)
    }


def search_trials(arm: str) -> list[Trial]:
    """The trials that are due: the grid, then rates and temperatures beyond an edge at which the best one lies."""
    temperatures, rates, done = TEMPERATURES.get(arm, USUAL_TEMPERATURES), list(RATES), stored()
    for _ in range(MOST_EXTENSIONS + 1):
        trials = [Trial("search", arm, lr, tau, 0.2, SEARCH_SEED) for lr in rates for tau in temperatures]
        if due := [trial for trial in trials if trial not in done]:
            return due
        best = max(trials, key=lambda trial: float(done[trial]["mean"])).lr
        if best not in (min(rates), max(rates)):
            break
        rates.append(best / 2 if best == min(rates) else best * 2)
    trials = [trial for trial in done if (trial.phase, trial.arm) == ("search", arm)]
    tried = {trial.tau for trial in trials}
    best_trial = max(trials, key=lambda trial: float(done[trial]["mean"]))
    if best_trial.tau in (min(tried), max(tried)) and len(tried) < len(temperatures) + MOST_TEMPERATURES:
        factor = 2 / 3 if best_trial.tau == min(tried) else 3 / 2
        return [best_trial._replace(tau=float(f"{best_trial.tau * factor:.2g}"))]
    return []


def best_values(arm: str) -> tuple[float, float]:
    arm = VALUES_OF.get(arm, arm)
    if search_trials(arm):
        raise SystemExit(f"the search of {arm} is not complete")
    trials = {trial: row for trial, row in stored().items() if trial.phase == "search" and trial.arm == arm}
    best = max(trials, key=lambda trial: float(trials[trial]["mean"]))
    return best.lr, best.tau


def comparison_trials() -> list[Trial]:
    first, then = [(arm, 0.2) for arm in ARMS], [(arm, share) for share in (0.0, 0.05) for arm in ("v1-auto", "v1")]
    return [
        Trial("compare", arm, *best_values(arm), share, seed)
        for arms in (first, then)
        for seed in SEEDS
        for arm, share in arms
    ]


def compared(path: Path) -> dict[float, dict[str, dict[int, dict[str, str]]]]:
    """The rows of the comparison by share, arm and seed."""
    done = {trial: row for trial, row in stored(path).items() if trial.phase == "compare"}
    shares = sorted({trial.exchanged for trial in done})
    return {
        share: {
            arm: seeds
            for arm in ARMS
            if (seeds := {t.seed: row for t, row in done.items() if (t.arm, t.exchanged) == (arm, share)})
        }
        for share in shares
    }


def tables(path: Path) -> dict[str, Table]:
    """The mean of four recall@10 in percent, and the difference to v1-auto at the same share, paired by seed."""
    lines = []
    for share, arms in compared(path).items():
        means = {arm: {seed: float(row["mean"]) for seed, row in seeds.items()} for arm, seeds in arms.items()}
        for arm, seeds in arms.items():
            common, first = sorted(means[arm].keys() & means["v1-auto"].keys()), next(iter(seeds.values()))
            names = ("share", "auroc", "precision")
            found = [[float(row[name]) for row in seeds.values() if row[name]] for name in names]
            difference = ["", ""]
            if arm != "v1-auto" and len(common) > 1:
                result = paired([means["v1-auto"][seed] for seed in common], [means[arm][seed] for seed in common])
                difference = [str(result), f"{result.p:.2g}"]
            lines.append([
                f"{share:.0%}", arm, f"{float(first['lr']):g}", f"{float(first['tau']):g}", str(len(seeds)),
                percent(list(means[arm].values())), *difference,
                *(f"{100 * statistics.fmean(values):.1f}" if values else "" for values in found),
            ])  # fmt: skip
    columns = ["exchanged", "arm", "lr", "tau", "seeds", "mean recall@10", "v1-auto minus it", "p"]
    return {"noise": Table([*columns, "estimated share", "AUROC", "precision"], lines)}


def draw(path: Path) -> None:
    """One point per seed at 20%, the mean as a line, arms from the lowest mean to the highest."""
    arms = {arm: [100 * float(row["mean"]) for row in seeds.values()] for arm, seeds in compared(path)[0.2].items()}
    names = sorted(arms, key=lambda arm: statistics.fmean(arms[arm]))
    with plt.style.context(STYLE):
        figure, axes = plt.subplots(figsize=(8, 3.2))
        for number, arm in enumerate(names):
            axes.plot(arms[arm], [number] * len(arms[arm]), "o", alpha=0.6)
            axes.plot([statistics.fmean(arms[arm])] * 2, [number - 0.3, number + 0.3], "k-")
        axes.set_yticks(range(len(names)), names)
        axes.set(
            xlabel="mean of four recall@10 in %",
            title="leanclip train, 20% of the captions exchanged, one point per seed",
        )
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
        plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("phase", choices=("search", "compare", "table"))
    parser.add_argument("inputs", nargs="*", help="DATA IMAGE_WEIGHTS TEXT_DIRECTORY")
    parser.add_argument("--part", default="1/1", help="rows of this part: K/N")
    options = parser.parse_args()
    if options.phase == "table":
        print(tables(FILE)["noise"])
        return
    inputs = Inputs(Path(options.inputs[0]), *options.inputs[1:])
    part, parts = map(int, options.part.split("/"))
    if options.phase == "search":
        for arm in SEARCHED[part - 1 :: parts]:
            while trials := search_trials(arm):
                record(run(trials[0], inputs))
        return
    for trial in comparison_trials()[part - 1 :: parts]:
        if trial not in stored():
            record(run(trial, inputs))


def record(row: dict[str, Any]) -> None:
    append(FILE, row)
    shown = ("arm", "lr", "tau", "exchanged", "seed", "mean", "auroc", "share", "seconds")
    print({name: row[name] for name in shown}, flush=True)


if __name__ == "__main__":
    main()

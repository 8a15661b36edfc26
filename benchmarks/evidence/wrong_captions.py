"""Wrong captions on frozen towers: which loss, and whether weights that a run learns for its pairs, on one GPU.

Registered before the first row. It replaces a smaller study on 2 CPU cores (noise.py).

Data. 32,023 photographs: Flickr8k's training set (6,000) and 26,023 of COCO's; one caption drawn at each visit. A
share of the samples exchange their captions, drawn with the run's seed (--exchange-captions). Towers. EfficientNet-
Lite2 at 128 px, four views (crops of 50 to 100%), and all-MiniLM-L6-v2, locked and cached; open_clip's heads are
trained. 16 epochs, batch 128, AdamW, weight decay 0.1, bf16, the rest as `leanclip train` fills it in.

Search. At 20% exchanged, seed 101, without 2,000 of COCO's photographs, on photographs of neither test set: Flickr8k
val and the first 1,000 of those left out; mean of the four recall@10, last checkpoint. The same rule for every arm,
the candidate for the default (v1-auto) included: learning rates 2.5e-4, 5e-4, 1e-3, two temperatures, open_clip's
linear and mlp heads; then, while the best rate or temperature of all trials lies at the edge of those tried with its
head, the next one beyond it (rates half or double, temperatures two thirds or half as much again), at most six times.

Comparison, on Flickr8k test and COCO val (1,000 photographs each), all 32,023 for training, seeds 301 to 310, each
with its own draw, last checkpoint, mean of the four recall@10, paired by seed. Primaries, at 20%:
(a) v1-auto against infonce (learned temperature), (b) against the best of infonce-constant, siglip and dcl-constant,
(c) against the best of these three with the same pair weights, searched like all others. Reported beside each: a 95%
interval of the difference by bootstrap over seeds.

Stairs, seeds 301 to 305: infonce, infonce-constant, dcl-constant, v1, v1-auto and v1 without the wrong pairs
(--exclude), at 0, 5, 10, 20 and 40%, with the values chosen at 20%. v1-auto and v1 have ten seeds at 0 and 5%.
Batches 64, 512 and 2,048, clean and 20%: infonce, infonce-constant, dcl-constant, v1, v1-auto with head and
temperature of batch 128; the rate of batch 128 times the root of the ratio of the batches, its half and its double
tried on the search's photographs at the same noise, further while the best lies at an edge (at most three times);
then seeds 301 to 303. Batch 128 at 0% is searched like these.
Other losses (v0, v2, v3, sogclr, isogclr), at 0 and 20%: the same search of rates around that of v1, seeds 301 to
303.
Heads on clean data (registered later, before its rows): v1-auto at 0%, searched like the arms above but without
exchanged captions, heads included; then seeds 301 to 305, as phase clean-compare.
Clean (registered later, before its rows): v1-auto searched like the arms above, heads included, but at 0%; then the
best with seeds 301 to 305.
By heart: recall@10 of 1,000 wrong training captions for the image that they were given with.

    python benchmarks/evidence/wrong_captions.py DATA IMAGE_WEIGHTS TEXT_DIRECTORY --phase search
    python benchmarks/evidence/wrong_captions.py ... --phase primaries stairs batches losses clean  # after a commit

Many runs share the GPU: start `nvidia-cuda-mps-control -d` first. wrong_captions_report.py makes tables and figures.
"""

import argparse
import itertools
import math
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from measurements import RESULTS, append, provenance, rows

import leanclip
from leanclip.data import DataConfig, EvaluationTransform, Source, Subset, training_transform
from leanclip.data.decode import Transform
from leanclip.data.synthetic import exchanged_captions
from leanclip.device import autocast_of
from leanclip.distributed import Ranks
from leanclip.evaluation import EvaluationSettings, embed, retrieval_metrics
from leanclip.evaluation.embed import Embedded
from leanclip.evaluation.held_out import open_held_out
from leanclip.features.locked_towers import LockedTowers
from leanclip.models import TwoTower
from leanclip.suspects.scores import stored_scores

FILE = RESULTS / "wrong_captions.csv"
PRECISION, VIEWS, AUG_SCALE = "amp_bf16", 4, (0.5, 1.0)
CONSTANT = {"learn_tau": False}
ARMS: dict[str, dict[str, Any]] = {
    "infonce": {"loss": "infonce"},
    "infonce-constant": {"loss": "infonce", **CONSTANT},
    "siglip": {"loss": "siglip"},
    "dcl-constant": {"loss": "dcl", **CONSTANT},
    "v1": {"loss": "fastclip-v1"},
    "v1-auto": {"loss": "fastclip-v1", "pair_weights": "auto"},
    "infonce-constant-auto": {"loss": "infonce", "pair_weights": "auto", **CONSTANT},
    "siglip-auto": {"loss": "siglip", "pair_weights": "auto"},
    "dcl-constant-auto": {"loss": "dcl", "pair_weights": "auto", **CONSTANT},
    "v1-without-wrong": {"loss": "fastclip-v1"},
    **{name: {"loss": f"fastclip-{name}"} for name in ("v0", "v2", "v3")},
    **{name: {"loss": name} for name in ("sogclr", "isogclr")},
}
SEARCHED = tuple(ARMS)[:9]
PLAIN, WEIGHTED = ("infonce-constant", "siglip", "dcl-constant"), tuple(ARMS)[6:9]
STAIRS = ("infonce", "infonce-constant", "dcl-constant", "v1", "v1-auto", "v1-without-wrong")
BATCH_ARMS, OTHERS = STAIRS[:5], ("v0", "v2", "v3", "sogclr", "isogclr")
SHARES, BATCHES = (0.0, 0.05, 0.1, 0.2, 0.4), (64, 512, 2048)
VALUES_OF = {"v1-without-wrong": "v1", **dict.fromkeys(OTHERS, "v1")}  # which have no search of their own
HEADS, RATES, TEMPERATURES = ("linear", "mlp"), (2.5e-4, 5e-4, 1e-3), (0.05, 0.07)
MOST_EXTENSIONS, MOST_RATE_EXTENSIONS = 6, 3
SEARCH_SEED, SEEDS = 101, tuple(range(301, 311))
LEFT_OUT = "coco-train-000012.tar"
SEARCH_SETS, TEST_SETS = ("flickr-val-000000.tar", LEFT_OUT), ("flickr-test-000000.tar", "coco-val-000000.tar")
SHARDS = ("flickr-train-{000000..000002}.tar", "coco-train-{000000..000013}.tar")
SET_SIZE, BY_HEART = 1000, 1000
FROM_SCRATCH = "scratch"  # a part that needs no features of towers
DIRECTIONS = ("text_to_image_recall@10", "image_to_text_recall@10")


class Trial(NamedTuple):
    phase: str  # search, rates (at another batch or share), clean (a search, too), compare
    arm: str
    head: str
    lr: float
    tau: float
    exchanged: float
    batch: int
    seed: int


class Inputs(NamedTuple):
    data: Path
    image: str
    text: str

    @property
    def shards(self) -> str:
        return "::".join(str(self.data / shard) for shard in SHARDS)

    def settings(self, trial: Trial) -> dict[str, Any]:
        return {
            "image_tower": "timm:tf_efficientnet_lite2", "pretrained_image": self.image, "force_image_size": 128,
            "text_tower": f"hf:{self.text}", "pretrained_text": self.text, "lock_image": True, "lock_text": True,
            "cache_locked": VIEWS, "aug_scale": AUG_SCALE, "precision": PRECISION, "epochs": 16, "wd": 0.1,
            "train_data": self.shards, "workers": 0, "discard_start": True, "save_every": 10**6, "log_every": 1000,
            "global_batch_size": trial.batch, "head": trial.head, "lr": trial.lr, "tau": trial.tau,
            "exchange_captions": trial.exchanged, "seed": trial.seed, "threads": 1, "pair_weights": "off",
            **ARMS[trial.arm],
        }  # fmt: skip


def run(trial: Trial, inputs: Inputs) -> list[dict[str, Any]]:
    """One row."""
    torch.set_num_threads(1)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        excluded = left_out(trial, inputs)
        settings = inputs.settings(trial) | common_settings(Path(folder), excluded)
        trained = leanclip.train(**settings, name="run")
        seconds = time.perf_counter() - begin
        model, results = trained.model.to(device()), {}
        searching = trial.phase != "compare"
        for name in SEARCH_SETS if searching else TEST_SETS:
            results |= {f"{name.split('-')[0]} {d[:13]}": v for d, v in recalls(model, inputs.data / name)}
        by_heart = "" if searching or trial.exchanged != 0.2 else f"{recall_by_heart(model, trial, inputs):.4f}"
        detected = detection(trained.checkpoint, trial, excluded) | {"fits_on": pair_fits(trained)}
    row = {
        **trial._asdict(), **{name: f"{value:.4f}" for name, value in results.items()},
        "mean": f"{statistics.fmean(results.values()):.4f}", "tau_end": f"{model.temperature():.4f}", **detected,
        "by_heart": by_heart, "seconds": f"{seconds:.0f}",
        **provenance(),
    }  # fmt: skip
    return [row]


def common_settings(folder: Path, excluded: np.ndarray) -> dict[str, Any]:
    """Of a run in a folder of its own that does without these ids."""
    settings: dict[str, Any] = {"logs": str(folder), "report_to": "none", "quiet": True}
    if len(excluded):
        listed = folder / "excluded.txt"
        listed.write_text("".join(f"id:{index}\n" for index in excluded))
        settings["exclude"] = str(listed)
    return settings


def pair_fits(trained: leanclip.TrainedRun) -> str:
    """How many fits of the pair weights switched them on."""
    fits = [record["on"] for record in trained.metrics if record.get("kind") == "pair_weights"]
    return f"{sum(fits)} of {len(fits)}" if fits else ""


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def left_out(trial: Trial, inputs: Inputs) -> np.ndarray:
    """Ids: the photographs that the search evaluates on, or the wrong pairs."""
    source = training_source(inputs)
    if trial.phase != "compare":
        return np.asarray([index for index in range(len(source)) if Path(source.file(index)).name == LEFT_OUT])
    if trial.arm == "v1-without-wrong":
        return np.flatnonzero(wrong_pairs(trial, len(source)))
    return np.empty(0, np.int64)


def training_source(inputs: Inputs) -> Source:
    return open_held_out(inputs.shards, DataConfig()).source


def wrong_pairs(trial: Trial, samples: int) -> np.ndarray:
    captions_of = exchanged_captions(np.arange(samples), samples, trial.exchanged, seed=trial.seed)
    return captions_of != np.arange(samples)


def embedded(
    model: TwoTower, source: Source, ids: np.ndarray, *, transform: Transform, views: int
) -> tuple[Embedded, EvaluationSettings]:
    """From cached features."""
    autocast = autocast_of(PRECISION, device())
    towers = LockedTowers(
        model=model, source=source, ids=ids, data_name="photographs", views=views, autocast=autocast, workers=0,
        transform=transform, ranks=Ranks.current(), notify=lambda _: None,
    )  # fmt: skip
    features = towers.features(images=True, texts=True)
    settings = EvaluationSettings(device=device(), autocast=autocast)
    return embed(model, Subset(source, ids), settings, features=features), settings


def recalls(model: TwoTower, path: Path) -> Iterator[tuple[str, float]]:
    """Of the first samples of a shard."""
    source = open_held_out(str(path), DataConfig()).source
    ids = np.arange(min(SET_SIZE, len(source)))
    result, _ = embedded(model, source, ids, transform=EvaluationTransform(model.preprocess), views=1)
    metrics = retrieval_metrics(result.images, result.texts, result.image_of_text)
    return ((direction, float(metrics[direction])) for direction in DIRECTIONS)


def recall_by_heart(model: TwoTower, trial: Trial, inputs: Inputs) -> float:
    """Text to image among wrong pairs of the training data: how often the image that a caption was given with is
    among the first ten."""
    source = training_source(inputs)
    captions_of = exchanged_captions(np.arange(len(source)), len(source), trial.exchanged, seed=trial.seed)
    images = np.flatnonzero(captions_of != np.arange(len(source)))[:BY_HEART]
    ids = np.union1d(images, captions_of[images])
    transform = training_transform(model.preprocess, scale=AUG_SCALE)
    result, _ = embedded(model, source, ids, transform=transform, views=VIEWS)
    row = {index: number for number, index in enumerate(ids.tolist())}
    first = [int((result.image_of_text == row[index]).nonzero()[0]) for index in captions_of[images].tolist()]
    positions = torch.tensor([row[index] for index in images.tolist()], device=result.images.device)
    similarity = result.texts[first] @ result.images[positions].T
    better = (similarity > similarity.diagonal()[:, None]).sum(1)
    return float((better < 10).double().mean())


def detection(checkpoint: Path, trial: Trial, excluded: np.ndarray) -> dict[str, str]:
    """How well the scores tell the exchanged pairs: AUROC, and the precision among as many as are wrong."""
    scores = stored_scores(checkpoint)
    if scores is None:
        return dict.fromkeys(("share", "auroc", "precision"), "")
    result = {"share": f"{scores.share:.4f}", "auroc": "", "precision": ""}
    if not trial.exchanged:
        return result
    kept = np.setdiff1d(np.arange(len(scores.score)), excluded)
    wrong, score = wrong_pairs(trial, len(scores.score))[kept], scores.score[kept]
    order, rank, number = score.argsort(), np.empty(len(kept)), int(wrong.sum())
    rank[order] = np.arange(1, len(kept) + 1)
    auroc = (rank[wrong].sum() - number * (number + 1) / 2) / (number * (len(kept) - number))
    return result | {"auroc": f"{auroc:.4f}", "precision": f"{wrong[order[-number:]].mean():.4f}"}


def stored(path: Path = FILE) -> dict[Trial, dict[str, str]]:
    result = {}
    for row in rows(path):
        lr, tau, exchanged = float(row["lr"]), float(row["tau"]), float(row["exchanged"])
        sizes = int(row["batch"]), int(row["seed"])
        result[Trial(row["phase"], row["arm"], row["head"], lr, tau, exchanged, *sizes)] = row
    return result


Done = Mapping[Trial, Mapping[str, str]]


def best_of(trials: Iterable[Trial], done: Done) -> Trial:
    return max(trials, key=lambda trial: float(done[trial]["mean"]))


def beyond(best: Trial, tried: Iterable[Trial], *, temperatures: bool = True) -> Iterator[Trial]:
    """The trials next to the best one where it lies at an edge of those tried with its head."""
    same = [trial for trial in tried if trial.head == best.head]
    rates, taus = {trial.lr for trial in same}, {trial.tau for trial in same}
    if best.lr in (min(rates), max(rates)):
        yield best._replace(lr=best.lr / 2 if best.lr == min(rates) else best.lr * 2)
    if temperatures and best.tau in (min(taus), max(taus)):
        yield best._replace(tau=float(f"{best.tau * (2 / 3 if best.tau == min(taus) else 3 / 2):.2g}"))


def extended(trials: list[Trial], done: Done, most: int, *, temperatures: bool = True) -> list[Trial]:
    """All trials of a search, those that are due for now included: the last ones of the list."""
    for _ in range(most):
        if any(trial not in done for trial in trials):
            return trials
        new = [t for t in beyond(best_of(trials, done), trials, temperatures=temperatures) if t not in trials]
        if not new:
            break
        trials = trials + new
    return trials


def search_trials(arm: str, done: Done, *, clean: bool = False) -> list[Trial]:
    grid, (phase, share) = itertools.product(HEADS, RATES, TEMPERATURES), ("clean", 0.0) if clean else ("search", 0.2)
    start = [Trial(phase, arm, head, lr, tau, share, 128, SEARCH_SEED) for head, lr, tau in grid]
    return extended(start, done, MOST_EXTENSIONS)


def chosen(arm: str, done: Done) -> Trial:
    """The best trial of an arm's search."""
    return best_of(finished(search_trials(VALUES_OF.get(arm, arm), done), done), done)


def finished(trials: Iterable[Trial], done: Done) -> list[Trial]:
    if missing := [trial for trial in trials if trial not in done]:
        raise SystemExit(f"the search is not complete: {missing[0]}")
    return list(trials)


def rate_trials(arm: str, batch: int, exchanged: float, done: Done) -> list[Trial]:
    """At another batch or share than those of the search."""
    best = chosen(arm, done)._replace(phase="rates", arm=arm, batch=batch, exchanged=exchanged)
    rates = [float(f"{best.lr * math.sqrt(batch / 128) * factor:.3g}") for factor in (0.5, 1, 2)]
    start = [best._replace(lr=lr) for lr in rates]
    return extended(start, done, MOST_RATE_EXTENSIONS, temperatures=False)


def compare(trial: Trial, seeds: Sequence[int], **changes: Any) -> list[Trial]:
    return [trial._replace(phase="compare", seed=seed, **changes) for seed in seeds]


def primaries(done: Done) -> list[Trial]:
    return [trial for arm in SEARCHED for trial in compare(chosen(arm, done), SEEDS)]


def stairs(done: Done) -> list[Trial]:
    return [
        trial
        for share in SHARES
        for arm in STAIRS
        if not (share == 0 and arm == "v1-without-wrong")
        for trial in compare(
            chosen(arm, done),
            SEEDS if share <= 0.05 and arm in ("v1", "v1-auto") else SEEDS[:5],
            arm=arm,
            exchanged=share,
        )
    ]


def over_batches(done: Done) -> list[list[Trial]]:
    """The searches of rates, each of one arm, batch and share."""
    clean = [rate_trials(arm, 128, 0.0, done) for arm in BATCH_ARMS]
    pairs = itertools.product(BATCH_ARMS, BATCHES, (0.2, 0.0))
    return clean + [rate_trials(arm, batch, share, done) for arm, batch, share in pairs]


def other_losses(done: Done) -> list[list[Trial]]:
    return [rate_trials(arm, 128, share, done) for arm in OTHERS for share in (0.2, 0.0)]


def clean(done: Done) -> list[Trial]:
    search = search_trials("v1-auto", done, clean=True)
    complete = all(trial in done for trial in search)
    return search + (compare(best_of(search, done), SEEDS[:5]) if complete else [])


def due(phase: str, done: Done) -> list[Trial]:
    """What a phase can run now, the searches' extensions last."""
    if phase == "search":
        trials = [trial for arm in SEARCHED for trial in search_trials(arm, done)]
    elif phase in ("primaries", "stairs", "clean"):
        trials = {"primaries": primaries, "stairs": stairs, "clean": clean}[phase](done)
    else:
        trials = []
        for search in over_batches(done) if phase == "batches" else other_losses(done):
            trials += search
            if all(trial in done for trial in search):
                trials += compare(best_of(search, done), SEEDS[:3])
    return [trial for trial in dict.fromkeys(trials) if trial not in done]


def run_all(
    trials_due: Callable[[], list[Any]],
    submit: Callable[[Any], Future[list[dict[str, Any]]]],
    file: Path,
    until: float,
) -> None:
    """All trials that are due, those that follow from others' results as soon as these are there."""
    running: dict[Future[list[dict[str, Any]]], Any] = {}
    while True:
        if time.monotonic() < until:
            for trial in trials_due():
                if trial not in running.values():
                    running[submit(trial)] = trial
        if not running:
            return
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            trial = running.pop(future)
            if (error := future.exception()) is not None:
                print(f"{trial} failed: {error!r}", flush=True)
                running.clear()
                raise SystemExit(1)
            append(file, *future.result())
        if time.monotonic() >= until:
            for future in [future for future in running if future.cancel()]:
                del running[future]


def fill_cache(inputs: Inputs) -> None:
    """Features of the training photographs and of the sets, before many processes read them."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial("search", "v1", "linear", 1e-3, 0.05, 0.0, 128, SEARCH_SEED)
        workers = 12 if torch.cuda.is_available() else 0
        settings = inputs.settings(trial) | {"max_steps": 20, "warmup": 1, "workers": workers, "name": "run"}
        settings |= common_settings(Path(folder), np.empty(0))
        model = leanclip.train(**settings).model.to(device())
        for name in (*SEARCH_SETS, *TEST_SETS):
            recalls(model, inputs.data / name)
    print(f"features: {time.perf_counter() - begin:.0f} s", flush=True)


def run_study(
    description: str | None,
    flag: str,
    due: Mapping[str, Callable[[], list[Any]]],
    run: Callable[[Any, Inputs], list[dict[str, Any]]],
    file: Path,
    *,
    processes: int,
) -> None:
    """The command of a study. `flag` chooses its parts; `due` gives the trials that each of them can run now."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs=3, metavar=("DATA", "IMAGE_WEIGHTS", "TEXT_DIRECTORY"))
    parser.add_argument(flag, dest="parts", nargs="+", required=True, choices=tuple(due))
    parser.add_argument("--processes", type=int, default=processes)
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no run after this time")
    options = parser.parse_args()
    until = time.monotonic() + options.seconds
    inputs = Inputs(Path(options.inputs[0]), *options.inputs[1:])
    if options.parts != [FROM_SCRATCH]:
        fill_cache(inputs)
    with ProcessPoolExecutor(options.processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        for part in options.parts:
            run_all(due[part], lambda trial: pool.submit(run, trial, inputs), file, until)
            print(f"{part}: {len(rows(file))} rows, {len(due[part]())} trials left", flush=True)


def main() -> None:
    phases = {
        name: partial(due_now, name) for name in ("search", "primaries", "stairs", "batches", "losses", "clean")
    }
    run_study(__doc__, "--phase", phases, run, FILE, processes=14)


def due_now(phase: str) -> list[Trial]:
    return due(phase, stored())


if __name__ == "__main__":
    main()

"""Recipes for pretrained towers on real photographs: what they reach, and what fine-tuning keeps and gains.

Registered before the first row.

Data. 32,023 photographs of Flickr8k (6,000, 128 px) and COCO (26,023, 64 px), all with their right captions. Sets:
Flickr8k test and COCO val, 1,000 photographs each, and CIFAR-10 zero-shot (prompt 'a photo of a {}.'). Images at 128
px. Methods, with what they change in the recipe of that name:
- heads: EfficientNet-Lite2 and MiniLM, 4 views, 16 epochs; loss, rate, temperature and head as the recipe has them.
- lit: the same towers, 4 views, the image tower locked; lr_text 2e-5, 5e-5 or 1e-4.
- finetune: all weights from the end of the heads run of the same seed; lr 3e-5, 1e-4 or 3e-4; InfoNCE, 5 epochs.
- lora: DINOv2 ViT-S/14 at 126 px and MiniLM, rank 16 in both; lr 1e-4, 3e-4, 1e-3 or 3e-3, new heads 5e-4.
The rates of these two are not those of the first registration, 1e-5 to 1e-4 and 1e-4 to 1e-3, of which the largest
were the best. Batch norms moved then: the rows `search, norms moving`, which are not used.
The rate is chosen with seed 101 on Flickr8k val and the 2,000 photographs of a shard of COCO's, which are then not
trained on; then seeds 301 to 305 on all data, last checkpoint.
Kept and gained: heads trained on COCO alone, then all weights fine-tuned on Flickr8k's 6,000 by the recipe finetune
at the rate chosen above; Flickr8k test and COCO val at interpolation weights 0, 0.25, 0.5, 0.75, 1, seed 301.
--on-cpu (registered later, before its row): kept and gained alone, on 2 CPU cores in float32: one view, heads for 16
epochs on COCO, then all weights for 2 epochs on Flickr8k at 3e-5, the middle one of the rates above.
Timed: the first heads run and a second one are alone on the GPU; all other runs share it, their seconds say nothing.

    python benchmarks/evidence/fine_tuning.py DATA WEIGHTS [--on-cpu]  # again after a stop: what has no row yet
"""

import argparse
import math
import multiprocessing
import statistics
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from line_chart import figure
from measurements import RESULTS, Table, append, provenance, rows
from stats import mean_and_deviation
from wrong_captions import run_all

import leanclip
from leanclip.evaluation.results import SetResult
from leanclip.evaluation_run import EvaluationConfig, evaluate_interpolated, joined_processes, open_sets
from leanclip.inference import find_model, find_start
from leanclip.progress import make_console

FILE = RESULTS / "fine_tuning.csv"
SEARCH_SEED, SEEDS = 101, range(301, 306)
ALL = ("flickr-train-{000000..000002}.tar", "coco-train-{000000..000013}.tar")
WITHOUT_ONE = ("flickr-train-{000000..000002}.tar", "coco-train-{000000..000011}.tar", "coco-train-000013.tar")
SEARCH_SETS, TEST_SETS = (
    ("flickr-val-000000.tar", "coco-train-000012.tar"),
    ("flickr-test-000000.tar", "coco-val-000000.tar"),
)
FLICKR, COCO = ALL[:1], ALL[1:]
RATES: dict[str, tuple[str, tuple[float, ...]]] = {
    "lit": ("lr_text", (2e-5, 5e-5, 1e-4)),
    "finetune": ("lr", (3e-5, 1e-4, 3e-4)),
    "lora": ("lr", (1e-4, 3e-4, 1e-3, 3e-3)),
}
BETWEEN = (0.0, 0.25, 0.5, 0.75, 1.0)
RECALLS = [f"{side}_recall@{k}" for side in ("text_to_image", "image_to_text") for k in (1, 10)]


class Trial(NamedTuple):
    phase: str  # timed, search, compare or between
    method: str
    rate: float  # that of RATES; 0 where the recipe has it
    seed: int


class Inputs(NamedTuple):
    data: Path
    weights: Path
    runs: Path  # directory of the runs that others start from
    on_cpu: bool = False

    def towers(self, method: str) -> dict[str, Any]:
        text = self.weights / "all-MiniLM-L6-v2"
        name, file, size = "tf_efficientnet_lite2", "tf_efficientnet_lite2.fp16.safetensors", 128
        if method == "lora":
            name, file, size = "vit_small_patch14_dinov2", "vit_small_patch14_dinov2.fp16.safetensors", 126
        return {
            "image_tower": f"timm:{name}", "pretrained_image": str(self.weights / file), "force_image_size": size,
            "text_tower": f"hf:{text}", "pretrained_text": str(text),
        }  # fmt: skip

    def paths(self, names: tuple[str, ...]) -> str:
        return "::".join(str(self.data / name) for name in names)


def train(inputs: Inputs, method: str, data: tuple[str, ...], name: str, **settings: Any) -> leanclip.TrainedRun:
    heads = method in ("heads", "lit")
    settings = {
        "recipe": method, "train_data": inputs.paths(data), "name": name, "logs": str(inputs.runs), "compile": "off",
        "report_to": "none", "quiet": True, "save_every": 10**6, "log_every": 100, "workers": 2,
        "aug_scale": (0.5, 1.0), **({"cache_locked": 4} if heads else {}),
        **({"epochs": 16} if method == "heads" else {}), **settings,
    }  # fmt: skip
    if inputs.on_cpu:
        settings |= {"cache_locked": 1} if heads else {"epochs": 2}
    return leanclip.train(**settings)


def start(inputs: Inputs, method: str, data: tuple[str, ...], seed: int) -> dict[str, Any]:
    """Where a run starts: from two towers, or, to fine-tune all weights, from heads that are trained first."""
    if method != "finetune":
        return inputs.towers(method)
    name = f"heads-{seed}-{time.time_ns()}"
    heads = train(inputs, "heads", data, name, seed=seed, discard_start=True, **inputs.towers("heads"))
    return {"pretrained": str(heads.directory)}


def run(trial: Trial, inputs: Inputs) -> list[dict[str, Any]]:
    """The rows of a trial: one, or one for each interpolation weight."""
    torch.set_num_threads(2)
    method, searching = trial.method, trial.phase == "search"
    data = {"search": WITHOUT_ONE, "between": FLICKR}.get(trial.phase, ALL)
    settings = start(inputs, method, COCO if trial.phase == "between" else data, trial.seed)
    if trial.rate:
        settings[RATES[method][0]] = trial.rate
    if method == "lora":
        settings["lr_head"] = 5e-4
    begin = time.perf_counter()
    name = f"{trial.phase}-{method}-{trial.rate}-{trial.seed}-{time.time_ns()}"
    keep = trial.phase != "between"
    trained = train(inputs, method, data, name, seed=trial.seed, discard_start=keep, **settings)
    seconds = time.perf_counter() - begin
    steps = [record for record in trained.metrics if record["kind"] == "train"]
    common = {
        "seconds": f"{seconds:.1f}", "training_seconds": f"{steps[-1]['seconds']:.1f}",
        "gpu_memory_gib": f"{max(float(record.get('gpu_memory_gib', 0)) for record in steps):.2f}", **provenance(),
    }  # fmt: skip
    sets = SEARCH_SETS if searching else TEST_SETS
    config = EvaluationConfig(
        val_data=tuple(str(inputs.data / name) for name in sets),
        zero_shot=() if searching else (str(inputs.data / "cifar10"),),
        after_only=True,
    )
    if trial.phase != "between":
        return [row(trial, leanclip.evaluate(trained, config)) | common]
    end = find_model(str(trained.directory))
    with joined_processes(config) as config:
        opened = open_sets(config, end)
        results = evaluate_interpolated(
            config, (find_start(None, end), end), BETWEEN, opened, make_console(quiet=True)
        )
    return [row(trial, [r for r in results if r.weight == weight], weight) | common for weight in BETWEEN]


def row(trial: Trial, results: list[SetResult], weight: float = 1.0) -> dict[str, Any]:
    flickr, coco = (result for result in results if result.kind == "retrieval")
    recalls = {
        f"{name} {metric}": float(result.metrics[metric])
        for name, result in (("flickr", flickr), ("coco", coco))
        for metric in RECALLS
    }
    mean = statistics.fmean(value for name, value in recalls.items() if name.endswith("@10"))
    top1 = [result.metrics["top1"] for result in results if result.kind == "zero-shot"]
    return {
        **trial._asdict(), "weight": weight, **{name: f"{value:.4f}" for name, value in recalls.items()},
        "mean10": f"{mean:.4f}", "cifar10": f"{top1[0]:.4f}" if top1 else "",
    }  # fmt: skip


def chosen(method: str) -> float:
    """The rate that was best on the search's sets; 0 without a search."""
    found = [r for r in rows(FILE) if (r["phase"], r["method"]) == ("search", method)]
    return float(max(found, key=lambda r: float(r["mean10"]))["rate"]) if found else 0.0


def stored() -> Counter[Trial]:
    """The trials that have rows, and how many."""
    return Counter(Trial(r["phase"], r["method"], float(r["rate"]), int(r["seed"])) for r in rows(FILE))


def due() -> list[Trial]:
    """What can run now: heads, the searches, and the comparison of each method whose search is complete."""
    done = stored()
    trials = [Trial("compare", "heads", 0.0, seed) for seed in SEEDS]
    for method, (_, rates) in RATES.items():
        search = [Trial("search", method, rate, SEARCH_SEED) for rate in rates]
        trials += search
        if all(trial in done for trial in search):
            trials += [Trial("compare", method, chosen(method), seed) for seed in SEEDS]
    if (best := Trial("compare", "finetune", chosen("finetune"), SEEDS[0])) in trials:
        trials.append(best._replace(phase="between"))
    return [trial for trial in trials if trial not in done]


def tables(path: Path) -> dict[str, Table]:
    """`fine_tuning`: recall in percent over seeds; `interpolation`: one run, by the weight of its end."""
    stored = rows(path)
    columns = [f"{name} {metric}" for name in ("flickr", "coco") for metric in RECALLS] + ["mean10", "cifar10"]
    lines, between = [], []
    for method in ("heads", *RATES):
        seeds = [r for r in stored if (r["phase"], r["method"]) == ("compare", method)]
        if seeds:
            values = [mean_and_deviation([100 * float(r[name]) for r in seeds], 1) for name in columns]
            lines.append([method, seeds[0]["rate"], str(len(seeds)), *values])
    for r in stored:
        if r["phase"] == "between":
            between.append([r["weight"], *(f"{100 * float(r[name]):.1f}" for name in columns)])
    return {
        "fine_tuning": Table(["recipe", "rate", "seeds", *columns], lines),
        "interpolation": Table(["weight of the end", *columns], between),
    }


def draw(path: Path) -> None:
    """What the interpolation of weights keeps and gains."""
    between = [r for r in rows(path) if r["phase"] == "between"]
    with figure(path.with_suffix(".svg"), figsize=(5, 4)) as (_, axes):
        kept, gained = (
            [100 * float(r[f"{name} text_to_image_recall@10"]) for r in between] for name in ("coco", "flickr")
        )
        axes.plot(kept, gained, "o-")
        for r, x, y in zip(between, kept, gained, strict=True):
            axes.annotate(r["weight"], (x, y), textcoords="offset points", xytext=(6, 4))
        axes.set(
            xlabel="kept: COCO val, text-to-image recall@10 in %", ylabel="gained: Flickr8k test, likewise",
            title="leanclip, weights from start (0) to end (1) of fine-tuning",
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("weights", type=Path)
    parser.add_argument("--processes", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no run after this time")
    parser.add_argument("--on-cpu", action="store_true")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        inputs = Inputs(options.data, options.weights, Path(folder), options.on_cpu)
        between = Trial("between", "finetune", 3e-5, SEEDS[0])
        timed = Trial("timed", "heads", 0.0, SEEDS[0])
        with ProcessPoolExecutor(1, mp_context=context) as alone:
            for trial in [between] if options.on_cpu else [timed] * (2 - stored()[timed]):
                append(FILE, *alone.submit(run, trial, inputs).result())
        if not options.on_cpu:
            with ProcessPoolExecutor(options.processes, mp_context=context) as pool:
                run_all(due, lambda trial: pool.submit(run, trial, inputs), FILE, time.monotonic() + options.seconds)
    for table in tables(FILE).values():
        print(table, end="\n\n")


if __name__ == "__main__":
    main()

"""Short training runs on one device, several at a time, each stored as one row of runs.csv and a curve in curves.csv.

The step is leanclip's `training_step`, with compiled towers and CUDA graphs; the batches come from images that are on
the device. Runs with the same seed start from the same weights and see the same crops and captions in the same order,
whatever their loss.
"""

import functools
import hashlib
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import measurements
import torch
from command_line import Flag, command_line, temporary_folder
from photo_dataset import MODEL, CaptionedImages, PhotoDataset
from torch import Tensor
from torch.nn import functional as F

from leanclip import create_loss
from leanclip.data import Batch
from leanclip.data.datasets import BUNDLED
from leanclip.evaluation import retrieval_metrics
from leanclip.losses.registry import SPECS
from leanclip.models import ModelConfig, TwoTower, create_model
from leanclip.optim import OptimConfig, create_optimizer, scheduled, set_learning_rate, weight_decay_groups
from leanclip.training.cuda_graph import CudaGraphs
from leanclip.training.model_setup import cuda_graph_pays
from leanclip.training.step import training_step
from leanclip.training.step_context import StepContext

EPOCHS, POINTS = 16, 8  # of a run, and how often it is evaluated
# Common to all runs, beside the model; part of a run's key, so that a change trains them anew. Adam's epsilon is
# small and nothing is clipped, because the losses' gradients differ in size: some carry the factor tau.
RECIPE = {"warmup": 0.1, "betas": (0.9, 0.98), "eps": 1e-8, "crop": 0.5, "mirror": 0.5}
METRICS = ("val_t2i10", "test_t2i10", "test_i2t10", "cifar10", "seen_t2i10")
TINY = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 64, "layers": 1, "width": 32, "head_width": 16, "patch_size": 16},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
}
Point = dict[str, float]


@dataclass(frozen=True)
class Run:
    """The settings of one run. Hyper-parameters that `hyper` does not name have the loss's defaults."""

    loss: str
    batch: int
    lr: float
    seed: int
    hyper: tuple[tuple[str, Any], ...] = ()
    opt: str = "adamw"
    wd: float = 0.1
    epochs: int = EPOCHS

    @property
    def settings(self) -> dict[str, str]:
        """As in the CSV file."""
        named = {name: str(getattr(self, name)) for name in ("loss", "batch", "opt", "lr", "wd", "epochs", "seed")}
        defaults = SPECS[self.loss].defaults
        hyper = {name: value for name, value in sorted(self.hyper) if value != getattr(defaults, name)}
        return named | {"hyper": json.dumps(hyper)}

    def key(self, recipe: str) -> str:
        return hashlib.sha256(json.dumps([self.settings, recipe], sort_keys=True).encode()).hexdigest()[:10]


Rows = dict[Run, dict[str, str]]


def recipe_key(config: Path, steps: int | None) -> str:
    """Identifies what the runs have in common: recipe, model and early stop."""
    text = json.dumps([RECIPE, POINTS, json.loads(config.read_text()), steps])
    return hashlib.sha256(text.encode()).hexdigest()[:8]


@dataclass
class Workspace:
    """The data and the model, compiled once for all runs of a batch size."""

    data: PhotoDataset
    device: torch.device
    config: Path = MODEL
    model: TwoTower = field(init=False)
    batch: int = 0

    def __post_init__(self) -> None:
        self.model = create_model(ModelConfig(model=str(self.config))).to(self.device)
        if self.device.type == "cuda":
            self.model.compile_towers()

    @property
    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def begin(self, run: Run) -> tuple[StepContext, Iterator[Batch]]:
        """Fresh weights in the compiled model, the loss and the optimizer of the run, and its batches."""
        torch.manual_seed(run.seed)
        weights = create_model(ModelConfig(model=str(self.config))).state_dict()
        with torch.no_grad():
            for name, value in self.model.state_dict().items():
                value.copy_(weights[name])
        if run.batch != self.batch:
            torch.compiler.reset()
            self.batch = run.batch
        use_graph = self.device.type == "cuda" and cuda_graph_pays(self.model, run.batch)
        torch.manual_seed(run.seed)
        model = self.model.train()
        loss = create_loss(run.loss, num_samples=len(self.data.train.images), **dict(run.hyper)).to(self.device)
        beta1, beta2 = RECIPE["betas"]
        optim = OptimConfig(opt=run.opt, lr=run.lr, wd=run.wd, beta1=beta1, beta2=beta2, eps_opt=RECIPE["eps"])
        context = StepContext(
            towers=model,
            loss=loss,
            optimizer=create_optimizer(optim, [*weight_decay_groups(model, run.wd), *loss.param_groups()]),
            global_batch=run.batch,
            autocast=self.autocast,
            cuda_graphs=CudaGraphs(model, self.autocast) if use_graph else None,
        )
        return context, (batch.pack(model.texts) for batch in batches(self.data.train, run, self.device))


@functools.cache
def workspace(photos: Path, config: Path) -> Workspace:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return Workspace(PhotoDataset.load(photos, device), device, config)


def train(
    run: Run, place: Workspace, steps: int | None = None, inspect: Callable[[StepContext], Point] = lambda _: {}
) -> Iterator[Point]:
    """Trains, and yields the evaluated points with the figures of `inspect`. `steps` ends the run early."""
    context, stream = place.begin(run)
    count = len(place.data.train.images)
    per_epoch, total = max(1, count // run.batch), max(1, run.epochs * count // run.batch)
    evaluate_at = {round(total * number / POINTS) for number in range(1, POINTS + 1)}
    schedule = OptimConfig(lr=run.lr, warmup=max(1, round(RECIPE["warmup"] * total)))
    skipped, loss_sum = 0, torch.zeros((), device=place.device)
    last, seconds, began = 0, 0.0, time.perf_counter()
    for step in range(1, total + 1):
        context.loss.set_epoch((step - 1) / per_epoch, run.epochs)
        rate = scheduled(schedule, step - 1, steps=total, steps_per_epoch=1)
        set_learning_rate(context.optimizer, rate, peak=run.lr)
        result = training_step(context, next(stream))
        loss_sum += result.loss.nan_to_num()
        skipped += result.skipped
        if step in evaluate_at or step == steps:
            tau, mean_loss = float(context.loss.temperature().mean()), float(loss_sum) / (step - last)
            seconds += time.perf_counter() - began
            point = {"samples": step * run.batch, "seconds": seconds, "loss": mean_loss, "tau": tau}
            yield point | {"skipped": skipped} | evaluate(place) | inspect(context)
            loss_sum.zero_()
            last, began = step, time.perf_counter()
        if step == steps:
            return


def batches(data: CaptionedImages, run: Run, device: torch.device) -> Iterator[Batch]:
    """Epoch after epoch in a new order, each image with one of its captions, cropped and flipped on the device."""
    host = torch.Generator().manual_seed(run.seed)
    crops = torch.Generator(device).manual_seed(run.seed)
    while True:
        order = torch.randperm(len(data.images), generator=host)
        drawn = torch.rand(len(order), generator=host)
        first, count = data.first[order], data.first[order + 1] - data.first[order]
        text = first + (drawn.double() * count).long()  # the product stays below `count`
        device_order, device_text, lengths = order.to(device), text.to(device), data.lengths[text]
        for start in range(0, len(order) - run.batch + 1, run.batch):
            part = slice(start, start + run.batch)
            yield Batch(
                images=augment(data.images[device_order[part]], crops),
                tokens=data.tokens[device_text[part]].long(),
                sample_ids=order[part],
                lengths=lengths[part],
            )


def augment(images: Tensor, crops: torch.Generator) -> Tensor:
    """A random square of half of the area or more, half of them mirrored, resized to the full size."""
    count, device = len(images), images.device
    scale, x, y, mirror = torch.rand(4, count, device=device, generator=crops)
    scale = (RECIPE["crop"] + (1 - RECIPE["crop"]) * scale).sqrt()
    rows = torch.zeros(count, 2, 3, device=device)
    rows[:, 0, 0] = scale * torch.where(mirror < RECIPE["mirror"], -1.0, 1.0)
    rows[:, 1, 1] = scale
    rows[:, 0, 2], rows[:, 1, 2] = (1 - scale) * (2 * x - 1), (1 - scale) * (2 * y - 1)
    grid = F.affine_grid(rows, list(images.shape), align_corners=False)
    crop = F.grid_sample(images.float(), grid, padding_mode="border", align_corners=False)
    return crop.round_().clamp_(0, 255).to(torch.uint8)


@torch.no_grad()
def evaluate(place: Workspace) -> Point:
    """Recall@10 on both held-out sets and on as many training images ("seen"), and zero-shot accuracy."""
    model, data = place.model.eval(), place.data
    metrics: Point = {}
    with place.autocast:
        seen = data.train.last(len(data.test.images))  # of Flickr8k, as the test set is
        for name, pairs in (("val", data.val), ("test", data.test), ("seen", seen)):
            images = torch.cat([model.encode_image(part) for part in pairs.images.split(2000)]).float()
            texts = torch.cat([model.encode_text(part.long()) for part in pairs.tokens.split(5000)]).float()
            with torch.autocast(place.device.type, enabled=False):
                recall = retrieval_metrics(images, texts, pairs.image_of_text.to(images.device))
            metrics[f"{name}_t2i10"] = recall["text_to_image_recall@10"]
            metrics[f"{name}_i2t10"] = recall["image_to_text_recall@10"]
        classes, prompts = data.prompts.shape[:2]
        texts = model.encode_text(data.prompts.flatten(0, 1).long()).float()
        centres = F.normalize(texts.view(classes, prompts, -1).mean(1), dim=-1)
        images = torch.cat([model.encode_image(part) for part in data.class_images.split(2000)]).float()
        metrics["cifar10"] = ((images.double() @ centres.double().T).argmax(1) == data.labels).float().mean().item()
    model.train()
    return metrics


def csv_row(run: Run, recipe: str, points: Sequence[Point], seconds: float, processes: int) -> dict[str, Any]:
    """A row of runs.csv. The point with the best recall on val counts."""
    best, last = max(points, key=lambda point: point["val_t2i10"]), points[-1]
    return {
        "run": run.key(recipe),
        **run.settings,
        "samples": last["samples"],
        "best_samples": best["samples"],
        **{name: round(best[name], 5) for name in METRICS},
        **{f"last_{name}": round(last[name], 5) for name in METRICS},
        "tau": round(best["tau"], 5),
        "skipped": last["skipped"],
        "seconds": round(seconds, 1),
        "beside": processes,
        "recipe": recipe,
        **measurements.provenance(),
    }


def train_in_process(run: Run, photos: Path, config: Path, steps: int | None) -> tuple[list[Point], float]:
    began = time.time()
    return list(train(run, workspace(photos, config), steps)), time.time() - began


@dataclass
class RunStore:
    """The stored runs. With `photos`, `rows` first trains the runs that are missing."""

    results: Path = measurements.RESULTS
    photos: Path | None = None
    processes: int = 1
    steps: int | None = None
    config: Path = MODEL

    @property
    def recipe(self) -> str:
        return recipe_key(self.config, self.steps)

    @property
    def workspace(self) -> Workspace:
        assert self.photos is not None
        return workspace(self.photos, self.config)

    def rows(self, runs: Sequence[Run]) -> Rows:
        stored = self._stored()
        missing = {key: run for run in runs if (key := run.key(self.recipe)) not in stored}
        if missing and self.photos:
            self._train(sorted(missing.values(), key=lambda run: (run.batch, -run.epochs)))
            stored = self._stored()
        return {run: stored[key] for run in runs if (key := run.key(self.recipe)) in stored}

    def _stored(self) -> dict[str, dict[str, str]]:
        return {row["run"]: row for row in measurements.rows(self.results / "runs.csv")}

    def _train(self, runs: Sequence[Run]) -> None:
        """Finished runs are stored at once, so that the same command continues after an interruption."""
        if self.processes == 1:
            pool = ThreadPoolExecutor(1)
        else:
            context = multiprocessing.get_context("spawn")
            pool = ProcessPoolExecutor(self.processes, context, initializer=torch.set_num_threads, initargs=(1,))
        with pool:
            futures = {pool.submit(train_in_process, run, self.photos, self.config, self.steps): run for run in runs}  # pyright: ignore
            for done, future in enumerate(as_completed(futures), start=1):
                run, (points, seconds) = futures[future], future.result()
                for point in points:
                    figures = {
                        name: round(point[name], 5) for name in ("samples", "seconds", "loss", "tau", *METRICS)
                    }
                    measurements.append(self.results / "curves.csv", {"run": run.key(self.recipe)} | figures)
                row = csv_row(run, self.recipe, points, seconds, self.processes)
                measurements.append(self.results / "runs.csv", row)
                print(f"{done} of {len(runs)} runs", flush=True)

    def curve(self, run: Run) -> list[Point]:
        """The evaluated points of a run. An interrupted run leaves points that its repetition replaces."""
        rows = [row for row in measurements.rows(self.results / "curves.csv") if row["run"] == run.key(self.recipe)]
        points = {
            row["samples"]: {name: float(value) for name, value in row.items() if name != "run"} for row in rows
        }
        return list(points.values())


def store_from_command_line(description: str | None) -> RunStore:
    arguments = command_line(
        description, photos=Flag(None, "the folder written by photo_dataset.py", kind=Path),
        processes=Flag(8, "runs at the same time"), results=Flag(measurements.RESULTS, "the folder of the CSV files"),
    )  # fmt: skip
    if arguments.quick:
        folder = temporary_folder()
        config = folder / "tiny.json"
        config.write_text(json.dumps(TINY))
        return RunStore(folder, BUNDLED, steps=2, config=config)
    if arguments.photos is None:
        raise SystemExit("--photos FOLDER is missing; write it with photo_dataset.py")
    return RunStore(arguments.results, arguments.photos, arguments.processes)

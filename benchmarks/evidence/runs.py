"""Training runs of the experiments: many short ones, side by side on one device, each written down when it is over.

A run is a `Run`; `train` is what becomes of it. workers.py trains many of them.
The step is leanclip's own (`training_step`, with compiled towers and CUDA graphs); batches are cut from photographs
that lie on the device, so that runs wait for nothing. Runs with the same seed start from the same weights and see the
same crops and captions in the same order, whatever their loss.
"""

import functools
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import table
import torch
from photos import MODEL, Captioned, Photos
from torch import Tensor
from torch.nn import functional as F

from leanclip import create_loss
from leanclip.data import Batch
from leanclip.evaluation import retrieval_metrics
from leanclip.losses.registry import SPECS
from leanclip.models import ModelConfig, TwoTower, create_model
from leanclip.optim import OptimConfig, create_optimizer, set_learning_rate, weight_decay_groups
from leanclip.optim.schedule import learning_rate
from leanclip.training.cuda_graph import CudaGraphs
from leanclip.training.model_setup import cuda_graph_pays
from leanclip.training.step import training_step
from leanclip.training.step_context import StepContext

EPOCHS, POINTS = 16, 8  # of a run, and how often it is measured
# What all runs have in common, beside the model; it is part of a run's key, so that a change trains them anew. Adam's
# epsilon is small, and nothing is clipped, because the losses' gradients differ in size: some carry the factor tau.
RECIPE = {"warmup": 0.1, "betas": (0.9, 0.98), "eps": 1e-8, "crop": 0.5, "mirror": 0.5}
FIELDS = (
    "run", "loss", "batch", "opt", "lr", "wd", "hyper", "epochs", "seed", "samples", "best_samples", "val_t2i10",
    "test_t2i10", "test_i2t10", "cifar10", "seen_t2i10", "last_val_t2i10", "last_test_t2i10", "last_test_i2t10",
    "last_cifar10", "last_seen_t2i10", "tau", "skipped", "seconds", "beside", "recipe", *table.PROVENANCE,
)  # fmt: skip
TINY = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 64, "layers": 1, "width": 32, "head_width": 16, "patch_size": 16},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
}
CURVE = ("run", "samples", "seconds", "loss", "tau", "val_t2i10", "test_t2i10", "test_i2t10", "cifar10", "seen_t2i10")


@dataclass(frozen=True)
class Run:
    """The settings of one run. What is left open in `hyper` is the loss's own default."""

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
        """As they stand in the CSV file."""
        own = {name: str(getattr(self, name)) for name in ("loss", "batch", "opt", "lr", "wd", "epochs", "seed")}
        defaults = SPECS[self.loss].defaults
        hyper = {name: value for name, value in sorted(self.hyper) if value != getattr(defaults, name)}
        return own | {"hyper": json.dumps(hyper)}

    def key(self, recipe: str) -> str:
        return hashlib.sha256(json.dumps([self.settings, recipe], sort_keys=True).encode()).hexdigest()[:10]


def recipe_of(config: Path, steps: int | None) -> str:
    """A name for what the runs have in common: the recipe, the model, and where they are cut off."""
    whole = json.dumps([RECIPE, POINTS, json.loads(config.read_text()), steps])
    return hashlib.sha256(whole.encode()).hexdigest()[:8]


@dataclass
class Place:
    """Where runs take place: the photographs and the model, compiled once for all runs of a batch size."""

    photos: Photos
    device: torch.device
    config: Path = MODEL
    model: TwoTower = field(init=False)
    batch: int = 0
    recorder: CudaGraphs | None = None

    def __post_init__(self) -> None:
        self.model = create_model(ModelConfig(model=str(self.config))).to(self.device)
        if self.device.type == "cuda":
            self.model.compile_towers()

    @property
    def autocast(self) -> torch.autocast:
        cuda = self.device.type == "cuda"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=cuda)

    def begin(self, run: Run) -> None:
        """Fresh weights in the model that is compiled already."""
        torch.manual_seed(run.seed)
        fresh = create_model(ModelConfig(model=str(self.config))).state_dict()
        with torch.no_grad():
            for name, value in self.model.state_dict().items():
                value.copy_(fresh[name])
        if run.batch != self.batch:
            torch.compiler.reset()
            self.recorder = None
            if self.device.type == "cuda":
                torch.cuda.empty_cache()  # others want it
            self.batch = run.batch
        record = self.device.type == "cuda" and cuda_graph_pays(self.model, run.batch)
        self.recorder = CudaGraphs(self.model, self.autocast) if record else None  # with the loss of this run
        torch.manual_seed(run.seed)


def begin(run: Run, place: Place) -> tuple[StepContext, Iterator[Batch]]:
    """What a run starts from, and its batches."""
    place.begin(run)
    data, model = place.photos.train, place.model.train()
    loss = create_loss(run.loss, num_samples=len(data.images), **dict(run.hyper)).to(place.device)
    beta1, beta2 = RECIPE["betas"]
    optim = OptimConfig(opt=run.opt, lr=run.lr, wd=run.wd, beta1=beta1, beta2=beta2, eps_opt=RECIPE["eps"])
    optimizer = create_optimizer(optim, [*weight_decay_groups(model, run.wd), *loss.param_groups()])
    context = StepContext(
        towers=model, loss=loss, optimizer=optimizer, global_batch=run.batch, autocast=place.autocast,
        texts=model.texts, cuda_graphs=place.recorder,
    )  # fmt: skip
    return context, batches_of(data, run, place.device)


def train(
    run: Run, place: Place, steps: int | None = None, look: Callable[[StepContext], dict[str, float]] = lambda _: {}
) -> Iterator[dict[str, float]]:
    """Train, and yield the measured points, with what `look` finds there. `steps` ends the run early, for trying."""
    context, batches = begin(run, place)
    loss, optimizer, count = context.loss, context.optimizer, len(place.photos.train.images)
    per_epoch = max(1, count // run.batch)
    total = max(1, run.epochs * count // run.batch)
    evaluate_at = {round(total * number / POINTS) for number in range(1, POINTS + 1)}
    skipped, seen = 0, torch.zeros((), device=place.device)
    last, seconds, began = 0, 0.0, time.perf_counter()
    for step in range(1, total + 1):
        loss.set_epoch((step - 1) / per_epoch, run.epochs)
        lr = learning_rate(step - 1, steps=total, warmup=max(1, round(RECIPE["warmup"] * total)), peak=run.lr)
        set_learning_rate(optimizer, lr, peak=run.lr)
        result = training_step(context, next(batches))
        seen += result.loss.nan_to_num()
        skipped += result.skipped
        if step in evaluate_at or step == steps:
            tau, mean_loss = float(loss.temperature().mean()), float(seen) / (step - last)
            seconds += time.perf_counter() - began
            point = {"step": step, "samples": step * run.batch, "seconds": seconds, "loss": mean_loss, "tau": tau}
            yield point | {"skipped": skipped} | measured(place) | look(context)
            seen.zero_()
            last, began = step, time.perf_counter()
        if step == steps:
            return


def batches_of(data: Captioned, run: Run, device: torch.device) -> Iterator[Batch]:
    """Epoch after epoch in a new order, each image with one of its captions, cropped and flipped on the device."""
    host = torch.Generator().manual_seed(run.seed)
    crops = torch.Generator(device).manual_seed(run.seed)
    while True:
        order = torch.randperm(len(data.images), generator=host)
        drawn = torch.rand(len(order), generator=host)
        first, several = data.first[order], data.first[order + 1] - data.first[order]
        text = first + (drawn.double() * several).long()  # the product stays below `several`
        there, text_there, lengths = order.to(device), text.to(device), data.lengths[text]
        for start in range(0, len(order) - run.batch + 1, run.batch):
            part = slice(start, start + run.batch)
            yield Batch(
                images=augmented(data.images[there[part]], crops),
                tokens=data.tokens[text_there[part]].long(),
                sample_ids=order[part],
                lengths=lengths[part],
            )


def augmented(images: Tensor, crops: torch.Generator) -> Tensor:
    """A square of half of the area or more, half of them mirrored, at full size again."""
    count, device = len(images), images.device
    scale, x, y, mirror = torch.rand(4, count, device=device, generator=crops)
    scale = (RECIPE["crop"] + (1 - RECIPE["crop"]) * scale).sqrt()
    rows = torch.zeros(count, 2, 3, device=device)
    rows[:, 0, 0] = scale * torch.where(mirror < RECIPE["mirror"], -1.0, 1.0)
    rows[:, 1, 1] = scale
    rows[:, 0, 2], rows[:, 1, 2] = (1 - scale) * (2 * x - 1), (1 - scale) * (2 * y - 1)
    grid = F.affine_grid(rows, list(images.shape), align_corners=False)
    found = F.grid_sample(images.float(), grid, padding_mode="border", align_corners=False)
    return found.round_().clamp_(0, 255).to(torch.uint8)


@torch.no_grad()
def measured(place: Place) -> dict[str, float]:
    """Recall at 10 on both held-out sets and on as many photographs that it trained on, and zero-shot accuracy."""
    model, photos = place.model.eval(), place.photos
    found: dict[str, float] = {}
    with place.autocast:
        seen = photos.train.last(len(photos.test.images))  # of Flickr8k, as the test set is
        for name, data in (("val", photos.val), ("test", photos.test), ("seen", seen)):
            images = torch.cat([model.encode_image(part) for part in data.images.split(2000)]).float()
            texts = torch.cat([model.encode_text(part.long()) for part in data.tokens.split(5000)]).float()
            with torch.autocast(place.device.type, enabled=False):
                recall = retrieval_metrics(images, texts, data.image_of_text.to(images.device))
            found[f"{name}_t2i10"] = recall["text_to_image_recall@10"]
            found[f"{name}_i2t10"] = recall["image_to_text_recall@10"]
        classes, prompts = photos.prompts.shape[:2]
        texts = model.encode_text(photos.prompts.flatten(0, 1).long()).float()
        centres = F.normalize(texts.view(classes, prompts, -1).mean(1), dim=-1)
        images = torch.cat([model.encode_image(part) for part in photos.labelled.split(2000)]).float()
        found["cifar10"] = ((images.double() @ centres.double().T).argmax(1) == photos.labels).float().mean().item()
    model.train()
    return found


def row_of(run: Run, recipe: str, points: list[dict[str, float]], seconds: float, beside: int) -> dict[str, Any]:
    """What runs.csv says of a run. The weights that count are those of the point that is best on val."""
    best, last = max(points, key=lambda point: point["val_t2i10"]), points[-1]
    names = ("val_t2i10", "test_t2i10", "test_i2t10", "cifar10", "seen_t2i10")
    figures = {name: round(best[name], 5) for name in names} | {
        f"last_{name}": round(last[name], 5) for name in names
    }
    return run.settings | figures | {
        "run": run.key(recipe), "recipe": recipe, "samples": last["samples"], "best_samples": best["samples"],
        "tau": round(best["tau"], 5),
        "skipped": last["skipped"], "seconds": round(seconds, 1), "beside": beside,
    }  # fmt: skip


@functools.cache
def place(photos: Path, config: Path) -> Place:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return Place(Photos.of(photos, device), device, config)


def with_seeds(run: Run, seeds: int) -> list[Run]:
    return [replace(run, seed=seed) for seed in range(1, seeds + 1)]


Rows = dict[Run, dict[str, str]]

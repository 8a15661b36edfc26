"""Training runs of the experiments: many short ones, side by side on one device, each written down when it is over.

A run is a `Run`; `complete` returns the rows of all that are asked for and trains those that are not in runs.csv yet.
The step is leanclip's own (`training_step`, with compiled towers and CUDA graphs); batches are cut from photographs
that lie on the device, so that runs wait for nothing. Runs with the same seed start from the same weights and see the
same crops and captions in the same order, whatever their loss.
"""

import argparse
import functools
import hashlib
import json
import math
import multiprocessing
import os
import queue
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import table
import torch
from photos import MODEL, Captioned, Photos
from rich.progress import Progress
from torch import Tensor
from torch.nn import functional as F

from leanclip import create_loss
from leanclip.data import Batch
from leanclip.data.datasets import BUNDLED
from leanclip.evaluation import retrieval_metrics
from leanclip.models import ModelConfig, TwoTower, create_model
from leanclip.optim import OptimConfig, create_optimizer, set_learning_rate, weight_decay_groups
from leanclip.optim.schedule import learning_rate
from leanclip.training.pieces import Pieces
from leanclip.training.recorded import Recorder, worth_recording
from leanclip.training.step import training_step

EPOCHS, POINTS = 24, 12  # of a run, and how often it is measured
FIELDS = (
    "run", "loss", "batch", "opt", "lr", "wd", "hyper", "epochs", "seed", "samples", "best_samples", "val_t2i10",
    "test_t2i10", "test_i2t10", "cifar10", "last_val_t2i10", "last_test_t2i10", "last_test_i2t10", "last_cifar10",
    "tau", "skipped", "seconds", "beside", *table.PROVENANCE,
)  # fmt: skip
TINY = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 64, "layers": 1, "width": 32, "head_width": 16, "patch_size": 16},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
}
SEEDS = 5
CURVE = ("run", "samples", "loss", "tau", "val_t2i10", "test_t2i10", "test_i2t10", "cifar10")


@dataclass(frozen=True)
class Run:
    """The settings of one run. What is left open in `hyper` is the loss's own default."""

    loss: str
    batch: int
    lr: float
    seed: int
    hyper: tuple[tuple[str, Any], ...] = ()
    opt: str = "adamw"
    wd: float = 0.2
    epochs: int = EPOCHS

    @property
    def settings(self) -> dict[str, str]:
        """As they stand in the CSV file."""
        own = {name: str(getattr(self, name)) for name in ("loss", "batch", "opt", "lr", "wd", "epochs", "seed")}
        return own | {"hyper": json.dumps(dict(self.hyper))}

    @property
    def key(self) -> str:
        return hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode()).hexdigest()[:10]


@dataclass
class Place:
    """Where runs take place: the photographs and the model, compiled once for all runs of a batch size."""

    photos: Photos
    device: torch.device
    config: Path = MODEL
    model: TwoTower = field(init=False)
    batch: int = 0
    recorder: Recorder | None = None

    def __post_init__(self) -> None:
        self.model = create_model(ModelConfig(model=str(self.config))).to(self.device)
        if self.device.type == "cuda":
            self.model.compile_towers()

    @property
    def autocast(self) -> torch.autocast:
        cuda = self.device.type == "cuda"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=cuda)

    def begin(self, run: Run) -> None:
        """Fresh weights where the old ones were: recordings of the towers know them by address."""
        torch.manual_seed(run.seed)
        fresh = create_model(ModelConfig(model=str(self.config))).state_dict()
        with torch.no_grad():
            for name, value in self.model.state_dict().items():
                value.copy_(fresh[name])
        if run.batch != self.batch:
            torch.compiler.reset()
            record = self.device.type == "cuda" and worth_recording(self.model, run.batch)
            self.batch, self.recorder = run.batch, Recorder(self.model, self.autocast) if record else None
        torch.manual_seed(run.seed)


def train(run: Run, place: Place, steps: int | None = None) -> Iterator[dict[str, float]]:
    """Train, and yield the measured points. `steps` ends the run early, for trying."""
    place.begin(run)
    data, model = place.photos.train, place.model.train()
    count = len(data.images)
    per_epoch = max(1, count // run.batch)
    total = max(1, run.epochs * count // run.batch)
    loss = create_loss(run.loss, num_samples=count, **dict(run.hyper)).to(place.device)
    optim = OptimConfig(opt=run.opt, lr=run.lr, wd=run.wd, beta1=0.9, beta2=0.98, eps_opt=1e-6)
    optimizer = create_optimizer(optim, [*weight_decay_groups(model, run.wd), *loss.param_groups()])
    pieces = Pieces(
        towers=model, loss=loss, optimizer=optimizer, batch=run.batch, autocast=place.autocast, grad_clip_norm=1.0,
        texts=model.texts, recorder=place.recorder,
    )  # fmt: skip
    batches = batches_of(data, run, place.device)
    evaluate_at = {round(total * number / POINTS) for number in range(1, POINTS + 1)}
    skipped, seen = 0, torch.zeros((), device=place.device)
    last = 0
    for step in range(1, total + 1):
        loss.set_epoch((step - 1) / per_epoch, run.epochs)
        lr = learning_rate(step - 1, steps=total, warmup=max(1, total // 20), peak=run.lr)
        set_learning_rate(optimizer, lr, peak=run.lr)
        result = training_step(pieces, next(batches))
        seen += result.loss.nan_to_num()
        skipped += result.skipped
        if step in evaluate_at or step == steps:
            tau = float(loss.temperature().mean())
            point = {"step": step, "samples": step * run.batch, "loss": float(seen) / (step - last), "tau": tau}
            yield point | {"skipped": skipped} | measured(place)
            seen.zero_()
            last = step
        if step == steps:
            return


def batches_of(data: Captioned, run: Run, device: torch.device) -> Iterator[Batch]:
    """Epoch after epoch in a new order, each image with one of its captions, cropped and flipped on the device."""
    host = torch.Generator().manual_seed(run.seed)
    crops = torch.Generator(device).manual_seed(run.seed)
    while True:
        order = torch.randperm(len(data.images), generator=host)
        drawn = torch.rand(len(order), generator=host)
        text = (data.first[order] + drawn * (data.first[order + 1] - data.first[order])).long()
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
    scale = (0.5 + 0.5 * scale).sqrt()
    rows = torch.zeros(count, 2, 3, device=device)
    rows[:, 0, 0] = scale * torch.where(mirror < 0.5, -1.0, 1.0)
    rows[:, 1, 1] = scale
    rows[:, 0, 2], rows[:, 1, 2] = (1 - scale) * (2 * x - 1), (1 - scale) * (2 * y - 1)
    grid = F.affine_grid(rows, list(images.shape), align_corners=False)
    found = F.grid_sample(images.float(), grid, padding_mode="border", align_corners=False)
    return found.round_().clamp_(0, 255).to(torch.uint8)


@torch.no_grad()
def measured(place: Place) -> dict[str, float]:
    """Recall at 10 on both held-out sets and zero-shot accuracy, of the weights as they are."""
    model, photos = place.model.eval(), place.photos
    found: dict[str, float] = {}
    with place.autocast:
        for name, data in (("val", photos.val), ("test", photos.test)):
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


def row_of(run: Run, points: list[dict[str, float]], seconds: float, beside: int) -> dict[str, Any]:
    """What runs.csv says of a run. The weights that count are those of the point that is best on val."""
    best, last = max(points, key=lambda point: point["val_t2i10"]), points[-1]
    names = ("val_t2i10", "test_t2i10", "test_i2t10", "cifar10")
    figures = {name: round(best[name], 5) for name in names} | {
        f"last_{name}": round(last[name], 5) for name in names
    }
    return run.settings | figures | {
        "run": run.key, "samples": last["samples"], "best_samples": best["samples"], "tau": round(last["tau"], 5),
        "skipped": last["skipped"], "seconds": round(seconds, 1), "beside": beside,
    }  # fmt: skip


def complete(
    runs: list[Run],
    photos: Path,
    *,
    results: Path = table.RESULTS,
    processes: int = 8,
    until: float = math.inf,
    steps: int | None = None,
    config: Path = MODEL,
) -> "Rows":
    """The rows of these runs; those that are not there yet are trained, unless time runs out at `until`.

    `until` is on the clock of `time.time()`: no run begins that would probably not be over by then.
    """
    path = results / "runs.csv"
    known = {row["run"]: row for row in table.rows(path)}
    missing = sorted({run for run in runs if run.key not in known}, key=lambda run: (run.batch, run.key))
    if missing and time.time() < until:
        for run, points, seconds in _train_all(missing, photos, min(processes, len(missing)), until, steps, config):
            row = row_of(run, points, seconds, processes) | table.provenance()
            table.append(path, FIELDS, row)
            for point in points:
                curve = {name: round(point[name], 5) for name in CURVE[1:]}
                table.append(results / "curves.csv", CURVE, {"run": run.key} | curve)
        known = {row["run"]: row for row in table.rows(path)}
    return {run: known[run.key] for run in runs if run.key in known}


Done = tuple[Run, list[dict[str, float]], float]


def _train_all(
    runs: list[Run], photos: Path, processes: int, until: float, steps: int | None, config: Path
) -> Iterator[Done]:
    if processes == 1:
        place = _place(photos, config)
        for run in runs:
            began = time.time()
            yield run, list(train(run, place, steps)), time.time() - began
        return
    Photos.of(photos)  # decodes them, if nobody has yet
    context = multiprocessing.get_context("spawn")
    waiting, done = context.Queue(), context.Queue()
    for run in runs:
        waiting.put(run)
    workers = [
        context.Process(target=_work, args=(waiting, done, photos, until, steps, config)) for _ in range(processes)
    ]
    for worker in workers:
        worker.start()
    at_work = processes
    with Progress() as progress:
        bar = progress.add_task("runs", total=len(runs))
        while at_work:
            try:
                found = done.get(timeout=5)
            except queue.Empty:
                if any(worker.exitcode not in (None, 0) for worker in workers):
                    for worker in workers:
                        worker.terminate()
                    raise RuntimeError("a process of the experiment died; its error stands above") from None
                continue
            if found is None:
                at_work -= 1
            else:
                progress.advance(bar)
                yield found


@functools.cache
def _place(photos: Path, config: Path) -> Place:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return Place(Photos.of(photos, device), device, config)


def _work(waiting: Any, done: Any, photos: Path, until: float, steps: int | None, config: Path) -> None:
    """Runs one after the other, until there are no more."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "2"  # the others compile too
    torch.set_num_threads(1)
    place, longest = _place(photos, config), 0.0
    while True:
        try:
            run = waiting.get(timeout=1)
        except queue.Empty:
            break
        if time.time() + longest > until:
            break
        began = time.time()
        points = list(train(run, place, steps))
        longest = max(longest, time.time() - began)
        done.put((run, points, time.time() - began))
    done.put(None)


def with_seeds(run: Run, seeds: int) -> list[Run]:
    return [replace(run, seed=seed) for seed in range(1, seeds + 1)]


Rows = dict[Run, dict[str, str]]
Name = TypeVar("Name")


@dataclass
class Experiment:
    """What one command was asked for: where its runs come from and where its findings go."""

    finish: Callable[[list[Run]], Rows]
    results: Path
    seeds: int
    quick: bool

    def best(self, spaces: Mapping[Name, list[Run]]) -> dict[Name, Run]:
        """By name the trial that did best on val. A name whose trials are not complete is left out."""
        found = self.finish([trial for trials in spaces.values() for trial in trials])
        return {
            name: max(trials, key=lambda trial: float(found[trial]["val_t2i10"]))
            for name, trials in spaces.items()
            if all(trial in found for trial in trials)
        }

    def search(self, spaces: Mapping[Name, list[Run]]) -> tuple[dict[Name, list[Run]], Rows]:
        """By name the runs of the best trial, one for each seed, where they are complete; and the rows of them."""
        chosen = {name: with_seeds(trial, self.seeds) for name, trial in self.best(spaces).items()}
        found = self.finish([run for runs in chosen.values() for run in runs])
        return {name: runs for name, runs in chosen.items() if all(run in found for run in runs)}, found

    def curve(self, run: Run) -> list[dict[str, float]]:
        rows = [row for row in table.rows(self.results / "curves.csv") if row["run"] == run.key]
        return [{name: float(row[name]) for name in CURVE[1:]} for row in rows]


def experiment(description: str | None) -> Experiment:
    """From the command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=Path, help="the folder that photos.py made")
    parser.add_argument("--processes", type=int, default=8, help="runs side by side")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no run that would be over later")
    parser.add_argument("--write", action="store_true", help="train nothing: table, plot and text of what there is")
    parser.add_argument("--quick", action="store_true", help="emoji, a tiny model, two steps; nothing is kept")
    given = parser.parse_args()
    until = 0.0 if given.write else time.time() + given.seconds
    if given.quick:
        folder = Path(tempfile.mkdtemp())
        (folder / "tiny.json").write_text(json.dumps(TINY))

        def finish(runs: list[Run]) -> Rows:
            return complete(runs, BUNDLED, results=folder, processes=1, steps=2, config=folder / "tiny.json")

        return Experiment(finish, folder, 2, True)
    if given.photos is None and not given.write:
        parser.error("--photos FOLDER is missing; photos.py makes it")

    def finish(runs: list[Run]) -> Rows:
        return complete(runs, given.photos or Path(), processes=given.processes, until=until)

    return Experiment(finish, table.RESULTS, SEEDS, False)

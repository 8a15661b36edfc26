"""From a configuration to the a run that is ready to start."""

import hashlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePath

import torch
import torch.distributed as dist
from torch import nn

from leanclip.checkpointing.checkpoint import Position
from leanclip.checkpointing.openclip import OpenClipCheckpoint
from leanclip.checkpointing.resume import AUTO, LATEST, SavedRun, find_saved
from leanclip.checkpointing.state import RunState
from leanclip.data import Datasets, Manifest, TrainingLoader, open_datasets, training_transform
from leanclip.device import autocast_of, device_of
from leanclip.distributed import Ranks, gloo_group, wrap_ddp, wrap_fsdp
from leanclip.errors import UserError
from leanclip.evaluation import RECALLS, LabelledSet, Prompts, labelled_sets, prompts_for, zero_shot_metrics
from leanclip.losses import ContrastiveLoss, LossConfig, loss_from_config
from leanclip.losses.global_contrastive import GlobalContrastiveLoss
from leanclip.losses.registry import spec_of
from leanclip.models import TwoTower, model_config_of
from leanclip.optim import create_optimizer, weight_decay_groups
from leanclip.optim.loss_scale import LossScale
from leanclip.planning.fit import fitting
from leanclip.runs.config import TrainConfig
from leanclip.runs.defaults import fill, total_steps
from leanclip.runs.trackers import check_trackers
from leanclip.training.cuda_graph import CudaGraphs
from leanclip.training.kernel_warmup import ENOUGH, Ahead, rehearsals
from leanclip.training.model_setup import build_model, uses_compile, uses_cuda_graph
from leanclip.training.step_context import StepContext
from leanclip.training.weight_average import WeightEMA

SHARDED_OPTIMIZERS = ("adamw", "lamb", "lion", "sgdm")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run that is ready to start: this process's part of it."""

    config: TrainConfig
    device: torch.device
    data: Datasets
    model: TwoTower
    context: StepContext  # loss, optimizer, ranks and what else a step works with
    loader: TrainingLoader
    steps: int
    state: RunState  # what of the above a checkpoint holds
    group: dist.ProcessGroup | None  # for checkpoints alone
    position: Position  # where it starts
    resume_from: Path | None
    same_loss: bool = True  # as in the checkpoint that it was resumed from: neither reset nor grown
    ema: WeightEMA | None = None
    notes: tuple[str, ...] = ()  # about what was resumed
    compiled: bool = False  # so the first step takes longer
    zero_shot: tuple[tuple[LabelledSet, Prompts], ...] = ()  # classified at each evaluation

    @property
    def epochs(self) -> int:
        """Epochs the run really takes, the last one perhaps not whole."""
        return -(-self.steps // self.loader.steps_per_epoch)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.config.run.precision == "fp64" else torch.float32


def resolve(config: TrainConfig, saved: SavedRun | None = None) -> tuple[TrainConfig, Datasets]:
    """Check what can be checked before anything is built, index the data, and decide what was left open."""
    spec_of(config.run.loss)
    if "/" not in config.run.best_metric:  # others name a zero-shot set, and are checked when those are open
        _check_best_metric(config.run.best_metric, RECALLS)
    check_trackers(config.run.report_to)
    if config.model.model is not None:
        model_config_of(config.model.model)
    data = open_datasets(config.data, seed=config.run.seed, manifest=_manifest(config, saved))
    config = fill(config, samples=len(data.train), processes=Ranks.current().size)
    _agree(config, data)
    return config, data


def _agree(config: TrainConfig, data: Datasets) -> None:
    """All ranks must have the same settings and the same data under the same ids, wherever each host keeps them."""
    ranks = Ranks.current()
    told = replace(
        config,
        run=replace(config.run, name=None, device=None, logs="", zero_shot=(), imagenet_val=None, imagenet_v2=None),
        data=replace(config.data, train_data=None, val_data=None),
    )
    manifest = data.train.source.manifest() or []
    seen = [(PurePath(str(entry["name"])).name, entry.get("count"), entry.get("size")) for entry in manifest]
    mine = {"settings": repr(told), "training data": f"{len(data.train.source)} samples {seen}"}
    everyones = ranks.all_gather_objects(
        {what: hashlib.sha256(value.encode()).hexdigest() for what, value in mine.items()}
    )
    for rank, theirs in enumerate(everyones):
        for what in mine:
            if theirs[what] != everyones[0][what]:
                error = UserError(f"rank {rank} has other {what} than rank 0: give all the same, in the same order")
                error.shown = not ranks.first
                raise error


def _check_best_metric(metric: str, known: Sequence[str]) -> None:
    if metric not in known:
        raise UserError(f"unknown --best-metric {metric!r}; choose from {', '.join(known)}")


def _open_zero_shot(config: TrainConfig) -> tuple[tuple[LabelledSet, Prompts], ...]:
    run = config.run
    sets = labelled_sets(
        run.zero_shot,
        imagenet_val=run.imagenet_val,
        imagenet_v2=run.imagenet_v2,
        bundled=config.data.train_data is None and config.data.val_data is None,
    )
    named = [f"{each.name}/{metric}" for each in sets for metric in zero_shot_metrics(each)]
    _check_best_metric(run.best_metric, (*RECALLS, *named))
    return tuple((each, prompts_for(each, run.templates)) for each in sets)


def set_up(config: TrainConfig, *, kernels: bool = True) -> Job:
    """Build everything a run needs. Deterministic in the seed. `kernels`: compile a GPU's ahead of the first step."""
    ranks = Ranks.current()
    resume_from, warnings = _starting_point(config, ranks)
    saved = None if resume_from is None or resume_from.is_file() else SavedRun.open(resume_from)
    asked = config.loss
    config, data = resolve(_with_foreign_weights(config, resume_from), saved)
    reset = config.run.reset_loss_state
    if saved is not None and saved.already_reset(config, data.train.source.manifest(), len(data.train.source)):
        reset = False
        config = replace(config, run=replace(config.run, reset_loss_state=True))  # the next checkpoints know it, too
    zero_shot = _open_zero_shot(config)
    config = replace(
        config, run=replace(config.run, name=ranks.broadcast_from_first(lambda: config.run.name))
    )  # it may hold the time
    run, optim, batch = config.run, config.optim, config.data.global_batch_size
    assert run.device is not None and batch is not None and run.name is not None
    device = device_of(run.device)

    if device.type == "cpu" and config.data.workers:
        # Loader workers and compute threads beyond the number of cores make every step wait for the scheduler.
        cores = os.cpu_count() or 1
        torch.set_num_threads(max(1, min(torch.get_num_threads(), cores - config.data.workers)))

    torch.manual_seed(run.seed)
    start = config.model if saved is None else replace(config.model, pretrained=str(saved.path))
    double = run.precision == "fp64"
    model = build_model(config, start)
    config = replace(config, loss=_starting_temperature(config, model))
    notes = [] if saved is None else saved.compare(
        config, model.open_clip_config(), samples=len(data.train.source), reset_loss=reset
    )  # fmt: skip
    notes += [] if saved is None or reset else saved.without_effect(asked)
    if device.type == "cpu" and run.precision not in ("fp32", "fp64"):
        notes.append(f"--precision {run.precision} is slower than fp32 on most CPUs: leave it out there")
    loss = loss_from_config(
        run.loss,
        config.loss,
        num_samples=len(data.train.source) if saved is None or reset else saved.content["samples"],
        implementation=run.implementation,
    )
    model, loss = (module.to(device, torch.float64 if double else None) for module in (model, loss))
    assert isinstance(model, TwoTower) and isinstance(loss, ContrastiveLoss)
    autocast = autocast_of(run.precision, device)
    twin = partial(loss_from_config, run.loss, config.loss, num_samples=2 * ENOUGH, implementation=run.implementation)
    precision = partial(autocast_of, run.precision, device)
    early = kernels and device.type == "cuda" and ranks.size == 1
    ahead = Ahead(rehearsals(model, twin, batch=batch, autocast=precision, device=device) if early else (), device)
    micro = config.parallel.micro_batch or fitting(config, samples=len(data.train.source), ranks=ranks, device=device)
    steps = total_steps(config, samples=len(data.train), batch=batch)
    compiled = uses_compile(config, model, ranks, device, steps)
    if compiled:
        model.compile_towers(whole=not config.parallel.fsdp)
    model, towers = _over_ranks(model, config, ranks, device)
    ema = None if run.ema is None else WeightEMA(model, run.ema)
    assert optim.wd is not None
    optimizer = create_optimizer(optim, [*weight_decay_groups(model, optim.wd), *loss.param_groups()])
    loader = TrainingLoader(
        data.train.source,
        data.train.ids,
        batch=batch,
        share=ranks.share(batch),
        transform=training_transform(
            model.preprocess,
            scale=config.model.aug_scale,
            color_jitter=config.model.aug_color_jitter,
            color_jitter_prob=config.model.aug_color_jitter_prob,
            gray_scale_prob=config.model.aug_gray_scale_prob,
        ),
        tokenizer=model.tokenizer,
        seed=run.seed,
        workers=config.data.workers,
        pin_memory=device.type == "cuda",
        shuffle=config.data.shuffle,
        end_of_text=model.end_of_text,
    )
    if ranks.rank > 0:
        torch.manual_seed(run.seed + 7919 * ranks.rank)  # else all ranks' dropout would drop alike
    context = StepContext(
        towers=towers,
        loss=loss,
        optimizer=optimizer,
        global_batch=batch,
        autocast=autocast,
        grad_clip_norm=optim.grad_clip_norm,
        scale=LossScale.of(run.precision),
        ranks=ranks,
        micro_batches=_parts(micro, ranks, batch),
        texts=model.texts,
        cuda_graphs=CudaGraphs(model, autocast) if uses_cuda_graph(config, model, ranks, device) else None,
    )
    if context.norms.layers and batch // ranks.size // context.micro_batches < 2:
        raise UserError(
            "batch normalisation needs two samples in every micro-batch; raise --micro-batch or the batch"
        )
    state = RunState(model=model, loss=loss, optimizer=optimizer, scale=context.scale, ema=ema, device=device)
    group = gloo_group(ranks)
    position = Position(step=0, epoch=0, epoch_step=0, samples=0, seconds=0.0, best=None)
    if saved is not None:
        saved.load(state, group, reset_loss=reset)
        position = _with_own_best(saved, config)
        grown = len(data.train.source) > saved.content["samples"]  # by shards that were added since
        if grown or reset:  # as if the data had been there from the beginning
            epoch, epoch_step = divmod(position.step, loader.steps_per_epoch)
            position = replace(position, epoch=epoch, epoch_step=epoch_step)
        if grown and not reset and isinstance(loss, GlobalContrastiveLoss):
            loss.resize(len(data.train.source))
    elif resume_from is not None:
        position, taken = _go_on(resume_from, model, context, loader, position)
        notes.append(f"resumed {taken}")
        if position.step >= steps:
            raise UserError(f"{resume_from} ends where this run does, at step {steps} or later; raise --epochs")
    if (late := ahead.wait()) is not None:
        notes.append(f"warning: {late}")
    return Job(
        config=config, device=device, data=data, model=model, context=context, loader=loader, steps=steps,
        state=state, group=group, position=position, resume_from=resume_from, zero_shot=zero_shot,
        notes=(*(f"warning: {each}" for each in warnings), *notes),
        ema=ema, compiled=compiled,
        same_loss=saved is None or (not reset and len(data.train.source) == saved.content["samples"]),
    )  # fmt: skip


def _over_ranks(
    model: TwoTower, config: TrainConfig, ranks: Ranks, device: torch.device
) -> tuple[TwoTower, nn.Module]:
    """The model, and what a step calls in its place: gradients are averaged over the ranks, or weights split too."""
    if config.parallel.use_bn_sync and ranks.size > 1:
        if device.type != "cuda":
            raise UserError("--use-bn-sync works on GPUs only; leave it out")
        model.clip = nn.SyncBatchNorm.convert_sync_batchnorm(model.clip)
    if config.parallel.fsdp:
        if config.optim.opt not in SHARDED_OPTIMIZERS:
            raise UserError(
                f"--fsdp works with --opt {', '.join(SHARDED_OPTIMIZERS)}; {config.optim.opt} is not tested"
            )
        return model, wrap_fsdp(model, ranks, device, methods=("encode_image", "encode_text"))
    return model, wrap_ddp(model, ranks, device)


def _parts(micro: int, ranks: Ranks, batch: int) -> int:
    """How many micro-batches: as many on every rank, so that all take part in the same collectives."""
    parts = -(-ranks.largest_share(batch) // micro)
    if parts > batch // ranks.size:
        raise UserError(
            f"--micro-batch {micro} leaves a rank with a share of {batch // ranks.size} samples an empty micro-batch;"
            f" raise it, or choose a global batch that {ranks.size} processes divide"
        )
    return parts


def _starting_point(config: TrainConfig, ranks: Ranks) -> tuple[Path | None, list[str]]:
    """The checkpoint to go on from, and warnings about those that are damaged; the first process looks for all."""
    run = config.run
    if run.resume is None:
        return None, []
    if run.resume in (AUTO, LATEST) and run.name is None:
        raise UserError(f"--resume {run.resume} goes on with the run of a name; give --name")
    found = ranks.broadcast_from_first(lambda: _found(str(run.resume), Path(run.logs) / str(run.name)))
    return None if found[0] is None else Path(found[0]), found[1]


def _found(resume: str, run: Path) -> tuple[str | None, list[str]]:
    path, warnings = find_saved(resume, run)
    return None if path is None else str(path), warnings


def _with_own_best(saved: SavedRun, config: TrainConfig) -> Position:
    """Where the run stands. The best figure so far counts for the same metric, data and directory only."""
    before = saved.content["settings"]
    same = all(before.get(name) == getattr(config.data, name) for name in ("val_data", "val_split"))
    same = same and before.get("best_metric") == config.run.best_metric
    own = saved.path.parent == (Path(config.run.logs) / str(config.run.name) / "checkpoints").resolve()
    return saved.position if same and own else replace(saved.position, best=None)


def _with_foreign_weights(config: TrainConfig, resume_from: Path | None) -> TrainConfig:
    """A run of OpenCLIP's that is resumed starts from the weights and the temperature of its file."""
    if resume_from is None or not resume_from.is_file():
        return config
    OpenClipCheckpoint.read(resume_from)  # an error comes before the data are indexed
    return replace(config, model=replace(config.model, pretrained=str(resume_from)))


def _go_on(
    file: Path, model: TwoTower, context: StepContext, loader: TrainingLoader, start: Position
) -> tuple[Position, str]:
    """After the epochs that OpenCLIP has done, with its optimizer's state."""
    found = OpenClipCheckpoint.read(file)
    taken = found.restore(model, context.loss, context.optimizer, context.scale)
    step = found.epoch * loader.steps_per_epoch
    return replace(start, step=step, epoch=found.epoch, samples=step * loader.batch), taken


def _manifest(config: TrainConfig, saved: SavedRun | None) -> Manifest | None:
    """The ids that a resumed run began with, unless its data are new."""
    return None if saved is None or config.run.reset_loss_state else saved.manifest


def _starting_temperature(config: TrainConfig, model: TwoTower) -> LossConfig:
    """Fine-tuning starts from the checkpoint's temperature (and bias): `fill` left them open for that."""
    defaults = spec_of(config.run.loss).defaults
    low, high = config.loss.tau_min or 0.0, config.loss.tau_max or math.inf
    found = LossConfig(tau=min(max(model.temperature(), low), high))
    if defaults.bias is not None and model.bias():  # 0 is what a checkpoint without one is filled with
        found = replace(found, bias=model.bias())
    return config.loss.over(found.over(defaults))

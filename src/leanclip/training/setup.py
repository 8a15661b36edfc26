"""From a configuration to the pieces of a run."""

import hashlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

import torch
from torch import nn
from torch.optim import Optimizer

from leanclip.data import Datasets, Manifest, TrainingLoader, load_manifest, open_datasets, training_transform
from leanclip.distributed import Ranks, replicated, sharded
from leanclip.errors import UserError
from leanclip.evaluation import RECALLS, ZERO_SHOT_METRICS, LabelledSet, Prompts, labelled_sets, prompts_for
from leanclip.losses import ContrastiveLoss, LossConfig, loss_from_config
from leanclip.losses.global_contrastive import GlobalContrastiveLoss
from leanclip.losses.registry import spec_of
from leanclip.models import TwoTower, model_config_of
from leanclip.optim import create_optimizer, weight_decay_groups
from leanclip.training.checkpoint import Position, find_checkpoint, load_checkpoint
from leanclip.training.config import TrainConfig
from leanclip.training.defaults import fill, total_steps
from leanclip.training.fit import fitting
from leanclip.training.loss_scale import LossScale
from leanclip.training.openclip_checkpoint import OpenClipCheckpoint
from leanclip.training.pieces import Pieces
from leanclip.training.run_directory import RunDirectory
from leanclip.training.towers import build_towers
from leanclip.training.trackers import check_trackers

SHARDED_OPTIMIZERS = ("adamw", "lamb", "lion", "sgdm")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run that is ready to start: this process's part of it."""

    config: TrainConfig
    device: torch.device
    data: Datasets
    model: TwoTower
    loss: ContrastiveLoss
    optimizer: Optimizer
    pieces: Pieces  # what a step takes of the above
    ranks: Ranks
    loader: TrainingLoader
    steps: int
    position: Position  # where it starts
    resume_from: Path | None
    taken: str | None = None  # of a checkpoint of OpenCLIP's
    zero_shot: tuple[tuple[LabelledSet, Prompts], ...] = ()  # classified at each evaluation

    @property
    def epochs(self) -> int:
        """Epochs the run really takes, the last one perhaps not whole."""
        return -(-self.steps // self.loader.steps_per_epoch)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.config.run.precision == "fp64" else torch.float32


def autocast_of(precision: str | None, device: torch.device) -> torch.autocast:
    dtype = torch.float16 if precision == "amp" else torch.bfloat16
    return torch.autocast(device.type, dtype, enabled=precision in ("amp", "amp_bf16", "amp_bfloat16"))


def resolve(config: TrainConfig) -> tuple[TrainConfig, Datasets]:
    """Check what can be checked before anything is built, index the data, and decide what was left open."""
    try:
        spec_of(config.run.loss)
    except ValueError as error:
        raise UserError(str(error)) from error
    if "/" not in config.run.best_metric:  # others name a zero-shot set, and are checked when those are open
        _check_best_metric(config.run.best_metric, RECALLS)
    check_trackers(config.run.report_to)
    if config.model.model is not None:
        model_config_of(config.model.model)
    data = open_datasets(config.data, seed=config.run.seed, manifest=_known_manifest(config))
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
    everyones = ranks.everyones({what: hashlib.sha256(value.encode()).hexdigest() for what, value in mine.items()})
    for rank, theirs in enumerate(everyones):
        for what in mine:
            if theirs[what] != everyones[0][what]:
                error = UserError(f"rank {rank} has other {what} than rank 0: give all the same, in the same order")
                error.told = not ranks.first
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
    named = [f"{each.name}/{metric}" for each in sets for metric in ZERO_SHOT_METRICS]
    _check_best_metric(run.best_metric, (*RECALLS, *named))
    return tuple((each, prompts_for(each, run.templates)) for each in sets)


def set_up(config: TrainConfig) -> Job:
    """Build everything a run needs. Deterministic in the seed."""
    ranks = Ranks.current()
    config, data = resolve(_with_foreign_weights(config))
    zero_shot = _open_zero_shot(config)
    config = replace(
        config, run=replace(config.run, name=ranks.once(lambda: config.run.name))
    )  # it may hold the time
    run, optim, batch = config.run, config.optim, config.data.global_batch_size
    assert run.device is not None and batch is not None and run.name is not None
    device = device_of(run.device)
    resume_from = None if run.resume is None else find_checkpoint(run.resume, Path(run.logs) / run.name)

    if device.type == "cpu" and config.data.workers:
        # Loader workers and compute threads beyond the number of cores make every step wait for the scheduler.
        cores = os.cpu_count() or 1
        torch.set_num_threads(max(1, min(torch.get_num_threads(), cores - config.data.workers)))

    torch.manual_seed(run.seed)
    start = config.model if resume_from is None else replace(config.model, pretrained=str(resume_from))
    double = run.precision == "fp64"
    model = build_towers(config, start)
    config = replace(config, loss=_starting_temperature(config, model))
    manifest = _known_manifest(config)
    try:
        loss = loss_from_config(
            run.loss,
            config.loss,
            num_samples=sum(int(entry["count"]) for entry in manifest) if manifest else len(data.train.source),
            implementation=run.implementation,
        )
    except ValueError as error:
        raise UserError(str(error)) from error
    model, loss = (module.to(device, torch.float64 if double else None) for module in (model, loss))
    assert isinstance(model, TwoTower) and isinstance(loss, ContrastiveLoss)
    autocast = autocast_of(run.precision, device)
    micro = config.parallel.micro_batch or fitting(config, samples=len(data.train.source), ranks=ranks, device=device)
    model, towers = _over_ranks(model, config, ranks, device)
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
    )
    if ranks.rank > 0:
        torch.manual_seed(run.seed + 7919 * ranks.rank)  # else all ranks' dropout would drop alike
    pieces = Pieces(
        towers=towers,
        loss=loss,
        optimizer=optimizer,
        batch=batch,
        autocast=autocast,
        grad_clip_norm=optim.grad_clip_norm,
        scale=LossScale.of(run.precision),
        ranks=ranks,
        parts=_parts(micro, ranks, batch),
    )
    if pieces.norms.layers and batch // ranks.size // pieces.parts < 2:
        raise UserError(
            "batch normalisation needs two samples in every micro-batch; raise --micro-batch or the batch"
        )
    position = Position(step=0, epoch=0, epoch_step=0, samples=0, global_batch=batch, seconds=0.0, best=None)
    taken, steps = None, total_steps(config, samples=len(data.train), batch=batch)
    if resume_from is not None and resume_from.is_file():
        position, taken = _go_on(resume_from, model, pieces, loader, position)
        if position.step >= steps:
            raise UserError(f"{resume_from} ends where this run does, at step {steps} or later; raise --epochs")
    elif resume_from is not None:
        position = load_checkpoint(resume_from, loss, optimizer, pieces.scale, device)
        if position.global_batch != batch:
            raise UserError(f"the run has a global batch of {position.global_batch}, not {batch}; resume with that")
        if manifest is not None and isinstance(loss, GlobalContrastiveLoss):
            loss.resize(len(data.train.source))  # for shards that were added since
    return Job(
        config=config, device=device, data=data, model=model, loss=loss, optimizer=optimizer, pieces=pieces,
        ranks=ranks, loader=loader, steps=steps, position=position, resume_from=resume_from, taken=taken,
        zero_shot=zero_shot,
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
        return model, sharded(model, ranks, device, methods=("encode_image", "encode_text"))
    return model, replicated(model, ranks, device)


def _parts(micro: int, ranks: Ranks, batch: int) -> int:
    """How many micro-batches: as many on every rank, so that all take part in the same collectives."""
    parts = -(-ranks.largest_share(batch) // micro)
    if parts > batch // ranks.size:
        raise UserError(
            f"--micro-batch {micro} leaves a rank with a share of {batch // ranks.size} samples an empty micro-batch;"
            f" raise it, or choose a global batch that {ranks.size} processes divide"
        )
    return parts


def device_of(name: str | None) -> torch.device:
    """The device of that name; a GPU if there is one where none is named."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"unknown device {name!r}; give cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"--device {name} is not supported; give cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"--device {name}: PyTorch sees no GPU here; give cpu, or leave it out")
    return device


def _with_foreign_weights(config: TrainConfig) -> TrainConfig:
    """A run of OpenCLIP's that is resumed starts from the weights and the temperature of its file."""
    if config.run.resume is None or not Path(config.run.resume).is_file():
        return config
    OpenClipCheckpoint.read(Path(config.run.resume))  # an error comes before the data are indexed
    return replace(config, model=replace(config.model, pretrained=config.run.resume))


def _go_on(
    file: Path, model: TwoTower, pieces: Pieces, loader: TrainingLoader, start: Position
) -> tuple[Position, str]:
    """After the epochs that OpenCLIP has done, with its optimizer's state."""
    found = OpenClipCheckpoint.read(file)
    taken = found.restore(model, pieces.loss, pieces.optimizer, pieces.scale)
    step = found.epoch * loader.steps_per_epoch
    return replace(start, step=step, epoch=found.epoch, samples=step * loader.batch), taken


def _known_manifest(config: TrainConfig) -> Manifest | None:
    """The ids that a resumed run began with."""
    if config.run.resume is None or (config.run.resume == "latest" and config.run.name is None):
        return None
    checkpoint = find_checkpoint(config.run.resume, Path(config.run.logs) / str(config.run.name))
    if checkpoint.is_file():
        return None
    return load_manifest(RunDirectory(checkpoint.parents[1]).manifest)


def _starting_temperature(config: TrainConfig, model: TwoTower) -> LossConfig:
    """Fine-tuning starts from the checkpoint's temperature (and bias): `fill` left them open for that."""
    defaults = spec_of(config.run.loss).defaults
    low, high = config.loss.tau_min or 0.0, config.loss.tau_max or math.inf
    found = LossConfig(tau=min(max(model.temperature(), low), high))
    if defaults.bias is not None:
        found = replace(found, bias=model.bias())
    return config.loss.over(found.over(defaults))

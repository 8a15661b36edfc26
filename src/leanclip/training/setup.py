"""From a configuration to the pieces of a run."""

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.optim import Optimizer

from leanclip.data import Datasets, Manifest, TrainingLoader, load_manifest, open_datasets, training_transform
from leanclip.errors import UserError
from leanclip.evaluation import RECALLS
from leanclip.losses import ContrastiveLoss, LossConfig, loss_from_config
from leanclip.losses.global_contrastive import GlobalContrastiveLoss
from leanclip.losses.registry import spec_of
from leanclip.models import TwoTower, create_model, model_config_of
from leanclip.optim import create_optimizer, weight_decay_groups
from leanclip.training.checkpoint import Position, find_checkpoint, load_checkpoint
from leanclip.training.config import TrainConfig
from leanclip.training.defaults import fill, total_steps
from leanclip.training.run_directory import RunDirectory


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run that is ready to start."""

    config: TrainConfig
    device: torch.device
    data: Datasets
    model: TwoTower
    loss: ContrastiveLoss
    optimizer: Optimizer
    loader: TrainingLoader
    steps: int
    position: Position  # where it starts
    resume_from: Path | None

    @property
    def epochs(self) -> int:
        """Epochs the run really takes, the last one perhaps not whole."""
        return -(-self.steps // self.loader.steps_per_epoch)

    @property
    def autocast(self) -> torch.autocast:
        enabled = self.config.run.precision in ("amp_bf16", "amp_bfloat16")
        return torch.autocast(self.device.type, torch.bfloat16, enabled=enabled)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.config.run.precision == "fp64" else torch.float32


def resolve(config: TrainConfig) -> tuple[TrainConfig, Datasets]:
    """Check what can be checked before anything is built, index the data, and decide what was left open."""
    try:
        spec_of(config.run.loss)
    except ValueError as error:
        raise UserError(str(error)) from error
    if config.run.best_metric not in RECALLS:
        raise UserError(f"unknown --best-metric {config.run.best_metric!r}; choose from {', '.join(RECALLS)}")
    if config.model.model is not None:
        model_config_of(config.model.model)
    data = open_datasets(config.data, seed=config.run.seed, manifest=_known_manifest(config))
    return fill(config, samples=len(data.train)), data


def set_up(config: TrainConfig) -> Job:
    """Build everything a run needs. Deterministic in the seed."""
    config, data = resolve(config)
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
    model = create_model(start, siglip=run.loss == "siglip")
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
    _lock(model, config)
    double = run.precision == "fp64"
    model, loss = (module.to(device, torch.float64 if double else None) for module in (model, loss))
    assert isinstance(model, TwoTower) and isinstance(loss, ContrastiveLoss)
    assert optim.wd is not None
    optimizer = create_optimizer(optim, [*weight_decay_groups(model, optim.wd), *loss.param_groups()])
    loader = TrainingLoader(
        data.train.source,
        data.train.ids,
        batch=batch,
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
    position = Position(step=0, epoch=0, epoch_step=0, samples=0, global_batch=batch, seconds=0.0, best=None)
    if resume_from is not None:
        position = load_checkpoint(resume_from, loss, optimizer, device)
        if position.global_batch != batch:
            raise UserError(f"the run has a global batch of {position.global_batch}, not {batch}; resume with that")
        if manifest is not None and isinstance(loss, GlobalContrastiveLoss):
            loss.resize(len(data.train.source))  # for shards that were added since
    return Job(
        config=config, device=device, data=data, model=model, loss=loss, optimizer=optimizer, loader=loader,
        steps=total_steps(config, samples=len(data.train), batch=batch), position=position, resume_from=resume_from,
    )  # fmt: skip


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


def _known_manifest(config: TrainConfig) -> Manifest | None:
    """The ids that a resumed run began with."""
    if config.run.resume is None or (config.run.resume == "latest" and config.run.name is None):
        return None
    checkpoint = find_checkpoint(config.run.resume, Path(config.run.logs) / str(config.run.name))
    return load_manifest(RunDirectory(checkpoint.parents[1]).manifest)


def _starting_temperature(config: TrainConfig, model: TwoTower) -> LossConfig:
    """Fine-tuning starts from the checkpoint's temperature (and bias): `fill` left them open for that."""
    defaults = spec_of(config.run.loss).defaults
    low, high = config.loss.tau_min or 0.0, config.loss.tau_max or math.inf
    found = LossConfig(tau=min(max(model.temperature(), low), high))
    if defaults.bias is not None:
        found = replace(found, bias=model.bias())
    return config.loss.over(found.over(defaults))


def _lock(model: TwoTower, config: TrainConfig) -> None:
    if config.model.lock_image:
        model.lock_image()
    if config.model.lock_text:
        model.lock_text()

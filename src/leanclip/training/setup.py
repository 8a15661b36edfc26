"""From a configuration to a run that is ready to start, in four steps: resolve, build, distribute, restore."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from leanclip.checkpointing.checkpoint import Position
from leanclip.checkpointing.openclip import OpenClipCheckpoint
from leanclip.checkpointing.resume import SavedRun
from leanclip.checkpointing.state import RunState
from leanclip.data import Batch, Datasets, EvaluationTransform, TrainingLoader, training_transform
from leanclip.data.decode import TrainingTransform
from leanclip.data.feature_table import NO_FEATURES, Features
from leanclip.data.source import most_captions
from leanclip.device import autocast_of
from leanclip.distributed import gloo_group, wrap_ddp, wrap_fsdp
from leanclip.errors import UserError
from leanclip.evaluation import LabelledSet, Prompts
from leanclip.features.locked_towers import LockedTowers
from leanclip.losses import ContrastiveLoss, LossConfig
from leanclip.losses.pair_weights import MIN_VISITS
from leanclip.losses.registry import spec_of
from leanclip.models import ModelConfig, TwoTower
from leanclip.models.towers.layers import layer_rates
from leanclip.ops.resize import has_kernel
from leanclip.optim import OptimConfig, create_optimizer, weight_decay_groups
from leanclip.optim.loss_scale import LossScale
from leanclip.optim.weight_average import WeightEMA
from leanclip.runs.config import TrainConfig
from leanclip.training.cuda_graph import CudaGraphs
from leanclip.training.kernel_warmup import MOST_SAMPLES, KernelWarmup, warmup_calls
from leanclip.training.model_setup import loss_for_run, model_for_run, uses_compile, uses_cuda_graph
from leanclip.training.probe import Threads, probe_micro_batch, set_threads
from leanclip.training.resolve import ResolvedRun, resolve
from leanclip.training.step_context import StepContext

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
    state: RunState  # what a checkpoint holds
    group: dist.ProcessGroup | None  # for checkpoints alone
    position: Position  # where it starts
    resume_from: Path | None
    same_loss: bool = True  # as in the checkpoint that it was resumed from: neither reset nor grown
    ema: WeightEMA | None = None
    notes: tuple[str, ...] = ()  # for the user, before the first step
    compiled: bool = False  # so the first step takes longer
    threads: int | None = None  # of each process on a CPU
    seconds_per_step: float | None = None  # measured on a CPU whose threads were chosen, without optimizer and data
    peak_bytes: int | None = None  # of a GPU's memory, where the micro-batch was measured
    zero_shot: tuple[tuple[LabelledSet, Prompts], ...] = ()  # classified at each evaluation
    features: Features = NO_FEATURES  # of the training data, where towers are locked and their features kept
    val_features: Features = NO_FEATURES  # of the held-out data, likewise

    @property
    def finished(self) -> bool:
        """Whether the checkpoint that it resumes from is the run's end."""
        return self.resume_from is not None and self.position.step >= self.steps

    @property
    def epochs(self) -> int:
        """Epochs that the run takes, the last one perhaps not whole."""
        return -(-self.steps // self.loader.steps_per_epoch)

    def pack(self, batch: Batch) -> Batch:
        """A batch on the device with its features read there, or its captions packed for the text tower."""
        sides = zip(self.features, (batch.images, batch.tokens), strict=True)
        images, tokens = (side if table is None else table.gather(side) for table, side in sides)
        batch = replace(batch, images=images, tokens=tokens)
        if self.features.texts is not None:
            return batch
        return batch.pack(self.model.texts, self.context.micro_batches)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.config.run.precision == "fp64" else torch.float32


def set_up(config: TrainConfig, *, kernels: bool = True, done: Callable[[str], None] = lambda part: None) -> Job:
    """Everything a run needs. Deterministic in the seed. `kernels`: compile a GPU's before the first step.

    A dry run does without: it computes no features of locked towers either. `done` is called after each part.
    """
    run = resolve(config)
    done("index of the data")
    built = build(run)
    done("model and loss")
    job = distribute(built, kernels=kernels)
    done("kernels, optimizer, loader")
    job = restore(job, run)
    done("checkpoint")
    return job


@dataclass(frozen=True, kw_only=True)
class BuiltRun:
    """Model and loss on the device of this process, the same on every rank."""

    run: ResolvedRun
    config: TrainConfig  # complete
    model: TwoTower
    loss: ContrastiveLoss
    notes: tuple[str, ...]


def build(run: ResolvedRun) -> BuiltRun:
    config, device, saved = run.config, run.device, run.saved
    torch.manual_seed(config.run.seed)
    weights = config.model if saved is None else config.model.resumed_from(saved.path)
    model = model_for_run(config, weights)
    config = replace(config, loss=_starting_temperature(config, model))
    notes = list(run.notes)
    if saved is not None:
        notes += saved.compare(config, model.open_clip_config(), samples=run.samples, reset_loss=run.reset_loss)
        notes += [] if run.reset_loss else saved.ignored_settings(run.loss_flags)
    notes += _lock_notes(config.model, model)
    if device.type == "cpu" and config.run.precision not in ("fp32", "fp64"):
        notes.append(f"--precision {config.run.precision} is slower than fp32 on most CPUs; leave it out")
    epochs = -(-run.steps // (len(run.data.train) // run.batch))
    visits = epochs * max(config.data.upsampling_factors or [1])
    if config.data.pair_weights_mode != "off" and visits <= MIN_VISITS:
        notes.append(
            f"--pair-weights {config.data.pair_weights}: a pair is weighed after {MIN_VISITS} visits, which a run of"
            f" {epochs} epoch(s) does not exceed: all weights stay 1, only the scores are kept"
        )
    if config.data.pair_weights_mode != "off" and config.data.captions_per_sample == 1:
        captions = most_captions(run.data.train.source)
        notes += [
            f"--pair-weights {config.data.pair_weights}: the captions of a sample are judged together;"
            f" --captions-per-sample {captions} judges each by itself"
        ] * (captions > 1)
    loss = loss_for_run(config, run.saved_samples)
    dtype = torch.float64 if config.run.precision == "fp64" else None
    return BuiltRun(
        run=run, config=config, model=model.to(device, dtype), loss=loss.to(device, dtype), notes=tuple(notes)
    )


def _lock_notes(settings: ModelConfig, model: TwoTower) -> list[str]:
    """On locked towers of which all layers are unlocked, or only the projection, which is trained anyway."""
    unlocked = {"image": settings.lock_image_unlocked_groups, "text": settings.lock_text_unlocked_layers}
    flags = {"image": "--lock-image-unlocked-groups", "text": "--lock-text-unlocked-layers"}
    return [
        f"{flags[tower.side]} {unlocked[tower.side]} equals --lock-{tower.side} alone: the last layer is the"
        f" projection, which is trained anyway; {unlocked[tower.side] + 1} trains a block, too"
        for tower in model.summary()
        if unlocked[tower.side] and tower.frozen_layers == tower.layers
    ] + [
        f"warning: --lock-{tower.side} freezes nothing: {unlocked[tower.side]} layers are unlocked, and the"
        f" {tower.side} tower has {tower.layers} and its projection"
        for tower in model.summary()
        if unlocked[tower.side] and not tower.frozen_layers
    ]


def parameter_rates(optim: OptimConfig, model: TwoTower) -> dict[str, float]:
    """Peak learning rates of the parameters that do not have --lr."""
    assert optim.lr is not None
    rates = layer_rates(
        model.clip,
        base=optim.lr,
        image=optim.lr_image,
        text=optim.lr_text,
        head=optim.lr_head,
        decay=optim.layer_decay,
    )
    return {f"clip.{name}": rate for name, rate in rates.items()}


def distribute(built: BuiltRun, *, kernels: bool) -> Job:
    """Over the ranks: the model, the optimizer's state and the batches. A job that starts at step 0."""
    run, config, model, loss = built.run, built.config, built.model, built.loss
    ranks, device, batch = run.ranks, run.device, run.batch
    warmup = _start_warmup(built) if kernels and device.type == "cuda" and ranks.size == 1 else None
    notes = list(built.notes)
    features, val_features = _locked_features(built, notes, compute=kernels)
    compiled = uses_compile(config, model, ranks, device, run.steps)
    if compiled:
        model.compile_towers(whole=not config.parallel.fsdp)
    towers = _wrap(model, run)
    ema = None if config.run.ema is None else WeightEMA(model, config.run.ema)
    assert config.optim.wd is not None
    groups = [
        *weight_decay_groups(model, config.optim.wd, parameter_rates(config.optim, model)),
        *loss.param_groups(),
    ]
    loader = _make_loader(built, features)
    if ranks.rank > 0:
        torch.manual_seed(config.run.seed + 7919 * ranks.rank)  # so that dropout differs between ranks
    autocast = autocast_of(config.run.precision, device)
    graph = uses_cuda_graph(config, model, ranks, device)
    context = StepContext(
        towers=towers,
        loss=loss,
        optimizer=create_optimizer(config.optim, groups),
        global_batch=batch,
        cuda_graphs=CudaGraphs(model, autocast) if graph else None,
        autocast=autocast,
        grad_clip_norm=config.optim.grad_clip_norm,
        scale=LossScale.of(config.run.precision),
        ranks=ranks,
    )
    if warmup is not None and (problem := warmup.wait()) is not None:
        notes.append(f"warning: {problem}")
    micro_batches, peak_bytes = _micro_batches(context, model, config, device)
    context = replace(context, micro_batches=micro_batches)
    threads = _set_threads(context, built, loader.workers) if device.type == "cpu" else None
    state = RunState(model=model, loss=loss, optimizer=context.optimizer, scale=context.scale, ema=ema, device=device)
    return Job(
        config=config, device=device, data=run.data, model=model, context=context, loader=loader, steps=run.steps,
        state=state, group=gloo_group(ranks), resume_from=run.resume_from, ema=ema, compiled=compiled,
        notes=(*notes, *(threads.notes if threads else ())), threads=threads.number if threads else None,
        seconds_per_step=threads.seconds_per_step if threads else None, peak_bytes=peak_bytes,
        position=Position(), zero_shot=run.zero_shot, features=features, val_features=val_features,
    )  # fmt: skip


def restore(job: Job, run: ResolvedRun) -> Job:
    """Load the checkpoint that the run resumes from, if any, into the job."""
    saved, loss, per_epoch = run.saved, job.context.loss, job.loader.steps_per_epoch
    if saved is not None:
        saved.load(job.state, job.group, reset_loss=run.reset_loss)
        position = _with_comparable_best(saved, job.config)
        grown = run.samples > saved.content["samples"]  # by shards that were added since
        epoch, epoch_step = divmod(position.step, per_epoch)  # as if the data had been complete from the beginning
        position = replace(position, epoch=epoch, epoch_step=epoch_step)
        if grown and not run.reset_loss:
            loss.resize(run.samples)
        return replace(job, position=position, same_loss=not (grown or run.reset_loss))
    if run.resume_from is None:
        return job
    checkpoint = OpenClipCheckpoint.read(run.resume_from)
    restored = checkpoint.restore(job.model, loss, job.context.optimizer, job.context.scale)
    step = checkpoint.epoch * per_epoch
    if step >= job.steps:
        raise UserError(
            f"{run.resume_from} ends at step {step} and this run at step {job.steps}; raise --epochs",
            code="resume.finished",
        )
    position = replace(job.position, step=step, epoch=checkpoint.epoch, samples=step * run.batch)
    return replace(job, position=position, notes=(*job.notes, f"resumed {restored}"))


def _starting_temperature(config: TrainConfig, model: TwoTower) -> LossConfig:
    """Fine-tuning starts from the temperature and bias of the weights; `fill` left them open for that."""
    defaults = spec_of(config.run.loss).defaults
    low, high = config.loss.tau_min or 0.0, config.loss.tau_max or math.inf
    pretrained = LossConfig(tau=min(max(model.temperature(), low), high))
    if defaults.bias is not None and model.bias():  # a checkpoint without a bias is filled with 0
        pretrained = replace(pretrained, bias=model.bias())
    return config.loss.over(pretrained.over(defaults))


def _start_warmup(built: BuiltRun) -> KernelWarmup:
    run, config = built.run, built.config
    calls = warmup_calls(
        built.model,
        partial(loss_for_run, config, 2 * MOST_SAMPLES),
        batch=run.batch,
        autocast=partial(autocast_of, config.run.precision, run.device),
        device=run.device,
        resized_to=_transform(built).size if _resize_on(config.data.decode, run.device) else None,
    )
    return KernelWarmup(calls, run.device)


def _wrap(model: TwoTower, run: ResolvedRun) -> nn.Module:
    """What a step calls: the model itself, or one whose gradients are averaged, or whose weights are sharded too."""
    config, ranks, device = run.config, run.ranks, run.device
    if config.parallel.use_bn_sync and ranks.size > 1:
        if device.type != "cuda":
            raise UserError("--use-bn-sync works on GPUs only; leave it out", code="training.bn_sync_needs_gpu")
        model.clip = nn.SyncBatchNorm.convert_sync_batchnorm(model.clip)
    if not config.parallel.fsdp:
        return wrap_ddp(model, ranks, device)
    if config.optim.opt not in SHARDED_OPTIMIZERS:
        message = f"--fsdp works with --opt {', '.join(SHARDED_OPTIMIZERS)}; {config.optim.opt} is not tested"
        raise UserError(message, code="training.fsdp_optimizer")
    return wrap_fsdp(model, ranks, device, methods=("encode_image", "encode_text"))


def _transform(built: BuiltRun) -> TrainingTransform:
    settings = built.config.model
    return training_transform(
        built.model.preprocess,
        scale=settings.aug_scale,
        color_jitter=settings.aug_color_jitter,
        color_jitter_prob=settings.aug_color_jitter_prob,
        gray_scale_prob=settings.aug_gray_scale_prob,
    )


def _locked_features(built: BuiltRun, notes: list[str], *, compute: bool) -> tuple[Features, Features]:
    """Tables of what the locked towers compute for the training data and the held-out data, with --cache-locked."""
    run, config, val = built.run, built.config, built.run.data.val
    views = config.data.cache_locked
    if not views:
        return NO_FEATURES, NO_FEATURES
    images, texts = (tower.frozen_layers == tower.layers for tower in built.model.summary())
    if not images and not texts:
        raise UserError(
            "--cache-locked needs a tower that is locked as a whole; give --lock-image, --lock-text or both",
            code="features.nothing_locked",
        )
    towers = LockedTowers(
        model=built.model,
        source=run.data.train.source,
        data_name="training data",
        transform=_transform(built),
        views=views,
        autocast=autocast_of(config.run.precision, run.device),
        workers=config.data.workers,
        ranks=run.ranks,
        notify=notes.append,
        device=run.device,
    )
    if not compute:
        notes.append(towers.expected(images=images, texts=texts))
        return NO_FEATURES, NO_FEATURES
    train = towers.features(images=images, texts=texts)
    if val is None:
        return train, NO_FEATURES
    transform = EvaluationTransform(built.model.preprocess)
    towers = replace(
        towers, source=val.source, ids=val.ids, data_name="held-out data", transform=transform, views=1, device=None
    )
    return train, towers.features(images=images, texts=texts)


def _make_loader(built: BuiltRun, features: Features) -> TrainingLoader:
    run, config, model = built.run, built.config, built.model
    return TrainingLoader(
        run.data.train.source,
        run.data.train.visits,
        batch=run.batch,
        share=run.ranks.share(run.batch),
        transform=_transform(built),
        tokenizer=model.tokenizer,
        seed=config.run.seed,
        workers=config.data.workers,
        pin_memory=run.device.type == "cuda",
        resize_on=_resize_on(config.data.decode, run.device),
        shuffle=config.data.shuffle,
        end_of_text=model.end_of_text,
        features=features,
        group_key=config.data.group_key,
        weight_key=config.data.pair_weights_field,
        captions_of=run.data.train.captions_of,
        number_captions=config.data.scored_captions > 1,
    )


def _resize_on(decode: str, device: torch.device) -> torch.device | None:
    """The GPU, where it resizes training images instead of the workers."""
    able = device.type == "cuda" and has_kernel(device)
    if decode == "gpu" and not able:
        raise UserError(
            f"--decode gpu needs an NVIDIA GPU with Triton, the run is on {device}; leave it out",
            code="training.decode_needs_gpu",
        )
    return device if able and decode != "cpu" else None


def _set_threads(context: StepContext, built: BuiltRun, workers: int) -> Threads:
    """A resumed run keeps its own on the same number of processes: sums depend on it."""
    run, config, saved = built.run, built.config, built.run.saved
    same = saved is not None and saved.content.get("processes") == run.ranks.size
    return set_threads(
        context,
        built.model,
        share=run.ranks.largest_share(run.batch),
        workers=workers,
        flag=config.parallel.threads,
        saved=saved.content.get("threads") if saved is not None and same else None,
    )


def _micro_batches(
    context: StepContext, model: TwoTower, config: TrainConfig, device: torch.device
) -> tuple[int, int | None]:
    """As many on every rank, so that all take part in the same collectives; and the measured peak."""
    ranks, batch, parallel = context.ranks, context.global_batch, config.parallel
    share, smallest = ranks.largest_share(batch), batch // ranks.size
    _check_norms(context, smallest)  # before a pass is measured
    size, peak_bytes = parallel.micro_batch or share, None
    if parallel.micro_batch is None and device.type == "cuda":
        size, peak_bytes = probe_micro_batch(
            context, model, share=share, optimizer=config.optim.opt, fsdp=parallel.fsdp
        )
    if size < 1:
        raise UserError(
            f"not one sample fits beside the model on {device}; take a smaller model or batch (leanclip plan shows"
            " what fits), or give --micro-batch",
            code="training.out_of_memory",
        )
    count = -(-share // size)
    if count > smallest:
        raise UserError(
            f"--micro-batch {size} leaves a rank with a share of {smallest} samples an empty micro-batch;"
            f" raise it, or choose a global batch that {ranks.size} processes divide",
            code="training.empty_micro_batch",
        )
    _check_norms(context, smallest // count)
    return count, peak_bytes


def _check_norms(context: StepContext, samples: int) -> None:
    if context.norms.averages and samples < 2:
        raise UserError(
            "batch normalisation needs two samples in every micro-batch; raise --micro-batch or the batch",
            code="training.micro_batch_too_small",
        )


def _with_comparable_best(saved: SavedRun, config: TrainConfig) -> Position:
    """The position of a checkpoint. Its best figure counts for the same metric, data and run directory only."""
    before = saved.content["settings"]
    same = all(before.get(name) == getattr(config.data, name) for name in ("val_data", "val_split"))
    same = same and before.get("best_metric") == config.run.best_metric
    same = same and saved.path.parent == (Path(config.run.logs) / str(config.run.name) / "checkpoints").resolve()
    return saved.position if same else replace(saved.position, best=None)

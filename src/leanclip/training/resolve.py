"""The first step of set-up: every open setting decided, the data indexed, the checkpoint to resume from found."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

import torch

from leanclip.checkpointing.openclip import OpenClipCheckpoint
from leanclip.checkpointing.resume import AUTO, LATEST, SavedRun, find_checkpoint
from leanclip.data import Datasets, open_datasets
from leanclip.device import device_of
from leanclip.distributed import Ranks
from leanclip.errors import UserError
from leanclip.evaluation import RECALLS, LabelledSet, Prompts, labelled_sets, prompts_for, zero_shot_metrics
from leanclip.losses import LossConfig
from leanclip.losses.registry import spec_of
from leanclip.models import CONFIG_FILE, ModelConfig, model_config_of, named_architecture
from leanclip.runs.config import AUTO_LOSS, TrainConfig
from leanclip.runs.defaults import OPTIMIZER_RULES, fill, loss_name, model_of, total_steps
from leanclip.runs.trackers import check_trackers

FILLED_RATES = ("lr", "lr_image", "lr_text", "lr_head", "warmup")  # where a run starts from weights


@dataclass(frozen=True, kw_only=True)
class ResolvedRun:
    """A run on paper: nothing is built yet."""

    config: TrainConfig  # complete but for the temperature, which may come from the weights
    loss_flags: LossConfig  # as the user gave them
    data: Datasets
    ranks: Ranks
    device: torch.device
    batch: int  # the global one
    steps: int
    resume_from: Path | None  # a checkpoint of ours, or a file of OpenCLIP's
    saved: SavedRun | None  # where it is one of ours
    reset_loss: bool
    zero_shot: tuple[tuple[LabelledSet, Prompts], ...]
    notes: tuple[str, ...]  # for the user, before the first step

    @property
    def samples(self) -> int:
        return len(self.data.train.source)

    @property
    def saved_samples(self) -> int:
        """The size of the loss's tables: that of the checkpoint, which may grow once it is loaded, or of the data."""
        return self.samples if self.saved is None or self.reset_loss else self.saved.content["samples"]


def resolve(config: TrainConfig) -> ResolvedRun:
    """Check what can be checked before anything is built. All ranks call it together."""
    ranks, loss_flags = Ranks.current(), config.loss
    resume_from, warnings = _find_checkpoint(config, ranks)
    notes = [f"warning: {warning}" for warning in warnings]
    if (flag := config.model.random_frozen) is not None and resume_from is None:
        raise UserError(
            f"{flag} freezes the weights of the tower, and without --pretrained or --pretrained-{flag[7:]} these are"
            " random; give one of them",
            code="lora.without_weights" if flag.startswith("--lora") else "model.locked_without_weights",
        )
    fine_tuning, saved, asked = config.model.from_weights, None, config
    if resume_from is not None and resume_from.is_file():
        OpenClipCheckpoint.read(resume_from)  # its errors come before the data are indexed
        run = replace(config.run, loss=loss_name(config))
        config = replace(config, run=run, model=replace(config.model, pretrained=str(resume_from)))
    elif resume_from is not None:
        saved = SavedRun.open(resume_from)
        saved.compare_split(config)
        config = _as_begun(config, saved)
    config, data = _complete(config, saved, ranks, fine_tuning=fine_tuning)
    if fine_tuning and saved is None:
        notes += _filled_for_weights(asked, config)
    reset_loss = config.run.reset_loss_state
    if saved is not None and saved.already_reset(config, data.train.source.manifest(), len(data.train.source)):
        reset_loss = False
        config = replace(
            config, run=replace(config.run, reset_loss_state=True)
        )  # so that the next checkpoints say it
    # A default name contains the time, which differs between ranks.
    name = ranks.broadcast_from_first(lambda: config.run.name)
    config = replace(config, run=replace(config.run, name=name))
    batch = config.data.global_batch_size
    assert batch is not None and name is not None
    return ResolvedRun(
        config=config, loss_flags=loss_flags, data=data, ranks=ranks, device=device_of(config.run.device),
        batch=batch, steps=total_steps(config, samples=len(data.train), batch=batch), resume_from=resume_from,
        saved=saved, reset_loss=reset_loss, zero_shot=_open_zero_shot(config), notes=tuple(notes),
    )  # fmt: skip


def _as_begun(config: TrainConfig, saved: SavedRun) -> TrainConfig:
    """A resumed run keeps the loss, the kind of pair weights and, where it started from weights or has an optimizer
    with a rule of its own, the values that were filled in then."""
    before, run, optim, data = saved.content["settings"], config.run, config.optim, config.data
    if run.loss == AUTO_LOSS:
        run = replace(run, loss=str(before.get("loss", AUTO_LOSS)))
    if config.model.from_weights or optim.opt in OPTIMIZER_RULES:
        names = (*FILLED_RATES, "wd", "beta1", "beta2")
        open_rates = {name: before.get(name) for name in names if getattr(optim, name) is None}
        optim = replace(optim, **{name: rate for name, rate in open_rates.items() if isinstance(rate, int | float)})
    if data.pair_weights is None:
        data = replace(data, pair_weights=str(before.get("pair_weights") or "off"))
    return replace(config, model=_model_as_begun(config, saved), run=run, optim=optim, data=data)


def _model_as_begun(config: TrainConfig, saved: SavedRun) -> ModelConfig:
    """The checkpoint holds weights and architecture: the files that the run started from may have moved."""
    model = config.model
    name = model.model
    if name is None and model.pretrained is not None:
        name = model_of(model.pretrained) or str(saved.content["settings"]["model"])
    if name is not None and name.endswith((".json", ".safetensors")) and not Path(name).is_file():
        name = named_architecture(saved.path / CONFIG_FILE, ())
    return replace(model, model=name)


def _filled_for_weights(asked: TrainConfig, filled: TrainConfig) -> list[str]:
    """A note on the settings that were left open and got other values than a run from scratch."""
    values = {
        "--loss": filled.run.loss if asked.run.loss == AUTO_LOSS else None,
        "--pair-weights": filled.data.pair_weights if asked.data.pair_weights is None else None,
    }
    if values["--pair-weights"] == "off":  # as from scratch
        del values["--pair-weights"]
    for name in FILLED_RATES:
        if getattr(asked.optim, name) is None and (value := getattr(filled.optim, name)) is not None:
            values["--" + name.replace("_", "-")] = f"{value:.3g}" if isinstance(value, float) else value
    flags = " ".join(f"{flag} {value}" for flag, value in values.items() if value is not None)
    return [f"settings left open are filled for fine-tuning, as weights are given: {flags}"] if flags else []


def _complete(
    config: TrainConfig, saved: SavedRun | None, ranks: Ranks, *, fine_tuning: bool
) -> tuple[TrainConfig, Datasets]:
    spec_of(loss_name(config))
    if "/" not in config.run.best_metric:  # the others belong to a zero-shot set, and are checked with it
        _check_best_metric(config.run.best_metric, RECALLS)
    check_trackers(config.run.report_to)
    if config.model.model is not None:
        model_config_of(config.model.model)
    # A resumed run keeps the ids that it began with, unless its data are new.
    manifest = None if saved is None or config.run.reset_loss_state else saved.manifest
    data = open_datasets(config.data, seed=config.run.seed, manifest=manifest)
    config = fill(config, samples=len(data.train), processes=ranks.size, fine_tuning=fine_tuning)
    _check_ranks_agree(config, data, ranks)
    return config, data


def _check_ranks_agree(config: TrainConfig, data: Datasets, ranks: Ranks) -> None:
    """All ranks need the same settings and the same data under the same ids; paths may differ between hosts."""
    portable = replace(
        config,
        run=replace(config.run, name=None, device=None, logs="", zero_shot=(), imagenet_val=None, imagenet_v2=None),
        data=replace(config.data, train_data=None, val_data=None, exclude=None),
    )
    manifest = data.train.source.manifest() or []
    files = [(PurePath(str(entry["name"])).name, entry.get("count"), entry.get("size")) for entry in manifest]
    facts = {
        "settings": repr(portable),
        "training data": f"{len(data.train.source)} samples {files} {data.train.source.excluded}",
    }
    digests = ranks.all_gather_objects({
        name: hashlib.sha256(fact.encode()).hexdigest() for name, fact in facts.items()
    })  # fmt: skip
    for rank, name in ((rank, name) for rank in range(ranks.size) for name in facts):
        if digests[rank][name] != digests[0][name]:
            message = (
                f"rank {rank} has other {name} than rank 0; start all ranks with the same {name}, in the same order"
            )
            raise ranks.shown_once(UserError(message, code="distributed.ranks_differ"))


def _check_best_metric(metric: str, known: Sequence[str]) -> None:
    if metric not in known:
        message = f"unknown --best-metric {metric!r}; choose from {', '.join(known)}"
        raise UserError(message, code="evaluation.unknown_metric")


def _open_zero_shot(config: TrainConfig) -> tuple[tuple[LabelledSet, Prompts], ...]:
    run = config.run
    sets = labelled_sets(
        run.zero_shot,
        imagenet_val=run.imagenet_val,
        imagenet_v2=run.imagenet_v2,
        bundled=config.data.train_data is None and config.data.val_data is None,
    )
    metrics = [f"{labelled.name}/{metric}" for labelled in sets for metric in zero_shot_metrics(labelled)]
    _check_best_metric(run.best_metric, (*RECALLS, *metrics))
    return tuple((labelled, prompts_for(labelled, run.templates)) for labelled in sets)


def _find_checkpoint(config: TrainConfig, ranks: Ranks) -> tuple[Path | None, list[str]]:
    """What --resume means, and warnings about damaged checkpoints. The first rank searches for all."""
    run = config.run
    if run.resume is None:
        return None, []
    if run.resume in (AUTO, LATEST) and run.name is None:
        raise UserError(f"--resume {run.resume} needs the name of the run; give --name", code="resume.no_name")
    return ranks.broadcast_from_first(lambda: find_checkpoint(str(run.resume), Path(run.logs) / str(run.name)))

"""Fills in settings that the user did not set: rules through the published settings, defaults by model and device."""

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from leanclip.distributed import start_time
from leanclip.errors import UserError
from leanclip.losses import LossConfig
from leanclip.losses.registry import spec_of
from leanclip.models import (
    CONFIG_FILE,
    HUB,
    ModelConfig,
    adapters_only,
    architecture_of_file,
    find_weights,
    heads_only,
    is_resnet,
    named_architecture,
    new_projections,
)
from leanclip.optim import OptimConfig
from leanclip.runs.config import AUTO_LOSS, RunConfig, TrainConfig
from leanclip.runs.run_directory import RunDirectory

MIN_EVAL_EVERY, MIN_SAVE_EVERY = 10, 100  # default steps between them, in short runs


class Published(NamedTuple):
    """One of FastCLIP's published settings, for fastclip-v3."""

    samples: int
    lr: float
    lr_tau: float
    rho: float
    gamma_min: float
    decay_share: float  # of the epochs over which gamma falls
    batch: float


PUBLISHED = (
    Published(2_723_840, 1e-3, 2e-4, 6.5, 0.2, 18 / 37, 1024),  # CC3M, RN50
    Published(9_187_328, 4e-4, 1e-4, 8.5, 0.2, 16 / 33, 2048),  # CC12M, ViT-B-32
    Published(315_658_316, 2e-4, 5e-5, 16.0, 0.8, 10 / 30, 5120),  # LAION400M, ViT-B-16
)


class OptimizerRule(NamedTuple):
    """What an optimizer gets where the user set nothing."""

    lr: float  # times AdamW's
    wd: float
    betas: tuple[float, float] | None = None  # None: by model


# Lion's betas are its authors'. The rest is our choice: the best rate of a search beside AdamW's best, with the
# weight decay used there (docs/results.md).
ADAMW_RULE = OptimizerRule(1.0, 0.1)
OPTIMIZER_RULES = {"lion": OptimizerRule(0.2, 0.5, (0.9, 0.99)), "sgdm": OptimizerRule(600.0, 1e-5)}


# Where a run starts from weights: our choice, for few epochs on little data. InfoNCE, because running estimates need
# several visits to each sample: below eight epochs the rule for gamma_min gives 1, and they keep nothing.
FINE_TUNING = {"lr": 1e-5, "lr_tau": 1e-5, "batch": 256}
# Where only projections are trained: the best rate of fastclip-v1 on two frozen towers with wrong captions, where new
# projections learned most with this loss and learned pair weights (benchmarks/evidence/wrong_captions.py).
HEADS = FINE_TUNING | {"lr": 5e-4, "batch": 128}
# Adapters, whose steps in the weights are smaller than those of the matrices themselves: ten times the rate.
ADAPTERS = FINE_TUNING | {"lr": 1e-4}
# In towers that meet for the first time: the best of 1e-4, 3e-4 and 1e-3 (benchmarks/evidence/fine_tuning.py).
FIRST_ADAPTERS = FINE_TUNING | {"lr": 1e-3}
MAX_WARMUP, MAX_FINE_TUNING_WARMUP = 10_000, 1_000


def interpolated(samples: int) -> Published:
    """Between the published points linearly in log n (rates: in their logarithm too); beyond them the nearest."""
    points = PUBLISHED
    if samples <= points[0].samples:
        return points[0]
    for low, high in itertools.pairwise(points):
        if samples <= high.samples:
            share = math.log(samples / low.samples) / math.log(high.samples / low.samples)
            return Published(
                samples,
                low.lr * (high.lr / low.lr) ** share,
                low.lr_tau * (high.lr_tau / low.lr_tau) ** share,
                low.rho + share * (high.rho - low.rho),
                low.gamma_min + share * (high.gamma_min - low.gamma_min),
                low.decay_share + share * (high.decay_share - low.decay_share),
                low.batch * (high.batch / low.batch) ** share,
            )
    return points[-1]


def loss_name(config: TrainConfig) -> str:
    if config.run.loss != AUTO_LOSS:
        return config.run.loss
    if config.model.from_weights:
        return "fastclip-v1" if _new_heads_only(config) else "infonce"
    return "fastclip-v3"


def _new_heads_only(config: TrainConfig) -> bool:
    """Whether only projections are trained that no checkpoint has: behind towers named one by one."""
    return config.model.composed and heads_only(replace(config.model, model=_model_name(config)))


def fill(config: TrainConfig, *, samples: int, processes: int = 1, fine_tuning: bool | None = None) -> TrainConfig:
    """The configuration with every setting filled in, for a training set of this size.

    `fine_tuning`: the run starts from trained weights. Default: if the configuration names some.
    """
    fine_tuning = config.model.from_weights if fine_tuning is None else fine_tuning
    config = replace(config, run=replace(config.run, loss=loss_name(config)))
    model = replace(config.model, model=_model_name(config))
    batch = config.data.global_batch_size or (config.data.batch_size or 0) * processes or 128
    if batch < max(processes, 2):
        raise UserError(
            f"a global batch of {batch} is too small for {processes} process(es): it needs 2 samples, which are"
            " compared with each other, and one for each process; raise --global-batch-size",
            code="config.batch_too_small",
        )
    run = config.run
    steps = total_steps(config, samples=samples, batch=batch)
    device = run.device or ("cuda" if torch.cuda.is_available() else "cpu")
    run = replace(
        run,
        device=device,
        precision=run.precision or ("amp_bf16" if device.startswith("cuda") else "fp32"),
        name=run.name or default_name(config),
        **_intervals(run, epoch=samples // batch, steps=steps),
    )
    rule = from_scratch = interpolated(samples)
    if fine_tuning:
        rule = rule._replace(**_rates_from_weights(model))
    max_warmup = MAX_FINE_TUNING_WARMUP if fine_tuning else MAX_WARMUP
    resnet = is_resnet(str(model.model))
    optimizer = OPTIMIZER_RULES.get(config.optim.opt, ADAMW_RULE)
    beta1, beta2 = optimizer.betas or (0.9, 0.999 if resnet else 0.98)
    tower_rates = _tower_rates(config, model, batch, from_scratch) if fine_tuning else {}
    optim = replace(
        config.optim,
        **{name: optimizer.lr * rate for name, rate in tower_rates.items()},
        lr=config.optim.lr or optimizer.lr * _at_batch(rule.lr, rule.batch, batch),
        wd=optimizer.wd if config.optim.wd is None else config.optim.wd,
        beta1=beta1 if config.optim.beta1 is None else config.optim.beta1,
        beta2=beta2 if config.optim.beta2 is None else config.optim.beta2,
        eps_opt=config.optim.eps_opt or (1e-8 if resnet else 1e-6),
        warmup=min(max_warmup, steps // 10) if config.optim.warmup is None else config.optim.warmup,
    )
    assert optim.warmup is not None
    if optim.warmup >= steps:
        raise UserError(
            f"--warmup {optim.warmup} is not shorter than the run of {steps} steps; lower it", code="config.warmup"
        )
    return replace(
        config,
        model=model,
        data=replace(
            config.data,
            global_batch_size=batch,
            batch_size=None,
            pair_weights=config.data.pair_weights or ("auto" if _new_heads_only(config) else "off"),
        ),
        run=run,
        optim=optim,
        loss=_fill_loss(config, rule, optim, epochs=-(-steps // (samples // batch))),
    )


def _rates_from_weights(model: ModelConfig) -> dict[str, float]:
    if adapters_only(model):
        return FIRST_ADAPTERS if new_projections(model) else ADAPTERS
    return HEADS if heads_only(model) else FINE_TUNING


def _tower_rates(config: TrainConfig, model: ModelConfig, batch: int, from_scratch: Published) -> dict[str, float]:
    """Where --lr is open: of what learns faster than trained weights are tuned. These are adapters beside a tower
    that is trained itself, towers without weights, and new projections."""
    if config.optim.lr is not None:
        return {}
    rates = {"lr_head": HEADS} if new_projections(model) and not heads_only(model) else {}
    sides = {
        "lr_image": (model.lora_image, model.pretrained_image),
        "lr_text": (model.lora_text, model.pretrained_text),
    }
    for name, (adapters, weights) in sides.items():
        if adapters and not adapters_only(model):
            rates[name] = ADAPTERS
        elif model.pretrained is None and weights is None:
            rates[name] = {"lr": from_scratch.lr, "batch": from_scratch.batch}
    return {
        name: _at_batch(rule["lr"], rule["batch"], batch)
        for name, rule in rates.items()
        if getattr(config.optim, name) is None
    }


def _at_batch(rate: float, of_batch: float, batch: int) -> float:
    """Smaller batches, smaller steps."""
    return rate * min(1.0, math.sqrt(batch / of_batch))


def default_name(config: TrainConfig) -> str:
    """Time, model and loss. The time is the launcher's start, so that a restarted process uses the same name."""
    return f"{start_time():%Y%m%d-%H%M%S}-{_model_name(config).replace('/', '-')}-{loss_name(config)}"


def _model_name(config: TrainConfig) -> str:
    default = "leanclip-tiny" if config.data.train_data is None else "ViT-B-32"
    return config.model.model or model_of(config.model.pretrained) or default


def model_of(weights: str | None) -> str | None:
    """The model of saved weights: its name, or the path of their config if the run changed the architecture
    (--force-image-size, --force-quick-gelu, ...)."""
    if weights is not None and weights.startswith(HUB):
        return weights
    if weights is not None and Path(weights).is_file():
        described = architecture_of_file(Path(weights))
        return None if described is None else named_architecture(described, ())
    directory = None if weights is None else find_weights(Path(weights))
    if weights is None or directory is None or not (directory / CONFIG_FILE).is_file():
        return None
    run = RunDirectory.containing(Path(weights))
    name = None if run is None else run.facts().get("model")
    return named_architecture(directory / CONFIG_FILE, [name] if isinstance(name, str) else [])


def _intervals(run: RunConfig, *, epoch: int, steps: int) -> dict[str, int | None]:
    eval_every, save_every = run.eval_every, run.save_every
    if run.val_frequency is not None:
        eval_every = run.val_frequency * epoch
    if run.save_frequency is not None:
        save_every = run.save_frequency * epoch
    return {
        "eval_every": max(MIN_EVAL_EVERY, steps // 10) if eval_every is None else eval_every,
        "save_every": max(MIN_SAVE_EVERY, steps // 20) if save_every is None else save_every,
        "val_frequency": None,
        "save_frequency": None,
    }


def total_steps(config: TrainConfig, *, samples: int, batch: int) -> int:
    if samples < batch:
        left = "" if config.data.exclude is None else f" that --exclude {config.data.exclude} leaves"
        raise UserError(
            f"the {samples} training samples{left} do not fill one batch of {batch}; give a smaller --batch-size or"
            f" --global-batch-size{', or exclude fewer' if left else ''}",
            code="config.batch_too_large",
        )
    steps = config.run.epochs * (samples // batch)
    return min(steps, config.run.max_steps or steps)


def _fill_loss(config: TrainConfig, rule: Published, optim: OptimConfig, *, epochs: int) -> LossConfig:
    """Hyper-parameters that are not set: the rule's values if it has any for this loss, else the loss's defaults."""
    spec = spec_of(config.run.loss)
    ruled = LossConfig(
        gamma_min=rule.gamma_min,
        gamma_decay_epochs=max(1, round(rule.decay_share * epochs)),
        rho=rule.rho,
        lr_tau=rule.lr_tau,
        tau_betas=None if optim.beta1 is None or optim.beta2 is None else (optim.beta1, optim.beta2),
        tau_adam_eps=optim.eps_opt,
    )
    names = ("rho", "lr_tau") if spec.temperature == "robust" else ()
    if spec.temperature == "individual":  # its Adam has the model optimizer's settings
        names = ("tau_betas", "tau_adam_eps")
    cosine = spec.defaults.gamma_schedule == "cosine" and config.loss.gamma_schedule in (None, "cosine")
    names += ("gamma_min", "gamma_decay_epochs") if cosine else ()
    chosen = LossConfig(**{name: getattr(ruled, name) for name in names})
    filled = config.loss.over(chosen.over(spec.defaults))
    if config.model.pretrained is None and config.model.lora_weights is None:
        return filled
    return replace(filled, tau=config.loss.tau, bias=config.loss.bias)  # default: the checkpoint's

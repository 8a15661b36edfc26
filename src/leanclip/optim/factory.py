"""Optimizers by name, with the parameter groups that CLIP training uses."""

import difflib
from collections.abc import Mapping
from typing import Any

import torch
from timm.optim import create_optimizer_v2, list_optimizers  # pyright: ignore[reportPrivateImportUsage]
from torch import nn
from torch.optim import Optimizer

from leanclip.errors import UserError
from leanclip.optim.config import OptimConfig


def weight_decay_groups(
    model: nn.Module, weight_decay: float, rates: Mapping[str, float] | None = None
) -> list[dict[str, Any]]:
    """Matrices decay; gains, biases and other vectors do not. `rates` are peak learning rates by parameter, of those
    that do not have the optimizer's."""
    rates, groups = rates or {}, {}
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    for kind, decay in (("matrices", weight_decay), ("vectors", 0.0)):
        for name, parameter in trained:
            if (parameter.ndim >= 2) != (kind == "matrices"):
                continue
            rate = rates.get(name)
            new = {"name": kind, "params": [], "weight_decay": decay} | ({} if rate is None else {"lr": rate})
            groups.setdefault((kind, rate), new)["params"].append(parameter)
    return list(groups.values())


def create_optimizer(config: OptimConfig, groups: list[dict[str, Any]]) -> Optimizer:
    """The optimizer of a resolved configuration. Each group stores its peak learning rate for the schedule."""
    assert config.lr is not None and config.wd is not None
    assert config.beta1 is not None and config.beta2 is not None and config.eps_opt is not None
    groups = [group | dict.fromkeys(("lr", "peak_lr"), group.get("lr", config.lr)) for group in groups]
    if config.opt == "adamw":
        return torch.optim.AdamW(
            groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps_opt, fused=True
        )
    name = "momentum" if config.opt == "sgdm" else config.opt  # timm's plain "sgd" has Nesterov momentum on
    known = list_optimizers()
    if name not in known:
        choices = list(dict.fromkeys(["adamw", "lamb", "lion", "sgdm", *map(str, known)]))
        near = difflib.get_close_matches(config.opt, choices, n=3) or choices[:4]
        raise UserError(f"unknown --opt {config.opt!r}; nearest: {', '.join(near)}", code="optim.unknown")
    extra: dict[str, Any] = {"momentum": config.momentum}
    if "sgd" not in name and name != "momentum":
        extra = {"betas": (config.beta1, config.beta2), "eps": config.eps_opt}
    if name.startswith("lamb"):
        extra["max_grad_norm"] = None  # timm's LAMB clips to 1 by default; here only --grad-clip-norm clips
    try:
        return create_optimizer_v2(groups, opt=name, lr=config.lr, weight_decay=config.wd, **extra)  # pyright: ignore[reportArgumentType]
    except (TypeError, IndexError, ValueError, ImportError, AssertionError) as error:
        message = (
            f"--opt {config.opt} does not accept learning rate, weight decay and betas ({error}); choose another"
        )
        raise UserError(message, code="optim.unsupported") from error

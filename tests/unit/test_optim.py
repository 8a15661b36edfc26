import math
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from leanclip.models import ModelConfig
from leanclip.optim import OptimConfig, create_optimizer, scheduled, set_learning_rate, weight_decay_groups
from leanclip.runs import TrainConfig
from leanclip.runs.defaults import fill
from leanclip.training.resolve import _as_begun
from refusal import refuses

RESOLVED = OptimConfig(lr=0.1, wd=0.2, beta1=0.9, beta2=0.98, eps_opt=1e-6)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))


def test_only_matrices_decay():
    groups = weight_decay_groups(model(), 0.2)
    found = [(group["weight_decay"], [p.ndim for p in group["params"]]) for group in groups]
    assert found == [(0.2, [2]), (0.0, [1, 1, 1])]


@pytest.mark.parametrize("name", ["adamw", "lamb", "lion", "sgdm", "adafactor", "nadamw"])
def test_optimizers_by_name_take_a_step_that_helps(name):
    network = model()
    config = replace(RESOLVED, opt=name, lr=0.01)
    optimizer = create_optimizer(config, weight_decay_groups(network, 0.0))
    x, y = torch.randn(32, 4), torch.randn(32, 3)
    values = []
    for _ in range(30):
        value = (network(x) - y).square().mean()
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        values.append(value.item())
    assert values[-1] < values[0]
    if name == "sgdm":
        group = optimizer.param_groups[0]
        assert group["momentum"] == 0.9 and not group["nesterov"]


@pytest.mark.parametrize(
    ("name", "bad", "good"),
    [
        ("lr", [0.0, -1.0], [1e-9, 10.0]),
        ("lr_floor", [-1.0], [0.0, 1.0]),
        ("lr_cooldown_power", [0.0, -1.0], [0.5, 2.0]),
        ("wd", [-1.0], [0.0, 10.0, None]),
        ("beta1", [-0.1, 1.0, 1.5], [0.0, 0.999, None]),
        ("beta2", [-0.1, 1.0, 1.5], [0.0, 0.999, None]),
        ("eps_opt", [0.0, -1.0], [1e-14, 1.0, None]),
        ("momentum", [-0.1, 1.0, 1.5], [0.0, 0.99]),
        ("grad_clip_norm", [0.0, -1.0], [1e-3, 10.0, None]),
    ],
)
def test_settings_outside_their_range_are_refused(name, bad, good):
    for value in [*bad, math.nan, math.inf, -math.inf]:
        with pytest.raises(ValueError, match=f"{name} is {value}; it must"):
            OptimConfig(**{name: value})
    for value in good:
        assert getattr(OptimConfig(**{name: value}), name) == value


def test_an_unknown_optimizer_names_the_nearest():
    for name, nearest in (("lamp", "lamb, "), ("adamww", "nearest: adamw, radamw, ")):
        with refuses("optim.unknown", repr(name), nearest):
            create_optimizer(replace(RESOLVED, opt=name), weight_decay_groups(model(), 0.1))


def test_the_schedule():
    config = OptimConfig(lr=1.0, lr_floor=0.1, warmup=10)
    rates = [scheduled(config, step, steps=100, steps_per_epoch=10) for step in range(101)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == rates[10] == 1.0
    assert rates[55] == pytest.approx(0.55) and rates[100] == pytest.approx(0.1)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_groups_follow_the_schedule_or_do_not():
    network = model()
    own = nn.Parameter(torch.zeros(()))
    constant = nn.Parameter(torch.zeros(()))
    groups = [
        *weight_decay_groups(network, 0.1),
        {"name": "follows", "params": [own], "lr": 0.5, "weight_decay": 0.0, "follows_schedule": True},
        {"name": "stays", "params": [constant], "lr": 0.3, "weight_decay": 0.0, "follows_schedule": False},
    ]
    optimizer = create_optimizer(RESOLVED, groups)
    set_learning_rate(optimizer, 0.05, peak=0.1)
    assert {group["name"]: group["lr"] for group in optimizer.param_groups} == pytest.approx(
        {"matrices": 0.05, "vectors": 0.05, "follows": 0.25, "stays": 0.3}
    )


def test_lion_and_sgdm_have_values_of_their_own():
    def filled(**given):
        config = TrainConfig(optim=OptimConfig(**given), model=ModelConfig(model="ViT-B-32"))
        return fill(config, samples=2_723_840).optim

    adamw, lion, sgdm = filled(), filled(opt="lion"), filled(opt="sgdm")
    assert (adamw.wd, adamw.beta1, adamw.beta2) == (0.1, 0.9, 0.98)
    assert (lion.wd, lion.beta1, lion.beta2, sgdm.wd) == (0.5, 0.9, 0.99, 1e-5)
    assert adamw.lr and (lion.lr, sgdm.lr) == (pytest.approx(0.2 * adamw.lr), pytest.approx(600 * adamw.lr))
    given = {"lr": 3e-4, "wd": 0.0, "beta1": 0.8, "beta2": 0.95}
    for name in ("lion", "sgdm"):
        assert given.items() <= asdict(filled(opt=name, **given)).items()


def test_a_resumed_run_keeps_the_values_of_its_optimizer():
    """A run of Lion made when it had AdamW's values."""
    saved = SimpleNamespace(
        content={"settings": {"lr": 3e-4, "wd": 0.1, "beta1": 0.9, "beta2": 0.98, "loss": "infonce"}}
    )
    begun = _as_begun(TrainConfig(optim=OptimConfig(opt="lion", wd=0.3)), saved)  # pyright: ignore[reportArgumentType]
    assert (begun.optim.lr, begun.optim.wd, begun.optim.beta2) == (3e-4, 0.3, 0.98)

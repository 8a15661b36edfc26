import json

import pytest
import torch

from leanclip.data import Batch
from leanclip.errors import UserError
from leanclip.losses import LossOutput
from leanclip.optim.loss_scale import LossScale
from leanclip.runs.metrics import finite
from leanclip.training.nonfinite import NonFiniteSteps
from leanclip.training.step import training_step
from leanclip.training.step_context import StepContext
from refusal import exit_code


def verdicts(policy, steps):
    return [policy(skipped=step != ".", excused=step == "e") for step in steps]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ("xx.xx.", ["continue"] * 6),  # never three in a row
        ("xxx.xxx", ["continue", "continue", "reload", "continue", "continue", "continue", "stop"]),
        ("xxxxxx", ["continue", "continue", "reload", "continue", "continue", "stop"]),
        ("eeeeee", ["continue"] * 6),  # the loss scale is being adjusted
        ("xexex", ["continue", "continue", "continue", "continue", "reload"]),
    ],
)
def test_reload_once_then_stop(steps, expected):
    assert verdicts(NonFiniteSteps(3), steps) == expected


def test_the_loss_scale_says_whether_it_could_be_lowered():
    scale = LossScale(4.0, grows=True)
    seen = []
    for good in (False, False, False, True):
        scale.update(good)
        seen.append((scale.value, scale.lowered))
    assert seen == [(2.0, True), (1.0, True), (1.0, False), (1.0, False)]


class Broken(torch.nn.Module):
    """A loss whose value is not finite while its gradient is."""

    def __init__(self):
        super().__init__()
        self.rolled_back = 0

    def forward(self, image, text, ids, **_):
        value = (image * text).sum()
        return LossOutput(loss=value - value.detach() + torch.inf, metrics={})

    def start_gather(self, image, **_):
        pass

    def rollback(self):
        self.rolled_back += 1


def test_a_loss_that_is_not_finite_skips_the_step_though_its_gradient_is():
    class Towers(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.image = torch.nn.Linear(3, 2)

        def forward(self, images, tokens, between=None):
            return self.image(images), tokens

    towers, loss = Towers(), Broken()
    before = towers.image.weight.detach().clone()
    optimizer = torch.optim.SGD(towers.parameters(), 0.1)
    context = StepContext(towers=towers, loss=loss, optimizer=optimizer, global_batch=4)  # pyright: ignore[reportArgumentType]
    batch = Batch(images=torch.randn(4, 3), tokens=torch.randn(4, 2), sample_ids=torch.arange(4))
    result = training_step(context, batch)
    assert result.skipped and loss.rolled_back == 1 and torch.equal(towers.image.weight, before)
    assert result.loss.isinf() and result.grad_norm.isfinite()
    assert set(result.gradient_norms) == {"image.weight", "image.bias"} and min(result.gradient_norms.values()) > 0


def test_a_diagnosis_is_json_whatever_the_numbers():
    facts = {"loss": float("nan"), "norms": {"a": float("inf")}, "ids": [[1, 2], [-float("inf")]]}
    text = json.dumps(finite(facts, as_text=True), allow_nan=False)
    assert json.loads(text) == {"loss": "nan", "norms": {"a": "inf"}, "ids": [[1, 2], ["-inf"]]}


def test_the_exit_code_is_the_errors_own(monkeypatch, capsys):
    class OwnError(UserError):
        exit_code = 4

    def fail(_):
        raise OwnError("a message")

    monkeypatch.setattr("leanclip.cli._run", fail)
    assert exit_code("train") == 4 and capsys.readouterr().err == "leanclip: a message\n"


@pytest.mark.parametrize("flags", [["--max-bad-steps", "0"], ["--ema", "1"], ["--ema", "0"], ["--ema", "-0.5"]])
def test_invalid_settings_are_refused(flags, capsys):
    code = exit_code("train", *flags)
    stderr = capsys.readouterr().err
    assert code == 2 and stderr.count("\n") == 1 and f"{flags[0]} is" in stderr

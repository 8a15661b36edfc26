import pytest
import torch

from leanclip import ops
from leanclip.losses.gradient_check import check_implementations
from leanclip.ops import tiled
from refusal import assert_refused, exit_code


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        (["--batch-size", "65", "--dim", "24"], ("fastclip-v2", "tiled")),
        (
            ["--processes", "2", "--batch-size", "9", "--loss", "fastclip-v2"],
            ("loss of step 2", "gradient of token_embedding.weight", "state.tau_text"),
        ),
    ],
    ids=["implementations", "processes"],
)
def test_all_checks_pass(flags, shown, capsys):
    code = exit_code("selftest", "--device", "cpu", *flags)
    output = capsys.readouterr().out
    assert code == 0, output
    assert all(word in output for word in shown) and "WRONG" not in output


def test_a_wrong_implementation_is_detected(monkeypatch):
    correct = tiled.gradients

    def wrong(*arguments, **named):
        gradients = correct(*arguments, **named)
        assert gradients.rows is not None
        return ops.Gradients(gradients.rows * 1.001, gradients.cols)

    monkeypatch.setattr(tiled, "gradients", wrong)
    checks = list(check_implementations(["infonce"], device=torch.device("cpu"), batch=33, dim=16))
    failed = {check.quantity for check in checks if not check.passed and check.dtype == "float32"}
    assert failed == {"image gradient"}


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (["--recipe", "demo"], "selftest.no_processes"),
        (["--processes", "0"], "selftest.no_processes"),
        (["--loss", "clip"], "loss.unknown"),
        (["--dim", "0"], "config.bad_value"),
        (["--batch-size", "0"], "config.bad_value"),
        (["--batch-size", "-3"], "config.bad_value"),
    ],
)
def test_bad_arguments_are_refused(flags, code, capsys):
    assert_refused(code, ["selftest", *flags], capsys)

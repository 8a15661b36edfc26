import pytest
import torch

from leanclip import ops
from leanclip.cli import main
from leanclip.losses.gradient_check import selftest
from leanclip.ops import tiled


def test_every_implementation_passes(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["selftest", "--batch-size", "65", "--dim", "24", "--device", "cpu"])
    shown = capsys.readouterr().out
    assert stop.value.code == 0, shown
    assert "fastclip-v2" in shown and "tiled" in shown and "WRONG" not in shown


def test_a_wrong_implementation_is_caught(monkeypatch):
    right = tiled.gradients

    def wrong(*arguments, **named):
        found = right(*arguments, **named)
        assert found.rows is not None
        return ops.Gradients(found.rows * 1.001, found.cols)

    monkeypatch.setattr(tiled, "gradients", wrong)
    checks = list(selftest(["infonce"], device=torch.device("cpu"), batch=33, dim=16))
    failed = {check.quantity for check in checks if not check.passed and check.dtype == "float32"}
    assert failed == {"image gradient"}


def test_processes_agree_with_one(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["selftest", "--processes", "2", "--device", "cpu", "--batch-size", "9", "--loss", "fastclip-v2"])
    shown = capsys.readouterr().out
    assert stop.value.code == 0, shown
    assert "loss of step 2" in shown and "gradient of token_embedding.weight" in shown and "state.tau_text" in shown
    assert "WRONG" not in shown


def test_a_config_needs_processes(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["selftest", "--recipe", "demo"])
    assert stop.value.code == 2
    assert "go with --processes" in capsys.readouterr().err

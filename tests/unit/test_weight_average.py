import contextlib
import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from leanclip.checkpointing.storage import StoredTensors
from leanclip.optim.weight_average import WeightEMA
from refusal import exit_code
from run_records import records


class Wrapped(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.clip = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
        self.clip[2].requires_grad_(False)


def test_the_average_follows_its_rule():
    torch.manual_seed(0)
    model: Any = Wrapped()
    weight = model.clip[0].weight
    average = weight.detach().double().clone()
    ema = WeightEMA(model, 0.5)
    for n in range(1, 30):
        with torch.no_grad():
            weight.add_(torch.randn_like(weight))
        ema.update()
        decay = min(0.5, (1 + n) / (10 + n))
        average = decay * average + (1 - decay) * weight.double()
    assert torch.allclose(ema.averages["0.weight"].double(), average, atol=1e-5)
    assert set(ema.averages) == {"0.weight", "0.bias", "1.weight", "1.bias"}  # without the locked ones


def test_swapping_in_and_out_is_exact_even_after_an_error():
    model: Any = Wrapped()
    ema = WeightEMA(model, 0.9)
    with torch.no_grad():
        model.clip[0].weight.add_(1.0)
    ema.update()
    own, averaged = model.clip[0].weight.detach().clone(), ema.averages["0.weight"].clone()
    model.clip(torch.randn(8, 3))  # moves the running averages
    running = model.clip[1].running_mean.clone()
    with contextlib.suppress(KeyError), ema.applied():
        assert torch.equal(model.clip[0].weight, averaged) and not torch.equal(averaged, own)
        assert torch.equal(model.clip[1].running_mean, running)  # the model's own
        raise KeyError
    assert torch.equal(model.clip[0].weight, own) and torch.equal(ema.averages["0.weight"], averaged)


def command(*arguments):
    assert exit_code(*arguments) == 0


def train(logs, name, *arguments):
    few = ["--recipe", "demo", "--batch-size", 16, "--log-every", 1, "--workers", 0, "--loss", "fastclip-v3"]
    command("train", *few, "--warmup", 0, "--logs", logs, "--name", name, "--device", "cpu", *arguments)
    return logs / name


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Eight steps with an average, saved at the fifth too."""
    logs = tmp_path_factory.mktemp("ema")
    return train(logs, "run", "--max-steps", 8, "--save-every", 5, "--eval-every", 4, "--ema", 0.9)


def files(checkpoint):
    state = StoredTensors.open(checkpoint / "state").read()
    named = {f"ema {name.removeprefix('ema.')}": value for name, value in state.items() if name.startswith("ema.")}
    values = json.loads((checkpoint / "state.json").read_text())["values"]
    named["ema updates"] = torch.tensor(values["ema"]["updates"])
    for file in ("open_clip_model", "trained"):
        named |= {f"{file} {name}": value for name, value in load_file(checkpoint / f"{file}.safetensors").items()}
    return named


def test_resume_is_bit_exact(run, tmp_path):
    again = train(tmp_path, "again", "--max-steps", 8, "--eval-every", 0, "--ema", 0.9,
                  "--resume", run / "checkpoints/step_00000005")  # fmt: skip
    right, found = (files(path / "checkpoints/step_00000008") for path in (run, again))
    assert int(found["ema updates"]) == 8
    torch.testing.assert_close(found, right, rtol=0, atol=0)


def test_training_is_the_same_with_and_without_it(run, tmp_path):
    plain = train(tmp_path, "plain", "--max-steps", 8, "--eval-every", 0)
    without = load_file(plain / "checkpoints/last/open_clip_model.safetensors")
    assert not (plain / "checkpoints/last/trained.safetensors").exists()
    torch.testing.assert_close(load_file(run / "checkpoints/last/trained.safetensors"), without, rtol=0, atol=0)


def test_the_evaluated_weights_are_the_saved_ones(run, tmp_path):
    """The averaged weights, in the evaluation of the run, in its checkpoints and in `leanclip evaluate`."""
    evaluated = records(run, "eval", set="val")
    assert [line["weights"] for line in evaluated] == ["ema"] * 3
    command("evaluate", run, "--json", tmp_path / "figures.json", "--device", "cpu")
    figures = json.loads((tmp_path / "figures.json").read_text())["sets"]
    assert figures["val"]["metrics"] == pytest.approx(evaluated[-1]["metrics"], abs=1e-6)
    assert "averaged, decay 0.9" in (run / "README.md").read_text()
    command("report", run)
    assert "averaged, decay 0.9" in (run / "report.html").read_text()
    kept = files(run / "checkpoints/last")
    averaged = [name.removeprefix("ema ") for name in kept if name.startswith("ema ") and name != "ema updates"]
    for name in averaged:
        assert torch.equal(kept[f"open_clip_model {name}"], kept[f"ema {name}"]), name
    assert any(not torch.equal(kept[f"trained {name}"], kept[f"ema {name}"]) for name in averaged)


def test_a_run_without_an_average_can_continue_with_one(run, tmp_path):
    start = train(tmp_path, "start", "--max-steps", 4, "--eval-every", 0)
    train(tmp_path, "start", "--max-steps", 6, "--eval-every", 0, "--ema", 0.9, "--resume", "latest")
    assert int(files(start / "checkpoints/last")["ema updates"]) == 2

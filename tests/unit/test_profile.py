"""leanclip train --profile: where the time of a step goes."""

from types import SimpleNamespace

import pytest
import torch

from leanclip.cli.train import parse_command, run
from leanclip.planning.profile import PHASES, Collectives, Profile, profile, verdict
from leanclip.training import set_up

FLAGS = ["--global-batch-size", "48", "--workers", "0", "--device", "cpu"]


def profile_of(alone=9.0, **seconds):
    return Profile(
        seconds={phase: seconds.get(phase.replace(" ", "_"), 0.0) for phase in PHASES},
        launching=seconds.get("launching", 0.0),
        samples_per_second=1000.0,
        flops=3e12,
        matrix_rate=1e13,
        steps=5,
        collectives={"state": Collectives(calls=1, bytes=1, alone=alone, waited=seconds.get("communication", 0.0))},
    )


def job(device="cuda", parts=1, precision="amp_bf16", checkpointing=False, workers=4):
    config = SimpleNamespace(
        data=SimpleNamespace(workers=workers),
        run=SimpleNamespace(precision=precision),
        parallel=SimpleNamespace(grad_checkpointing=checkpointing),
    )
    return SimpleNamespace(config=config, device=torch.device(device), context=SimpleNamespace(micro_batches=parts))


@pytest.mark.parametrize("flags", [[], ["--micro-batch", "16"]])
def test_phases_add_up(tmp_path, flags):
    made = set_up(parse_command([*FLAGS, *flags, "--logs", str(tmp_path)]).settings)
    result = profile(made, steps=2)
    assert result.steps == 2 and result.samples_per_second > 0
    assert result.samples_per_second == pytest.approx(48 / result.step)
    for phase in ("data", "image tower", "text tower", "loss", "backward", "optimizer"):
        assert result.seconds[phase] > 0
    assert result.seconds["communication"] < 1e-3
    assert 0 < result.mfu < 1


def test_more_steps_than_an_epoch_has(tmp_path):
    """The loss would warn of a missing set_epoch."""
    few = ["--train-data", "synthetic:64", "--model", "leanclip-tiny", "--logs", str(tmp_path)]
    assert profile(set_up(parse_command([*FLAGS, *few]).settings), steps=6).steps == 6


def test_the_command_prints_and_writes_no_files(tmp_path, capsys):
    run([*FLAGS, "--logs", str(tmp_path), "--profile"])
    shown = capsys.readouterr().out
    for word in (
        "imports",
        "index of",
        "first evaluation",
        "first step",
        "image tower",
        "optimizer",
        "total",
        "samples/s; MFU",
        "bound by",
    ):
        assert word in shown
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("result", "kind", "expected"),
    [
        (profile_of(data=3.0, backward=5.0), job(), "Raise --workers (now 4"),
        (profile_of(communication=3.0, backward=5.0), job(), "bound by the network: 38%"),
        (
            profile_of(communication=3.0, backward=5.0, alone=1.0),
            job(),
            "bound by the slowest process: this one waits for others 25%",
        ),
        (profile_of(loss=3.0, backward=5.0), job(), "bound by the loss"),
        (profile_of(backward=5.0, launching=4.9), job(), "bound by the host"),
        (profile_of(backward=5.0, launching=4.9), job(device="cpu"), "towers' arithmetic: 100% of the time, at 30%"),
        (profile_of(backward=5.0), job(device="cpu"), "Use a smaller model or image, or a GPU."),
        (profile_of(data=3.0, backward=5.0), job(device="cpu", workers=0), "Raise --workers (now 0"),
        (profile_of(data=3.0, backward=5.0), job(device="cpu", workers=999), "of the time. Pack the images at"),
        (profile_of(loss=3.0, backward=5.0), job(device="cpu"), "A smaller --global-batch-size helps"),
        (profile_of(communication=3.0, backward=5.0), job(device="cpu"), "A larger --global-batch-size"),
        (profile_of(backward=5.0), job(parts=4), "4 micro-batches embed everything twice"),
        (profile_of(backward=5.0), job(checkpointing=True), "omit it if the memory suffices"),
        (profile_of(backward=5.0), job(precision="fp32"), "--precision amp_bf16"),
    ],
)
def test_what_bounds_a_run(result, kind, expected):
    assert expected in verdict(result, kind)

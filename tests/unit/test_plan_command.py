"""leanclip plan: its output, messages and refusals."""

import json

import pytest
from checkpoint_runs import TINY

from leanclip.cli.plan import PlanCommand, assumed_network, does_not_fit, parse_count, resolved
from leanclip.data import DataConfig
from leanclip.models import ModelConfig
from leanclip.planning.gpu_model import gpu_named
from leanclip.planning.network import NETWORKS
from leanclip.planning.planner import Planner, proposed_batch
from leanclip.runs.config import ParallelConfig, TrainConfig
from refusal import exit_code, refusal_code


@pytest.mark.parametrize(
    ("text", "number"), [("400M", 400_000_000), ("2.7m", 2_700_000), ("3K", 3000), ("1,830", 1830), ("12", 12)]
)
def test_numbers_of_samples(text, number):
    assert parse_count(text) == number


def plan(capsys, *flags):
    code = exit_code("plan", *flags)
    shown = capsys.readouterr()
    return code or 0, shown.out, shown.err


def test_the_printed_command(capsys, small_model):
    flags = ("--model", small_model, "--gpus", "16", "--gpu", "A10", "--samples", "40K")
    flags += ("--compile", "off", "--compare", "--network", "25gbe", "--lr", "3e-4", "--ema", "0.99")
    code, out, _ = plan(capsys, *flags, "--global-batch-size", "16384")
    assert code == 0
    for word in ("weights", "state tables", "receives", "usable (92%", "samples/s", " GPU ", "not hidden"):
        assert word in out
    assert "nominal figures" in out and "DisCo-CLIP" in out and "largest batch:" in out
    command = next(line for line in out.splitlines() if line.startswith("run:"))
    assert "torchrun --nnodes 2 --rdzv-backend c10d" in command
    assert f"--nproc-per-node 8 -m leanclip train --model {small_model} --compile off --lr 3e-4 --ema 0.99" in command
    assert "--global-batch-size 16384" in command and "--micro-batch 1024" in command  # as it was planned
    assert not any(flag in command for flag in ("--gpus", "--gpu ", "--samples", "--network", "--compare", "25gbe"))


@pytest.mark.parametrize("locked", [(), ("--lock-image",), ("--lock-text",), ("--lock-image", "--lock-text")])
def test_a_plan_with_locked_towers_says_the_size_of_their_features(capsys, small_model, locked):
    """And plans a step that reads them."""
    flags = ("--model", small_model, "--gpu", "A10", "--samples", "40K", "--compile", "off", "--loss", "infonce")
    flags += ("--global-batch-size", "2048")
    _, whole, _ = plan(capsys, *flags)
    code, out, _ = plan(capsys, *flags, *locked, "--cache-locked", "3")
    images, texts = f"{2 * 40_000 * 3 * 128 / 2**20:,.1f} MiB for 3 views", f"{2 * 64 / 2**10:,.1f} KiB for each"
    assert code == 0
    assert (images in out, texts in out) == ("--lock-image" in locked, "--lock-text" in locked)
    share = activations(out) / activations(whole)
    assert share < 0.1 if len(locked) == 2 else share < 0.9 if locked else share == 1


def activations(shown):
    return float(next(line for line in shown.splitlines() if "activations" in line).split("│")[2])


def test_the_command_starts_as_many_processes_as_planned(capsys, small_model):
    flags = ("--model", small_model, "--gpus", "12", "--gpu", "A10", "--samples", "40K", "--compile", "off")
    _, out, _ = plan(capsys, *flags, "--global-batch-size", "1200", "--grad-checkpointing", "1")
    assert "--nnodes 2 " in out and "--nproc-per-node 6 " in out
    assert out.count("--grad-checkpointing 1") == 1


def test_an_assumed_gpu_and_a_proposed_batch_are_named(capsys, small_model, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("leanclip.cli.plan.Planner.largest_batch", lambda *_: 4096)
    config = tmp_path / "config.toml"
    config.write_text(f'model = "{small_model}"\ncompile = "off"\n')
    flags = ("--config", str(config), "--gpu-memory", "24", "--samples", "9.2M")
    _, out, _ = plan(capsys, *flags)
    assert "on 1 x A10 (assumed), 24 GB" in out and "A10 is assumed; name yours with --gpu: H200, " in out
    assert "batch:         2,048 is proposed" in out and "--global-batch-size 2048" in out
    _, out, _ = plan(capsys, *flags, "--gpu", "L4", "--global-batch-size", "64")
    assert "L4, 24 GB" in out and "assumed;" not in out and "are assumed" not in out and "is proposed" not in out
    flags = ("--config", str(config), "--gpu", "L4", "--global-batch-size", "64")
    assert "1,000,000 are assumed" in plan(capsys, *flags)[1]


def test_a_plan_that_starts_from_weights_has_the_loss_that_training_fills_in(capsys, small_model, monkeypatch):
    monkeypatch.setattr("leanclip.cli.plan.Planner.largest_batch", lambda *_: 4096)
    flags = ("--model", small_model, "--compile", "off", "--gpu", "L4", "--samples", "40K")
    _, out, _ = plan(capsys, *flags, "--global-batch-size", "64", "--pretrained", "logs/base")
    assert "infonce" in out.splitlines()[0] and "--loss infonce" in out


def test_a_plan_that_starts_from_weights_has_their_architecture(tmp_path):
    (tmp_path / "open_clip_config.json").write_text(json.dumps(TINY))
    (tmp_path / "open_clip_model.safetensors").touch()
    settings = TrainConfig(model=ModelConfig(pretrained=str(tmp_path)), data=DataConfig(global_batch_size=64))
    config = resolved(PlanCommand(settings=settings), 1000)
    assert config.model.model == str(tmp_path / "open_clip_config.json") and config.run.loss == "infonce"


@pytest.mark.parametrize(
    ("samples", "gpus", "batch"),
    [
        (2_723_840, 8, 1024), (9_187_328, 4, 2048), (315_658_316, 8, 5120),  # as published
        (2_723_840, 64, 64 * 64),  # enough for each GPU
        (40_000, 1, 384), (2000, 1, 128), (100, 1, 64),  # enough steps in an epoch
    ],
)  # fmt: skip
def test_the_proposed_batch(samples, gpus, batch):
    assert proposed_batch(samples, gpus) == batch


@pytest.mark.parametrize("named", ["config", "flag", None])
def test_the_command_has_a_placeholder_for_missing_data(named, capsys, small_model, tmp_path, monkeypatch):
    monkeypatch.setattr("leanclip.cli.plan.Planner.largest_batch", lambda *_: 64)
    config = tmp_path / "config.toml"
    config.write_text(f'model = "{small_model}"\n' + 'train_data = "synthetic:256"\n' * (named == "config"))
    flags = ["--config", str(config), "--gpu", "A10", "--global-batch-size", "64", "--compile", "off"]
    _, out, _ = plan(capsys, *flags, *(["--train-data", "synthetic:256"] if named == "flag" else []))
    assert "leanclip train" in out and ("--train-data ..." in out) == (named is None)
    assert ("--train-data synthetic:256" in out) == (named == "flag")
    assert " 0.0 hours" not in out


def test_the_plan_is_printed_before_the_largest_batch_is_searched(capsys, small_model, monkeypatch):
    shown = []
    monkeypatch.setattr(
        "leanclip.cli.plan.Planner.largest_batch", lambda *_: shown.append(capsys.readouterr().out) or 7
    )
    _, out, _ = plan(capsys, "--model", small_model, "--gpu", "A10", "--global-batch-size", "64", "--compile", "off")
    assert "samples/s" in shown[0] and "run: " in shown[0]
    assert "samples/s" not in out and "largest batch: about 7" in out


@pytest.mark.parametrize("terminal", [False, True])
def test_a_terminal_shows_what_is_traced(terminal, capsys, small_model, monkeypatch):
    def traced(*_, **__):
        raise NotImplementedError("enough seen")

    monkeypatch.setattr("leanclip.planning.planner.predict_step", traced)
    monkeypatch.setenv("COLUMNS", "500")
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")  # which is a terminal to rich
    flags = ("--model", small_model, "--gpu", "A10", "--global-batch-size", "600", "--micro-batch", "300")
    _, out, err = plan(capsys, *flags, "--grad-checkpointing", "1")
    assert out == "" and "enough seen" in err
    assert (f"tracing a step of {small_model}, micro-batch 300 of 600, 1 blocks recomputed" in err) == terminal


def test_a_batch_that_does_not_fit_is_refused_in_one_line(capsys, small_model):
    code, out, err = plan(
        capsys, "--model", small_model, "--gpu-memory", "0.1", "--global-batch-size", "64", "--compile", "off"
    )
    assert code == 2 and out == "" and err.count("\n") == 1
    assert refusal_code(err) == "plan.does_not_fit" and "0.1 GiB" in err


def test_data_of_a_few_samples(capsys, small_model):
    flags = ("--model", small_model, "--gpu", "A10", "--compile", "off", "--samples", "300")
    code, out, _ = plan(capsys, *flags)
    assert code == 0 and "largest batch: 300 in micro-batches (limited by --samples)" in out


def test_a_batch_that_batch_norm_refuses_ends_in_one_line(capsys):
    flags = ("--model", "leanclip-tiny", "--gpu", "A10", "--compile", "off", "--global-batch-size", "2")
    code, out, err = plan(capsys, *flags, "--gpus", "2")
    assert code == 2 and out == "" and refusal_code(err) == "plan.not_traceable" and err.count("\n") == 1


@pytest.mark.parametrize(("gpus", "fsdp", "advised"), [(1, False, False), (2, False, True), (2, True, False)])
def test_fsdp_is_advised_on_several_gpus(gpus, fsdp, advised):
    config = TrainConfig(parallel=ParallelConfig(fsdp=fsdp), data=DataConfig(global_batch_size=64))
    planner = Planner(samples=1000, ranks=gpus, gpu=gpu_named("A10"), room=1 << 30)
    assert ("--fsdp" in str(does_not_fit(config, planner, largest=0))) == advised


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        (["--samples", "many"], "plan.bad_samples"),
        (["--samples", "1" + "0" * 400], "plan.bad_samples"),
        (["--samples", "1e400"], "plan.bad_samples"),
        (["--samples", "9e18"], "plan.bad_samples"),
        (["--samples=-3M"], "plan.bad_samples"),
        (["--samples", "nanM"], "plan.bad_samples"),
        (["--global-batch-size", str(10**11), "--samples", str(10**12)], "plan.batch_too_large"),
        (["--gpus", "0"], "config.bad_value"),
        (["--gpus", str(10**12)], "config.bad_value"),
        (["--gpu-memory", "1e300"], "config.bad_value"),
        (["--gpu-memory=-24"], "config.bad_value"),
        (["--network", "string"], "config.bad_value"),
        (["--gpu", "Voodoo2"], "plan.unknown_gpu"),
        (["--loss", "hinge"], "loss.unknown"),
        (["--model", "ViT-B-33"], "model.unknown"),
    ],
)
def test_a_bad_flag_is_refused_in_one_line(flags, refused, capsys):
    code, out, err = plan(capsys, *flags)
    assert code == 2 and out == "" and refusal_code(err) == refused and err.count("\n") == 1


def test_gpus_without_nvlink_get_another_network():
    assert assumed_network("H200", 8) is NETWORKS["nvlink"] and assumed_network("H200", 16) is NETWORKS["infiniband"]
    assert assumed_network("RTX4090", 8) is NETWORKS["pcie"] is assumed_network("A40 (assumed)", 2)
    hosts = assumed_network("L4", 16)
    assert (hosts.inside, hosts.between) == (NETWORKS["pcie"].inside, NETWORKS["infiniband"].between)
    assert assumed_network("a product of tomorrow", 4) is NETWORKS["nvlink"]

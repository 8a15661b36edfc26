"""leanclip plan: what it says, to whom and when."""

import pytest

from leanclip.cli import main
from leanclip.cli.plan import count, does_not_fit, duration
from leanclip.data import DataConfig
from leanclip.planning import card_named
from leanclip.runs.config import ParallelConfig, TrainConfig


@pytest.mark.parametrize(
    ("text", "number"), [("400M", 400_000_000), ("2.7m", 2_700_000), ("3K", 3000), ("1,830", 1830), ("12", 12)]
)
def test_numbers_of_samples(text, number):
    assert count(text) == number


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(360_000, "100.0 hours"), (3600, "1.0 hours"), (90, "1.5 minutes"), (2.5, "2.5 seconds"), (0.04, "0.0 seconds")],
)
def test_short_runs_are_not_rounded_to_nothing(seconds, said):
    assert duration(seconds) == said
    assert duration(seconds, of="GPU ") == said.replace(" ", " GPU ")


def plan(capsys, *flags):
    with pytest.raises(SystemExit) as stop:
        main(["plan", *flags])
    shown = capsys.readouterr()
    return stop.value.code or 0, shown.out, shown.err


def test_the_command_says_what_to_run(capsys, small_model):
    flags = ("--model", small_model, "--gpus", "16", "--gpu", "A10", "--samples", "40K")
    flags += ("--compile", "off", "--compare", "--network", "25gbe", "--lr", "3e-4", "--ema", "0.99")
    code, out, _ = plan(capsys, *flags, "--global-batch-size", "16384")
    assert code == 0
    for word in ("weights", "state tables", "communication", "usable (92%", "samples/s", " GPU ", "not hidden"):
        assert word in out
    assert "nominal figures" in out and "DisCo-CLIP" in out and "largest batch:" in out
    command = next(line for line in out.splitlines() if line.startswith("run:"))
    assert "torchrun --nnodes 2 --rdzv-backend c10d" in command
    assert f"--nproc-per-node 8 -m leanclip train --model {small_model} --compile off --lr 3e-4 --ema 0.99" in command
    assert "--global-batch-size 16384" in command and "--micro-batch 1024" in command  # as it was planned
    assert not any(flag in command for flag in ("--gpus", "--gpu ", "--samples", "--network", "--compare", "25gbe"))


def test_a_command_starts_as_many_processes_as_were_planned(capsys, small_model):
    flags = ("--model", small_model, "--gpus", "12", "--gpu", "A10", "--samples", "40K", "--compile", "off")
    _, out, _ = plan(capsys, *flags, "--global-batch-size", "1200", "--grad-checkpointing", "1")
    assert "--nnodes 2 " in out and "--nproc-per-node 6 " in out
    assert out.count("--grad-checkpointing 1") == 1


@pytest.mark.parametrize("named", ["config", "flag", None])
def test_the_data_are_asked_for_where_nothing_names_them(named, capsys, small_model, tmp_path, monkeypatch):
    monkeypatch.setattr("leanclip.cli.plan.largest_batch", lambda *_, **__: 64)
    config = tmp_path / "config.toml"
    config.write_text(f'model = "{small_model}"\n' + 'train_data = "synthetic:256"\n' * (named == "config"))
    flags = ["--config", str(config), "--gpu", "A10", "--global-batch-size", "64", "--compile", "off"]
    _, out, _ = plan(capsys, *flags, *(["--train-data", "synthetic:256"] if named == "flag" else []))
    assert "leanclip train" in out and ("--train-data ..." in out) == (named is None)
    assert ("--train-data synthetic:256" in out) == (named == "flag")
    assert " 0.0 hours" not in out


def test_a_plan_is_there_before_the_largest_batch_is_looked_for(capsys, small_model, monkeypatch):
    shown = []
    monkeypatch.setattr(
        "leanclip.cli.plan.largest_batch", lambda *_, **__: shown.append(capsys.readouterr().out) or 7
    )
    _, out, _ = plan(capsys, "--model", small_model, "--gpu", "A10", "--global-batch-size", "64", "--compile", "off")
    assert "samples/s" in shown[0] and "run: " in shown[0]
    assert "samples/s" not in out and "largest batch: 7" in out


@pytest.mark.parametrize("terminal", [False, True])
def test_whoever_waits_at_a_terminal_sees_what_for(terminal, capsys, small_model, monkeypatch):
    def traced(*_, **__):
        raise NotImplementedError("enough seen")

    monkeypatch.setattr("leanclip.planning.micro_batch_search.predict_step", traced)
    monkeypatch.setenv("COLUMNS", "500")
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")  # which is a terminal to rich
    flags = ("--model", small_model, "--gpu", "A10", "--global-batch-size", "600", "--micro-batch", "300")
    _, out, err = plan(capsys, *flags, "--grad-checkpointing", "1")
    assert out == "" and "enough seen" in err
    assert (f"tracing a step of {small_model}, micro-batch 300 of 600, 1 blocks recomputed" in err) == terminal


def test_what_does_not_fit_is_said_in_a_line(capsys, small_model):
    code, out, err = plan(
        capsys, "--model", small_model, "--gpu-memory", "0.1", "--global-batch-size", "64", "--compile", "off"
    )
    assert code == 2 and out == "" and "does not fit into 0.1 GiB" in err and err.count("\n") == 1
    assert err.endswith("; take a larger GPU or a smaller model\n")


@pytest.mark.parametrize(("gpus", "fsdp", "advised"), [(1, False, False), (2, False, True), (2, True, False)])
def test_what_can_be_split_over_gpus_is_advised_where_there_are_several(gpus, fsdp, advised):
    config = TrainConfig(parallel=ParallelConfig(fsdp=fsdp), data=DataConfig(global_batch_size=64))
    said = does_not_fit(config, card_named("A10"), 1 << 30, most=0, gpus=gpus)
    assert ("take --fsdp, a larger GPU or a smaller model" in said) == advised
    assert ("--fsdp" in said) == advised


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--samples", "many"], "expected a number such as 400M"),
        (["--gpus", "0"], "--gpus is 0; give at least 1"),
        (["--network", "string"], "choose from nvlink"),
        (["--gpu", "Voodoo2"], "choose from H200"),
        (["--loss", "hinge"], "unknown loss 'hinge'"),
        (["--model", "ViT-B-33"], "unknown model 'ViT-B-33'"),
    ],
)
def test_mistakes_end_in_one_line(flags, message, capsys):
    code, out, err = plan(capsys, *flags)
    assert code == 2 and out == "" and message in err and err.count("\n") == 1

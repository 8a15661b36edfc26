"""Bad input gets one line that names cause and remedy, exit code 2, no traceback."""

import io
import os
import subprocess
import sys

import pytest
from shard_files import picture

from leanclip.cli import COMMANDS, main
from leanclip.data.datasets import BUNDLED
from refusal import assert_refused, exit_code, refusal, refusal_code


def train(*arguments):
    return ["train", "--recipe", "demo", *arguments]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["trian"], "cli.unknown_command"),
        (train("--modle", "RN50"), "cli.unknown_flag"),
        (train("--learning-rate", "3"), "cli.unknown_flag"),
        (train("RN50"), "cli.unexpected_argument"),
        (["evaluate"], "cli.missing_argument"),
        (["report"], "cli.missing_argument"),
        (train("--precision", "bf32"), "cli.bad_value"),
        (train("--epochs", "many"), "cli.bad_value"),
        (train("--tau", "abc"), "cli.bad_value"),
        (train("--aug-scale", "0.5"), "cli.bad_value"),
        (train("--epochs", "0"), "config.bad_value"),
        (train("--global-batch-size", "1"), "config.batch_too_small"),
        (train("--micro-batch", "1"), "training.micro_batch_too_small"),
        (train("--seed", "-1"), "config.bad_value"),
        (train("--lr", "nan"), "cli.bad_value"),
        (train("--beta1", "1.5"), "config.bad_value"),
        (train("--opt", "lion", "--eps-opt", "-1"), "config.bad_value"),
        (train("--config", "absent.toml"), "config.not_found"),
        (["train", "--recipe", "dem"], "recipe.unknown"),
    ],
)
def test_refusals_of_the_command_line(arguments, code, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert_refused(code, arguments, capsys)
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], ["did you mean train?"]),
        (train("--modle", "RN50"), ["did you mean --model?"]),
        (train("--learning-rate", "1e-3"), ["unknown flag --learning-rate; did you mean --lr?"]),
        (["train", "--recipe", "dem"], ["demo"]),
        (train("--model", "ViT-B-23"), ["ViT-B-23", "ViT-B-32"]),
        (train("--model", "nope"), ["nearest: nllb-clip-base"]),
        (train("--model", "absent.json"), ["absent.json"]),
        (train("--loss", "infonse"), ["infonse", "infonce", "fastclip-v3"]),
        (train("--train-data", "pack.jsonl"), ["pack.jsonl"]),
        (train("--tau", "0.001"), ["0.001", "--tau-min", "0.01"]),
        (train("--opt", "adan"), ["--opt", "adan"]),
        (train("--opt", "adamww"), ["adamww", "adamw"]),
        (train("--rho", "3"), ["infonce", "rho", "tau"]),
        (train("--train-data", "x{1..3"), ["x{1..3"]),
        (train("--train-data", "absent-{0..3}.tar"), ["absent-0.tar"]),
        (train("--val-data", "absent.tar"), ["absent.tar"]),
        (train("--warmup", "5000"), ["--warmup", "5000", "224"]),
        (train("--batch-size", "5000"), ["1830", "5000", "--batch-size"]),
        (train("--resume", "absent"), ["--resume", "absent"]),
        (train("--pretrained", "absent.pt"), ["absent.pt"]),
        (train("--pretrained", __file__), ["is no file of weights"]),
        (train("--device", "cuda:99"), ["cuda:99"]),
        (train("--device", "tpu9"), ["tpu9", "cpu", "cuda"]),
        (train("--best-metric", "recall"), ["--best-metric", "text_to_image_recall@10"]),
        (train("--model", "ViT-B-32", "--pretrained", "openai"), ["--model ViT-B-32-quickgelu"]),
        (["selftest", "--device", "tpu9"], ["tpu9"]),
        (["selftest", "--loss", "infonse"], ["infonse", "infonce"]),
        (["evaluate", "absent"], ["absent"]),
        (["report", "absent"], ["absent"]),
    ],
)
def test_a_refusal_is_one_line_with_the_value_and_the_remedy(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = refusal(arguments, capsys)
    assert [word for word in words if word not in line] == [], line
    assert not (tmp_path / "logs").exists()


def test_resuming_a_directory_without_checkpoints(capsys, tmp_path):
    (tmp_path / "empty").mkdir()
    line = refusal(train("--resume", str(tmp_path / "empty")), capsys)
    assert "no checkpoint in" in line


def test_the_best_metric_is_one_that_the_set_has(capsys, tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / "pets" / name).mkdir(parents=True)
        (tmp_path / "pets" / name / "1.png").write_bytes(picture(1, kind="PNG"))
    arguments = ["--zero-shot", str(tmp_path / "pets"), "--logs", str(tmp_path / "logs"), "--max-steps", "1"]
    line = refusal(train("--best-metric", "pets/top5", "--warmup", "0", *arguments), capsys)
    assert "unknown --best-metric 'pets/top5'" in line and "pets/top1, pets/mean_per_class_recall" in line
    assert "emoji groups/top5" in line, "which has enough classes"
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_broken_sample_is_one_line_from_a_worker_too(workers, capsys, tmp_path):
    from shard_files import write_shard

    samples = {f"{n}.jpg": picture(1) for n in range(8)} | {f"{n}.txt": b"\xff\xfe" for n in range(8)}
    shard = write_shard(tmp_path / "latin.tar", samples)
    arguments = ["--train-data", str(shard), "--logs", str(tmp_path), "--batch-size", "4", "--workers", workers]
    line = refusal(train("--name", "bad", "--max-steps", "1", "--warmup", "0", *arguments), capsys)
    assert "not UTF-8" in line and "latin.tar" in line
    assert not (tmp_path / "bad").exists()  # which would block the corrected command


def test_a_checkpoint_of_another_model(capsys, tmp_path):
    arguments = ["--logs", str(tmp_path), "--max-steps", "1", "--batch-size", "4", "--eval-every", "0"]
    assert exit_code(*train("--name", "one", *arguments)) == 0
    capsys.readouterr()
    weights = tmp_path / "one/checkpoints/last/open_clip_model.safetensors"
    other = train("--name", "two", "--model", "RN50", "--pretrained", str(weights))
    line = assert_refused("weights.other_model", other, capsys, "RN50")
    own = line.partition("--model ")[2].partition(" [")[0]
    finetune = ["train", "--recipe", "finetune", "--pretrained", str(tmp_path / "one"), "--logs", str(tmp_path)]
    line = refusal([*finetune, "--model", "ViT-B-32", "--dry-run"], capsys)
    assert refusal_code(line) == "weights.other_model" and f"--model {own} " in line and "Error" not in line
    for command in (
        train("--name", "two", "--model", own, "--pretrained", str(weights), *arguments),
        [*finetune, "--name", "three", *arguments],  # a run brings its model
    ):
        assert exit_code(*command) == 0
    capsys.readouterr()
    for given in (tmp_path / "one", weights):
        other = train("--name", "four", "--pretrained", str(given), "--force-quick-gelu")
        assert_refused("weights.other_activation", other, capsys, f"--model {own} ")
    line = refusal(train("--name", "two", "--resume", str(tmp_path / "one"), "--loss", "siglip"), capsys)
    assert "one" in line
    other = ["--resume", "latest", "--logs", str(tmp_path), "--max-steps", "9", "--warmup", "0"]
    line = refusal(train("--name", "one", "--batch-size", "8", *other), capsys)
    assert "--global-batch-size 8, the run has 4" in line
    assert "global_batch_size = 4" in (tmp_path / "one" / "config.toml").read_text()  # a refused resume wrote nothing
    line = refusal(train("--name", "one", *arguments), capsys)
    assert "exists" in line and "--resume auto" in line and "--overwrite" in line


@pytest.mark.parametrize("name", ["weights.pt", "weights.safetensors", "model.json"])
def test_junk_files(name, capsys, tmp_path):
    (tmp_path / name).write_text("{junk")
    flag = "--model" if name.endswith("json") else "--pretrained"
    assert name in refusal(train(flag, str(tmp_path / name)), capsys)
    assert "give another --logs" in refusal(train("--logs", str(tmp_path / name), "--name", "x"), capsys)


def test_errors_are_plain_on_a_plain_terminal():
    command = [sys.executable, "-m", "leanclip", "train", "--modle", "x"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, refusal_code(done.stderr), "did you mean --model?" in done.stderr) == (
        2, "cli.unknown_flag", True,
    )  # fmt: skip


def test_overwrite_spares_what_is_not_a_run(capsys, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    assert_refused("run.not_a_run", train("--logs", str(tmp_path), "--name", "mine", "--overwrite"), capsys)
    assert (tmp_path / "mine" / "thesis.tex").exists()


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_teaches(command, capsys):
    assert exit_code(*command.split(), "--help") == 0
    shown = capsys.readouterr().out
    assert "leanclip" in shown and len(shown.splitlines()) > 5


def test_python_dash_m_is_the_command():
    done = subprocess.run([sys.executable, "-m", "leanclip", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0.2.0.dev0"


@pytest.mark.parametrize("buffer", [8192, 0])
@pytest.mark.parametrize("command", ["--help", "plan --help", "data check {}"])
def test_a_reader_that_has_enough_is_no_error(command, buffer, capsys, monkeypatch):
    """As `| head`; the last one prints with rich, which has its own way with broken pipes."""
    reading, writing = os.pipe()
    os.close(reading)
    with io.TextIOWrapper(os.fdopen(writing, "wb", buffer), write_through=not buffer) as output:
        monkeypatch.setattr(sys, "stdout", output)
        code = exit_code(*command.format(BUNDLED / "val-000000.tar").split())
        output.write("what is left at the end")
    assert (code, capsys.readouterr().err) == (141, "")


def test_another_broken_pipe_is_an_error(monkeypatch):
    def broken(_):
        raise BrokenPipeError

    monkeypatch.setattr("leanclip.cli._run", broken)
    reading, writing = os.pipe()
    with open(reading), open(writing, "w") as output:  # noqa: PTH123
        monkeypatch.setattr(sys, "stdout", output)
        with pytest.raises(BrokenPipeError):
            main(["train"])


@pytest.mark.parametrize(
    ("arguments", "flags"),
    [
        (train("--lock-text-unlocked-layers", "2"), ["--lock-text-unlocked-layers is 2", "--lock-text"]),
        (train("--workers", "100000"), ["--workers is 100000", "512"]),
        (train("--threads", "100000"), ["--threads is 100000"]),
        (train("--tau", "-1"), ["--tau is -1"]),
        (train("--loss", "infonce", "--gamma-min", "0.2"), ["no hyper-parameter --gamma-min", "--tau-max"]),
        (train("--report-to", "mlflow"), ["--report-to names 'mlflow'"]),
        (train("--zero-shot", ""), ["--zero-shot is empty"]),
        (train("--val-data", ""), ["--val-data is empty"]),
        (train("--train-data", ""), ["--train-data is empty"]),
        (["data", "pack", "", "out"], ["SOURCE is empty"]),
        (["report", ""], ["is empty"]),
        (["evaluate", "x", "--workers", "100000"], ["--workers is 100000"]),
        (["data", "check", "synthetic:5", "--workers", "100000"], ["--workers is 100000"]),
    ],
)
def test_messages_name_flags_as_they_are_typed(arguments, flags, capsys):
    line = refusal(arguments, capsys)
    assert all(flag in line for flag in flags), line

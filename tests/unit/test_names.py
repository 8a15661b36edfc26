"""Names, numbers and files from outside: printed as they are, or refused in one line."""

import ast
import os
import shlex
from pathlib import Path

import pytest
from test_cli_errors import train

from leanclip.config import TrainConfig, load_toml, override
from leanclip.progress import make_console, progress_bar
from refusal import exit_code, refusal, refusal_code, refuses

SOURCE = Path(__file__).parents[2] / "src"
SHORT = ["--max-steps", "1", "--warmup", "0", "--batch-size", "4", "--eval-every", "0", "--workers", "0"]


def finishes(arguments, capsys):
    code = exit_code(*arguments)
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out


def test_consoles_are_made_in_one_place():
    """Elsewhere rich would read brackets in paths as markup; so would a column without markup=False."""
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "Console" or path.name == "progress.py", path
                keywords = {keyword.arg for keyword in node.keywords}
                named = node.func.id == "TextColumn" and "{" in ast.unparse(node)
                assert not named or "markup" in keywords, path


@pytest.mark.parametrize("name", ["y[/]", "z[lr=1]", ":smile:", "two words"])
def test_brackets_in_a_name_are_printed(name, tmp_path, capsys):
    command = train("--logs", str(tmp_path), "--name", name, *SHORT)
    assert str(tmp_path / name) in finishes([*command, "--dry-run"], capsys)
    assert f"leanclip report {shlex.quote(str(tmp_path / name))}" in finishes(command, capsys)
    assert str(tmp_path / name) in finishes([*command, "--resume", "auto"], capsys)


def test_brackets_in_a_table_and_a_bar(capsys):
    make_console().print("[/] [red]x :smile:")
    assert capsys.readouterr().out == "[/] [red]x :smile:\n"
    with progress_bar("x[/]", 1) as advance:
        advance(1)


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (["--seed", str(2**64)], "cli.bad_value"),
        (["--epochs", "9" * 400], "cli.bad_value"),
        (["--epochs", "9" * 5000], "cli.bad_value"),
        (["--lr", "1e400"], "cli.bad_value"),
        (["--max-hours", "nan"], "cli.bad_value"),
        (["--aug-scale", "nan", "1"], "cli.bad_value"),
        (["--image-mean", "inf", "0", "0"], "cli.bad_value"),
        (["--name", "x" * 300], "config.bad_value"),
        (["--name", "a\nb"], "config.bad_value"),
        (["--name", "../a"], "config.bad_value"),
        (["--name", "a/../../b"], "config.bad_value"),
        (["--name", "/proc/a"], "config.bad_value"),
        (["--name", "."], "config.bad_value"),
        (["--name", os.fsdecode(b"\xff")], "cli.bad_value"),
        (["--train-data", os.fsdecode(b"\xff.tar")], "cli.bad_value"),
        (["--logs", "a\0b"], "cli.bad_value"),
    ],
)
def test_numbers_and_names_beyond_bounds_are_refused(flags, code, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = refusal(train(*SHORT, *flags), capsys)
    assert refusal_code(line) == code and len(line) < 400
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["n" * 300, "n/" * 3000])
def test_paths_that_are_too_long_are_refused(name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for arguments in (
        ["report", name], ["evaluate", name], ["export", name, "x.safetensors"], ["data", "suspects", name],
        ["search", name], ["embed", name, "synthetic:4", "out"], train("--config", name), train("--resume", name),
        train("--pretrained", name), train("--model", name), train("--exclude", name), train("--train-data", name),
    ):  # fmt: skip
        line = refusal(arguments, capsys)
        assert refusal_code(line) and len(line) < 2000, arguments
    assert not [path for path in tmp_path.iterdir() if path.name != "logs"]


def test_the_largest_seed_trains(tmp_path, capsys):
    finishes(train("--logs", str(tmp_path), "--name", "x", *SHORT, "--seed", str(2**63 - 1)), capsys)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (f"seed = {2**64}", "config.bad_value"),
        (f"lr = {10**400}", "config.bad_value"),
        ("lr = nan", "config.bad_value"),
        ("lr = 1e400", "config.bad_value"),
        (f"epochs = {'9' * 5000}", "config.bad_toml"),
        (f"epochs = {'[' * 100}{']' * 100}", "config.bad_value"),
        (f"epochs = {'[' * 100_000}", "config.bad_toml"),
        ('name = "a\\u0000b"', "config.bad_value"),
    ],
)
def test_files_beyond_bounds_are_refused(text, code, tmp_path):
    path = tmp_path / "x.toml"
    path.write_text(text)
    with refuses(code):
        override(TrainConfig(), load_toml(path), "x.toml")

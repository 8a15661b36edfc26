"""--help shows the common flags on one screen, --help-all every flag, both under plain headings."""

import re
import shlex

import pytest

from leanclip.cli.evaluate import EvaluateCommand
from leanclip.cli.flags import field_texts, sections_of
from leanclip.cli.parse import typed_values
from leanclip.cli.plan import PlanCommand
from leanclip.cli.train import TrainCommand
from leanclip.data import DataConfig
from refusal import assert_refused, exit_code

COMMANDS = {"train": TrainCommand, "plan": PlanCommand, "evaluate": EvaluateCommand}


def shown(capsys, monkeypatch, *arguments, columns=100):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert exit_code(*arguments) == 0
    return capsys.readouterr().out


def lines_by_flag(text):
    flags, name = {}, None
    for line in text.splitlines():
        if line.startswith("  --"):
            name = line.split()[0]
            flags[name] = []
        if name is not None and line.startswith("  "):
            flags[name].append(line)
        else:
            name = None
    return flags


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_one_screen_of_common_flags_and_help_all_has_every_flag(command, capsys, monkeypatch):
    short, full = (shown(capsys, monkeypatch, command, flag) for flag in ("--help", "--help-all"))
    flags = [flag for section in sections_of(COMMANDS[command]) for flag in section.flags if not flag.positional]
    assert len(short.splitlines()) <= 60
    assert lines_by_flag(short).keys() == {flag.name for flag in flags if flag.common}
    assert lines_by_flag(full).keys() == {flag.name for flag in flags}
    for name, lines in lines_by_flag(full).items():
        assert " ".join(lines).split("  ", 2)[-1].strip(), f"{name} has no explanation"


@pytest.mark.parametrize("command", COMMANDS)
def test_examples_in_the_help_parse(command, capsys, monkeypatch):
    lines = shown(capsys, monkeypatch, command, "--help").splitlines()
    examples = [
        line.partition(" (")[0] for line in lines if re.match(rf"  (torchrun .* -m )?leanclip {command} ", line)
    ]
    assert len(examples) >= 3
    for example in examples:
        words = shlex.split(example.partition(f"leanclip {command} ")[2])
        assert typed_values(sections_of(COMMANDS[command]), words, command=command, positionals=True)


def test_sections_stand_under_plain_headings(capsys, monkeypatch):
    text = shown(capsys, monkeypatch, "train", "--help-all")
    titles = ["Options", "Model", "Data", "Run", "Memory and processes", "Optimizer", "Loss"]
    positions = [text.index(f"\n{title}:\n") for title in titles]
    assert positions == sorted(positions)
    for word in ("None", "settings.", "(default: False)"):
        assert word not in text
    assert "  --image-mean FLOAT FLOAT FLOAT\n" in text
    assert "  --precision {amp_bf16,amp_bfloat16,amp,fp32,fp64}\n" in text
    assert "(default: auto)" in text


def test_help_shows_the_values_of_a_recipe(capsys, monkeypatch):
    plain, demo = (
        " ".join(lines_by_flag(shown(capsys, monkeypatch, "train", *flags, "--help"))["--epochs"])
        for flags in ((), ("--recipe", "demo"))
    )
    assert "(default: 32)" in plain and "(default: " in demo and demo != plain


@pytest.mark.parametrize("columns", [40, 60, 80, 100, 250])
def test_help_fits_the_terminal(capsys, monkeypatch, columns):
    flags = lines_by_flag(shown(capsys, monkeypatch, "train", "--help-all", columns=columns))
    texts = [line for lines in flags.values() for line in lines if not line.startswith("  --")]
    assert max(len(line) for line in texts) <= min(columns, 100)
    assert max(len(line.strip()) for line in texts) > 25
    words = " ".join(line.strip() for line in flags["--train-data"])
    assert field_texts(DataConfig)["train_data"] in words


def test_help_of_positional_arguments(capsys, monkeypatch):
    text = shown(capsys, monkeypatch, "report", "--help")
    assert text.startswith("usage: leanclip report RUN ... [options]\n")
    assert re.search(r"\nArguments:\n  RUN +\w.*\n(.+\n)*\nOptions:\n  --output STR", text)


@pytest.mark.parametrize(
    ("command", "missing"), [("export", "CHECKPOINT, OUT"), ("evaluate", "CHECKPOINT"), ("data pack x", "OUT")]
)
def test_missing_arguments_are_named(capsys, command, missing):
    assert_refused("cli.missing_argument", command.split(), capsys, f"missing: {missing} (")

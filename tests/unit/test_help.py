"""--help is read by people: plain headings, whole sentences, every flag."""

from dataclasses import fields

import pytest

from leanclip.cli import main
from leanclip.runs import TrainConfig

SECTIONS = ["Options", "Model", "Data", "Run", "Memory and processes", "Optimizer", "Loss"]


def shown(capsys, monkeypatch, *arguments, columns=80):
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit) as stop:
        main([*arguments, "--help"])
    assert stop.value.code == 0
    return capsys.readouterr().out


def flags_of(text):
    """By flag the lines it has."""
    found, name = {}, None
    for line in text.splitlines():
        if line.startswith("  --"):
            name = line.split()[0]
            found[name] = []
        if name is not None and line.startswith("  "):
            found[name].append(line)
        else:
            name = None
    return found


def test_help_of_train_has_every_flag_under_its_heading(capsys, monkeypatch):
    text = shown(capsys, monkeypatch, "train")
    at = [text.index(f"\n{title}\n") for title in SECTIONS]
    assert at == sorted(at)
    known = flags_of(text)
    for group, start, end in zip(fields(TrainConfig), at[1:], [*at[2:], len(text)], strict=True):
        for setting in fields(getattr(TrainConfig(), group.name)):
            flag = f"--{setting.name.replace('_', '-')}"
            assert flag in flags_of(text[start:end]) and flag in known
            assert " ".join(known[flag]).split("  ", 2)[-1].strip(), f"{flag} is not explained"


def test_help_says_nothing_of_python(capsys, monkeypatch):
    text = shown(capsys, monkeypatch, "train")
    for word in ("None", "settings.", "(default: False)", "│", "-----"):
        assert word not in text
    assert "  --image-mean FLOAT FLOAT FLOAT\n" in text
    assert "(default: fastclip-v3)" in text
    assert "  --precision {amp_bf16,amp_bfloat16,amp,fp32,fp64}\n" in text
    assert "  What is not given is the default of the chosen loss.\n" in text


def test_help_shows_what_a_recipe_sets(capsys, monkeypatch):
    without, demo = (
        " ".join(flags_of(shown(capsys, monkeypatch, "train", *given))["--epochs"])
        for given in ((), ("--recipe", "demo"))
    )
    assert "(default: 32)" in without and "(default: " in demo and demo != without


@pytest.mark.parametrize("columns", [40, 60, 80, 100, 250])
def test_help_fits_the_terminal(capsys, monkeypatch, columns):
    text = shown(capsys, monkeypatch, "train", columns=columns)
    flags = [line for lines in flags_of(text).values() for line in lines]
    told = [line for line in flags if not line.startswith("  --")]
    assert max(len(line) for line in told) <= min(columns, 100)
    assert max(len(line.strip()) for line in told) > 25
    words = " ".join(line.strip() for line in flags_of(text)["--train-data"])
    assert "or URLs of that form (s3://, gs://, https://); several with :: between them. Or a .csv" in words


def test_help_of_arguments_without_a_flag(capsys, monkeypatch):
    text = shown(capsys, monkeypatch, "data", "pack")
    assert "\nArguments\n  SOURCE                      A .csv, .tsv, .parquet" in text
    assert "  pictures/                 kite.jpg with kite.txt beside it, or a list" in text  # as it was written


def test_usage_names_what_a_command_is_about(capsys, monkeypatch):
    assert shown(capsys, monkeypatch, "report").startswith("usage: leanclip report [-h] RUN ... [--output STR]\n")
    assert "\nArguments\n  RUN ...                     The run's directory, or several.\n\nOptions\n" in shown(
        capsys, monkeypatch, "report"
    )


@pytest.mark.parametrize(
    ("command", "missing"), [("export", "CHECKPOINT and OUT"), ("evaluate", "CHECKPOINT"), ("data pack x", "OUT")]
)
def test_what_is_missing_is_named(capsys, command, missing):
    with pytest.raises(SystemExit) as stop:
        main(command.split())
    assert stop.value.code == 2
    named = " ".join(command.split()[:2]).removesuffix(" x")
    assert capsys.readouterr().err == f"leanclip: missing: {missing} (leanclip {named} --help lists the flags)\n"


def test_a_script_for_the_shell_stays_as_it_is(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["report", "--tyro-print-completion", "bash"])
    assert not stop.value.code
    assert "\nimport sys\n" in capsys.readouterr().out

"""Damaged and hostile run directories: the report shows what it can, or ends in one line with exit code 2."""

import errno
import json
import os
from pathlib import Path

import pytest
from test_report import page, train_row, write_run
from test_report_comparison import full_panel, rows, zero_shot
from test_report_pair_weights import fit_row, suspects

from leanclip.reporting import write_report
from leanclip.reporting.run_reader import read_run
from refusal import exit_code, refuses

DEEP = "[" * 100_000
HUGE = "9" * 400
FILES = ("metrics.jsonl", "run.json", "panel.json", "zero_shot.json", "suspects.json", "config.toml")


def whole_run(folder: Path) -> Path:
    run = write_run(folder, [*rows(), fit_row(500), fit_row(900)], with_panel=full_panel())
    (run / "suspects.json").write_text(json.dumps(suspects(3)))
    (run / "zero_shot.json").write_text(json.dumps(zero_shot(["cats", "dogs", "hats"])))
    return run


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("text", [DEEP, f'{{"step": {HUGE}}}', "[]", "123", "{", "\x00\xff", '{"step": null}'])
def test_one_damaged_file_is_named_and_the_rest_is_shown(tmp_path: Path, name: str, text: str):
    run = whole_run(tmp_path / "run")
    kept = (run / name).read_text() if name == "metrics.jsonl" else ""
    (run / name).write_text(text + "\n" + kept)
    if text == '{"step": null}' and name == "run.json":
        text = "{"  # any table is a valid run.json
        (run / name).write_text(text)
    html = page(run)
    assert f"{name} could not be read" in html or "metrics.jsonl left out: 1" in html
    assert "Text to image recall" in html


@pytest.mark.parametrize("name", ["run.json", "panel.json", "zero_shot.json"])
def test_directory_or_pipe_instead_of_a_file(tmp_path: Path, name: str):
    run = whole_run(tmp_path / "run")
    (run / name).unlink()
    os.mkfifo(run / name)
    assert f"{name} could not be read" in page(run)
    (run / name).unlink()
    (run / name).mkdir()
    assert f"{name} could not be read" in page(run)


@pytest.mark.parametrize(
    "line", ["123", "[]", '{"kind": "train", "step": null}', DEEP, '{"kind": "train", "step": 1e999}', HUGE]
)
def test_metrics_of_nothing_but_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str):
    run = write_run(tmp_path / "run", [], tail=line + "\n")
    assert exit_code("report", str(run)) == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert "report.no_metrics" in message


def test_numbers_beyond_any_axis(tmp_path: Path):
    """Differences and products of what is drawn stay finite."""
    wild = [1e308, -1e308, 5e-324, 0.0, 1e99, -1e99, 10**19]
    run = write_run(tmp_path / "a", [train_row(n + 1, loss=value, odd=value) for n, value in enumerate(wild)])
    other = write_run(tmp_path / "b", [train_row(2**52)], global_batch=1e99)
    many = write_run(tmp_path / "c", [train_row(2**53 - 1 - n) for n in range(600)], global_batch=2e99)
    for runs in ([run], [other], [many], [run, other, many]):
        html = write_report(runs, tmp_path / "page.html").read_text(encoding="utf-8")
        assert "NaN" not in html and "Infinity" not in html


def test_config_of_any_bytes(tmp_path: Path):
    run = write_run(tmp_path / "run", [train_row(1)])
    for content in (b"\xff\xfe\x00", b"a = " + b"[" * 20_000, b"a = " + b"9" * 5000, b"lr = nan\npretrained = [1]"):
        (run / "config.toml").write_bytes(content)
        page(run)
        write_report([run, run], tmp_path / "two.html")
    assert read_run(run).settings["pretrained"] == [1]


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC, errno.EACCES])
def test_disk_that_cannot_be_written(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    run = write_run(tmp_path / "run", [train_row(1)])
    before = sorted(path.name for path in run.iterdir())

    def full(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "write_bytes", full)
    assert exit_code("report", str(run)) == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert os.strerror(code) in message and "report.not_writable" in message
    assert sorted(path.name for path in run.iterdir()) == before


def test_output_that_is_no_file_is_not_replaced(tmp_path: Path):
    """A rename onto a device such as /dev/stdout would remove it for all programs."""
    run = write_run(tmp_path / "run", [train_row(1)])
    os.mkfifo(tmp_path / "pipe")
    for target in (tmp_path / "pipe", tmp_path, run / "metrics.jsonl" / "page.html", tmp_path / ("x" * 300)):
        with refuses("report.not_writable", str(target)):
            write_report(run, target)
    assert (tmp_path / "pipe").is_fifo()

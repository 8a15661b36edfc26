"""Two runs of one name: the second waits a little, then leaves the first alone."""

import os
import signal
import subprocess
import sys

import pytest

from leanclip.cli import main
from leanclip.training import run_directory
from leanclip.training.run_directory import RunDirectory

FEW = ["--recipe", "demo", "--batch-size", "64", "--max-steps", "1", "--eval-every", "0", "--workers", "0"]
TRIES = """
import fcntl, os, sys, time
file = os.open(sys.argv[1] + "/.lock", os.O_RDWR | os.O_CREAT)
try:
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    print("refused")
else:
    os.write(file, b"somebody\\n")
    print("held", flush=True)
"""  # as a run does it, without the time that importing takes
HOLDS = TRIES + "time.sleep(600)"


def tried(path):
    return subprocess.run([sys.executable, "-c", TRIES, str(path)], stdout=subprocess.PIPE, text=True).stdout


@pytest.fixture
def holder(tmp_path):
    """Another process that writes tmp_path/run."""
    (tmp_path / "run").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def train(tmp_path, *more):
    with pytest.raises(SystemExit) as stop:
        main(["train", *FEW, "--logs", str(tmp_path), "--name", "run", *more])
    return stop.value.code


@pytest.mark.parametrize("more", [[], ["--overwrite"], ["--resume", "auto"]])
def test_a_second_run_of_the_same_name_leaves_the_first_alone(tmp_path, capsys, monkeypatch, holder, more):
    monkeypatch.setattr(run_directory, "PATIENCE", 0.2)
    (tmp_path / "run" / "run.json").write_text("{}")
    (tmp_path / "run" / "metrics.jsonl").write_text("of the first\n")
    assert train(tmp_path, *more) == 2
    told = capsys.readouterr().err
    assert f"another run is writing {tmp_path / 'run'} (somebody); wait" in told and "another --name" in told
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == "of the first\n"


def test_a_killed_run_holds_nothing(tmp_path, holder):
    holder.kill()
    assert train(tmp_path) == 0
    assert (tmp_path / "run" / "run.json").is_file()


@pytest.mark.filterwarnings("ignore:This process")  # has threads
def test_a_lock_is_not_inherited(tmp_path):
    """Loading processes may live a little longer than the run that was killed."""
    with RunDirectory(tmp_path / "run").held():
        child = os.fork()
        if not child:
            signal.pause()
    try:
        assert tried(tmp_path / "run") == "held\n"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_run_holds_its_directory_until_it_is_over(tmp_path, monkeypatch):
    from leanclip.cli import train as command

    original, found = command.train, []

    def looked_at(*given):
        found.append(tried(tmp_path / "run"))
        return original(*given)

    monkeypatch.setattr(command, "train", looked_at)
    assert train(tmp_path) == 0
    assert found == ["refused\n"]
    assert (tmp_path / "run" / ".lock").read_text().startswith(f"process {os.getpid()} on ")
    assert tried(tmp_path / "run") == "held\n"


def test_what_is_no_run_gets_no_lock(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("x")
    assert train(tmp_path, "--overwrite") == 2
    assert "is no run of leanclip" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.tex"]


def test_without_locks_it_goes_on(tmp_path, monkeypatch):
    def refused(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(run_directory.fcntl, "lockf", refused)
    assert train(tmp_path) == 0

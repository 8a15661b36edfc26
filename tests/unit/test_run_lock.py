"""Two runs of one name: the second waits a little, then leaves the first alone."""

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import checkpoint_runs as runs
import pytest

from leanclip.cli import main
from leanclip.errors import UserError
from leanclip.runs import run_directory
from leanclip.runs.run_directory import RunDirectory
from refusal import refusal_code

FEW = ["--recipe", "demo", "--batch-size", "64", "--max-steps", "1", "--eval-every", "0", "--workers", "0"]
TRIES = """
import fcntl, os, sys, time
file = os.open(sys.argv[1] + "/.lock", os.O_RDWR | os.O_CREAT)
try:
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kind that children would inherit
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
def holder_of():
    """Makes another process that writes a directory."""
    started = []

    def hold(path):
        path.mkdir(exist_ok=True)
        process = subprocess.Popen([sys.executable, "-c", HOLDS, str(path)], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        return process

    yield hold
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def holder(tmp_path, holder_of):
    return holder_of(tmp_path / "run")


def train(tmp_path, *more):
    with pytest.raises(SystemExit) as stop:
        main(["train", *FEW, "--logs", str(tmp_path), "--name", "run", *more])
    return stop.value.code


@pytest.mark.parametrize("more", [[], ["--overwrite"], ["--resume", "auto"]])
def test_a_second_run_of_the_same_name_leaves_the_first_alone(tmp_path, capsys, monkeypatch, holder, more):
    monkeypatch.setattr(run_directory, "PATIENCE", 0.2)
    (tmp_path / "run" / "run.json").write_text("{}")
    (tmp_path / "run" / "metrics.jsonl").write_text("of the first\n")
    half = tmp_path / "run/checkpoints/.step_00000099.tmp"
    half.mkdir(parents=True)
    assert train(tmp_path, *more) == 2
    assert half.is_dir()
    told = capsys.readouterr().err
    assert f"waiting for another run that writes {tmp_path / 'run'} (somebody)\n" in told
    assert f"another run is writing {tmp_path / 'run'} (somebody); wait" in told and "another --name" in told
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == "of the first\n"


def test_whoever_only_looks_needs_no_lock(tmp_path, holder):
    (tmp_path / "run/checkpoints/.step_00000099.tmp").mkdir(parents=True)
    (tmp_path / "run" / "run.json").write_text("{}")
    assert train(tmp_path, "--dry-run", "--resume", "auto") == 0
    assert (tmp_path / "run/checkpoints/.step_00000099.tmp").is_dir()


@pytest.fixture
def while_waiting(monkeypatch):
    """What happens when a run begins to wait for the lock."""

    def patched(then):
        monkeypatch.setattr(run_directory, "time", SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: then()))

    return patched


def test_a_run_that_was_waited_for_is_gone_on_with(run, holder_of, while_waiting, capsys):
    """Its last checkpoint comes while the second one waits, as when a job is taken away and queued again."""
    newest = run / "logs/run/checkpoints/step_00000008"
    newest.rename(run / "later")
    process = holder_of(run / "logs/run")

    def saves_and_ends():
        (run / "later").rename(newest)
        process.kill()
        process.wait()

    while_waiting(saves_and_ends)
    assert runs.train(run, resume="auto", max_steps=9) == 0
    told = capsys.readouterr()
    assert "waiting for another run" in told.err
    assert f"resumed from {newest.resolve()} at step 8 of 9" in told.out and "aside" not in told.err


def test_a_run_that_began_and_ended_meanwhile_is_not_begun_anew(
    tmp_path, holder_of, while_waiting, capsys, monkeypatch
):
    """Nothing was there when the second one looked."""
    from leanclip import training_run as command

    original = command.set_up

    def slow(*given, **named):
        job, process = original(*given, **named), holder_of(tmp_path / "run")
        while_waiting(lambda: (process.kill(), process.wait()))
        return job

    monkeypatch.setattr(command, "set_up", slow)
    assert train(tmp_path, "--resume", "auto") == 2
    assert refusal_code(capsys.readouterr().err) == "run.in_use"


def test_one_process_writes_a_run_once(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    refused = pytest.raises(UserError, match=r"writing .*run already")
    with directory.held(), refused, directory.held():
        pass
    with RunDirectory(tmp_path / "run").held() as waited:
        assert waited is False


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
    from leanclip import training_run as command

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

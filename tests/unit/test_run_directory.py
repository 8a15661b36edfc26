"""Two runs of the same name: the second waits for a moment, then refuses."""

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import checkpoint_runs as runs
import pytest

from leanclip.runs import run_directory
from leanclip.runs.run_directory import RunDirectory
from refusal import assert_refused, exit_code, refusal_code, refuses

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
    os.write(file, b"process 1\\n")
    print("held", flush=True)
"""  # as a run does it, without the time that importing takes
HOLDS = TRIES + "time.sleep(600)"


def tried(path):
    return subprocess.run([sys.executable, "-c", TRIES, str(path)], stdout=subprocess.PIPE, text=True).stdout


@pytest.fixture
def holder_of():
    """Starts another process that locks a directory."""
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


def command(tmp_path, *more):
    return ["train", *FEW, "--logs", str(tmp_path), "--name", "run", *more]


def train(tmp_path, *more):
    return exit_code(*command(tmp_path, *more))


@pytest.mark.parametrize("more", [[], ["--overwrite"], ["--resume", "auto"]])
def test_a_second_run_of_the_same_name_is_refused(tmp_path, capsys, monkeypatch, holder, more):
    monkeypatch.setattr(run_directory, "LOCK_TIMEOUT", 0.2)
    (tmp_path / "run" / "run.json").write_text("{}")
    (tmp_path / "run" / "metrics.jsonl").write_text("of the first\n")
    half = tmp_path / "run/checkpoints/.step_00000099.tmp"
    half.mkdir(parents=True)
    assert train(tmp_path, *more) == 2
    assert half.is_dir()
    error = capsys.readouterr().err
    assert f"waiting for another run that writes {tmp_path / 'run'} (process 1)\n" in error
    assert refusal_code(error) == "run.in_use" and error.count("(process 1)") == 2
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == "of the first\n"


def test_a_dry_run_needs_no_lock(tmp_path, holder):
    (tmp_path / "run/checkpoints/.step_00000099.tmp").mkdir(parents=True)
    (tmp_path / "run" / "run.json").write_text("{}")
    assert train(tmp_path, "--dry-run", "--resume", "auto") == 0
    assert (tmp_path / "run/checkpoints/.step_00000099.tmp").is_dir()


def test_a_dry_run_says_that_the_run_is_refused(run, capsys):
    for more, words in (({}, "--resume auto"), ({"overwrite": True}, None), ({"resume": "auto"}, None)):
        assert runs.train(run, dry_run=True, **more) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert ("is refused" in shown) == (words is not None) and (words or "") in shown
    assert (run / "logs/run/checkpoints/step_00000008").is_dir()
    assert runs.train(run, dry_run=True, name="new") == 0
    assert "is refused" not in capsys.readouterr().out


@pytest.fixture
def while_waiting(monkeypatch):
    """Sets what happens when a run starts to wait for the lock."""

    def patch(call):
        monkeypatch.setattr(run_directory, "time", SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: call()))

    return patch


def test_a_run_is_resumed_after_waiting_for_it(run, holder_of, while_waiting, capsys):
    """It saves its last checkpoint meanwhile, as when a job is preempted and queued again."""
    newest = run / "logs/run/checkpoints/step_00000008"
    newest.rename(run / "later")
    process = holder_of(run / "logs/run")

    def saves_and_ends():
        (run / "later").rename(newest)
        process.kill()
        process.wait()

    while_waiting(saves_and_ends)
    assert runs.train(run, resume="auto", max_steps=9) == 0
    output = capsys.readouterr()
    assert "waiting for another run" in output.err
    assert f"resumed from {newest.resolve()} at step 8 of 9" in output.out and "aside" not in output.err


def test_a_run_that_appears_during_the_set_up_is_not_restarted(
    tmp_path, holder_of, while_waiting, capsys, monkeypatch
):
    from leanclip import training_run as command

    original = command.set_up

    def slow(*arguments, **options):
        job, process = original(*arguments, **options), holder_of(tmp_path / "run")
        while_waiting(lambda: (process.kill(), process.wait()))
        return job

    monkeypatch.setattr(command, "set_up", slow)
    assert train(tmp_path, "--resume", "auto") == 2
    assert refusal_code(capsys.readouterr().err) == "run.in_use"


def test_a_process_locks_a_run_once(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    with directory.held(), refuses("run.in_use", "--name"), directory.held():
        pass
    with RunDirectory(tmp_path / "run").held() as waited:
        assert waited is False


def test_a_killed_run_releases_its_lock(tmp_path, holder):
    holder.kill()
    assert train(tmp_path) == 0
    assert (tmp_path / "run" / "run.json").is_file()


@pytest.mark.filterwarnings("ignore:This process")  # has threads
def test_a_lock_is_not_inherited(tmp_path):
    """Loader workers may outlive a killed run for a moment."""
    with RunDirectory(tmp_path / "run").held():
        child = os.fork()
        if not child:
            signal.pause()
    try:
        assert tried(tmp_path / "run") == "held\n"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_run_locks_its_directory_until_its_end(tmp_path, monkeypatch):
    from leanclip import training_run as command

    original, attempts = command.train, []

    def train_and_try(*arguments):
        attempts.append(tried(tmp_path / "run"))
        return original(*arguments)

    monkeypatch.setattr(command, "train", train_and_try)
    assert train(tmp_path) == 0
    assert attempts == ["refused\n"]
    assert (tmp_path / "run" / ".lock").read_text().startswith(f"process {os.getpid()} on ")
    assert tried(tmp_path / "run") == "held\n"


def test_a_directory_that_is_no_run_is_not_locked(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("x")
    assert_refused("run.not_a_run", command(tmp_path, "--overwrite"), capsys)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.tex"]


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def refused(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(run_directory.fcntl, "lockf", refused)
    assert train(tmp_path) == 0

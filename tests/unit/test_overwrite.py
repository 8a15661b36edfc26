"""--overwrite: the old run is whole until the new one has a log line, a checkpoint or a diagnosis."""

import itertools
from pathlib import Path

import pytest
from checkpoint_runs import steps_of_metrics, train

from leanclip.errors import UserError
from leanclip.runs import RunDirectory
from leanclip.training import loop, run_output


def content(folder):
    """Of the run: every file, link and directory but the lock."""
    root = folder / "logs/run"
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None
        for path in root.rglob("*")
        if path.name != ".lock"
    }


class Killed(BaseException):
    """A kill: no handler of an Exception runs."""


@pytest.fixture
def failing(monkeypatch):
    """Makes a part of the start, or a step, fail from its n-th call on."""

    def fail(part, error, call=1):
        module, name = {"tracker": (run_output, "open_trackers"), "step": (loop, "training_step")}[part]
        original, calls = getattr(module, name), itertools.count(1)

        def failing(*arguments, **options):
            if next(calls) >= call:
                raise error
            return original(*arguments, **options)

        monkeypatch.setattr(module, name, failing)

    return fail


@pytest.mark.parametrize("part", ["tracker", "step"])
def test_a_start_that_fails_leaves_the_run_that_it_would_overwrite(run, failing, capsys, part):
    before = content(run)
    failing(part, UserError("injected fault", code="data.too_many_broken"))
    assert train(run, overwrite=True) == 2
    assert "holds the run before it" in capsys.readouterr().err
    assert content(run) == before


def test_ctrl_c_before_the_first_step_leaves_it_too(run, failing):
    before = content(run)
    failing("step", KeyboardInterrupt())
    train(run, overwrite=True)
    assert content(run) == before


def test_the_first_log_line_ends_the_old_run(run, failing):
    failing("step", UserError("injected fault", code="test"), call=3)
    assert train(run, overwrite=True, log_every=1, save_every=0) == 2
    assert steps_of_metrics(run) == [1, 2]
    assert not (run / "logs/run/.replaced").exists() and not (run / "logs/run/checkpoints/last").exists()


def test_it_is_removed_when_the_line_is_written(run, monkeypatch):
    original, kept = loop.training_step, []

    def step(*arguments):
        kept.append((run / "logs/run/.replaced/checkpoints/step_00000008").is_dir())
        return original(*arguments)

    monkeypatch.setattr(loop, "training_step", step)
    assert train(run, overwrite=True, log_every=2, save_every=0, max_steps=4) == 0
    assert kept == [True, True, False, False]


def test_a_checkpoint_ends_it_too(run, failing):
    failing("step", UserError("injected fault", code="test"), call=4)
    assert train(run, overwrite=True, log_every=100, save_every=2) == 2
    checkpoints = {path.name for path in (run / "logs/run/checkpoints").iterdir()}
    assert {"last", "step_00000002"} == checkpoints and not (run / "logs/run/.replaced").exists()


def test_the_next_start_puts_back_what_a_kill_left(run, capsys):
    """Also where the new run was writing its first checkpoint. --resume auto then finds the old run's."""
    before, directory = content(run), RunDirectory(run / "logs/run")
    directory.prepare(overwrite=True)
    directory.describe(name="run", launch="x")
    directory.metrics.write_text('{"kind": "eval", "step": 0}\n')
    (directory.checkpoints / ".step_00000002.tmp").mkdir()
    assert train(run) == 2
    assert "[run.exists]" in capsys.readouterr().err and content(run) == before
    directory.prepare(overwrite=True)
    assert train(run, resume="auto") == 0
    assert "the run is finished" in capsys.readouterr().out


def test_a_kill_at_any_move_loses_nothing(run, monkeypatch):
    before, directory, rename = content(run), RunDirectory(run / "logs/run"), Path.rename

    def killed_at(number, call):
        """Whether the call was killed at this move."""
        calls = itertools.count()

        def counted(*arguments):
            if next(calls) == number:
                raise Killed
            return rename(*arguments)

        with monkeypatch.context() as patched:
            patched.setattr(Path, "rename", counted)
            try:
                call()
            except Killed:
                return True
        return False

    def put_back():
        with directory.held():
            assert content(run) == before

    moves = 0
    while killed_at(moves, lambda: directory.prepare(overwrite=True)):
        assert directory.is_run
        put_back()
        moves += 1
    assert moves > 5
    put_back()
    moves = 0
    while True:
        directory.prepare(overwrite=True)
        directory.describe(name="new")
        if not killed_at(moves, directory.settle):
            break
        put_back()
        moves += 1
    assert moves > 5 and content(run) == before


def test_a_restart_by_torchrun_overwrites_again(run, monkeypatch, capsys):
    """The killed process had no results, and the command does not ask to resume the old run."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"}.items():
        monkeypatch.setenv(name, value)
    from leanclip.distributed import launch_id

    directory = RunDirectory(run / "logs/run")
    directory.prepare(overwrite=True)
    directory.describe(name="run", launch=launch_id(), pid=1)
    assert train(run, overwrite=True, max_steps=3) == 0
    assert steps_of_metrics(run) == [1, 2, 3] and "resumed" not in capsys.readouterr().out


def test_a_start_that_another_process_refuses_removes_nothing(tmp_path, monkeypatch):
    """Two starts of a new name: the one that does not get the lock leaves the other's directory."""
    directory = RunDirectory(tmp_path / "logs/run")

    def refused(*_):
        directory.describe(name="run")
        raise UserError("another run is writing", code="run.in_use")

    monkeypatch.setattr("leanclip.runs.run_directory._lock", refused)
    assert train(tmp_path) == 2
    assert directory.is_run

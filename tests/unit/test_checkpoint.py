"""Checkpoints: which are kept, how runs resume, and which commands are refused."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from checkpoint_runs import (
    arguments,
    assert_train_refused,
    equal,
    job_of,
    names,
    saved_tensors,
    steps_of_metrics,
    train,
)

from leanclip.checkpointing.checkpoint import Checkpoints, Position, clean_up
from leanclip.checkpointing.resume import SavedRun, find_checkpoint
from leanclip.checkpointing.storage import verify
from leanclip.data.datasets import BUNDLED
from leanclip.errors import STOPPED
from leanclip.filesystem import atomic_path, write_atomically
from leanclip.optim import set_learning_rate
from leanclip.runs import RunDirectory
from leanclip.runs.stopping import Stopping
from refusal import exit_code, refusal_code

VAL_DATA = str(BUNDLED / "val-*.tar")


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, ["step_00000004", "step_00000006", "step_00000008"]),
        ({"keep_last": 1, "keep_every": 4}, ["step_00000004", "step_00000008"]),
        ({"save_every": None}, ["step_00000008"]),  # a short run
        ({"val_data": VAL_DATA, "eval_every": 3, "keep_last": 1, "max_steps": 7}, ["best", "step_00000007"]),
    ],
)
def test_kept_checkpoints(tmp_path, options, kept):
    assert train(tmp_path, **options) == 0
    assert names(tmp_path) == sorted([*kept, "last"])
    for name in kept:
        verify(tmp_path / "logs/run/checkpoints" / name)


def test_a_wait_for_the_disk_is_reported_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("leanclip.checkpointing.checkpoint.WARN_WAIT_SECONDS", -1.0)
    assert train(tmp_path) == 0
    assert capsys.readouterr().out.count("for the previous checkpoint") == 1


def test_auto_starts_resumes_and_accepts_a_finished_run(run, tmp_path, capsys):
    logs = tmp_path / "other"
    assert train(run, resume="auto", logs=logs, max_steps=4) == 0  # starts
    assert train(run, resume="auto", logs=logs) == 0  # resumes
    assert "step 4 of 8" in capsys.readouterr().out.replace("\n", "")
    before, files = names(run), ("config.toml", "run.json", "metrics.jsonl")
    contents = [(run / "logs/run" / name).read_bytes() for name in files]
    for changes in ({}, {"max_steps": 5}, {"lr": 0.5}):
        assert train(run, resume="auto", **changes) == 0
        assert "the run is finished" in capsys.readouterr().out
        assert names(run) == before
        assert [(run / "logs/run" / name).read_bytes() for name in files] == contents


def test_auto_restarts_a_run_without_a_checkpoint(run):
    shutil.rmtree(run / "logs/run/checkpoints")
    assert train(run, resume="auto", max_steps=3) == 0
    assert steps_of_metrics(run) == [1, 2, 3]


def test_weights_kept_from_an_earlier_start_survive_restarts(run):
    checkpoints = run / "logs/run/checkpoints"
    (checkpoints / "step_00000008").rename(run / "best")
    shutil.rmtree(checkpoints)
    checkpoints.mkdir()
    (run / "best").rename(checkpoints / "best")
    kept, directory = run / "logs/run/before-1/checkpoints/best", RunDirectory(run / "logs/run")
    for _ in range(3):  # each is killed before its first checkpoint
        directory.prepare(beginning=True)
        assert (kept / "state.json").is_file()
        directory.describe(name="run")
        directory.metrics.touch()
    directory.prepare(overwrite=True)
    assert not kept.exists()


def test_latest_needs_a_checkpoint_and_a_name(tmp_path, capsys):
    assert_train_refused("checkpoint.not_found", tmp_path, capsys, resume="latest")
    words = arguments(tmp_path, resume="auto")
    at = words.index("--name")
    assert exit_code(*words[:at], *words[at + 2 :]) == 2
    assert "--name" in capsys.readouterr().err


def test_clean_up_after_a_killed_run(run):
    checkpoints = run / "logs/run/checkpoints"
    (checkpoints / ".step_00000009.tmp").mkdir()
    (checkpoints / "step_00000008").rename(checkpoints / ".step_00000008.old")
    clean_up(checkpoints)
    assert names(run) == ["last", "step_00000004", "step_00000006", "step_00000008"]


@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        ({"loss": "infonce"}, "--loss infonce, the run has fastclip-v3"),
        ({"global_batch_size": 10}, "--global-batch-size 10, the run has 20"),
        ({"seed": 5}, "--seed 5, the run has 0"),
        ({"opt": "sgdm"}, "--opt sgdm, the run has adamw"),
        ({"force_image_size": 32}, "it trains"),
        ({"train_data": str(BUNDLED / "train-*.tar")}, "val-"),
        ({"lock_text": True}, "--lock-text"),
    ],
)
def test_a_command_that_does_not_fit_the_run_is_refused(run, changed, difference, capsys):
    assert train(run, resume="auto", **changed) == 2
    error = capsys.readouterr().err
    assert "train_data" in changed or refusal_code(error) == "resume.mismatch", error
    assert difference in error and len(error.strip().splitlines()) == 1, error


@pytest.mark.parametrize("changed", [{"val_split": 0.3, "seed": 5}, {"val_split": 0.4}, {}])
def test_another_split_is_not_taken_for_images_that_changed(tmp_path, capsys, changed):
    assert train(tmp_path, max_steps=2, val_split=0.3) == 0
    said = "--seed 5" if "seed" in changed else "--val-split"
    assert_train_refused("resume.mismatch", tmp_path, capsys, said, resume="auto", **changed)


def test_changed_settings_are_reported_except_free_ones(run, capsys):
    assert train(run, resume="auto", epochs=4, max_steps=9, lr=0.02, workers=1, log_every=2, micro_batch=7) == 0
    output = capsys.readouterr().out.replace("\n", " ")
    assert "resumed with --lr 0.02, the run has 0.01" in output and "--max-steps 9" in output
    assert "--workers" not in output and "--log-every" not in output and "--micro-batch" not in output


def test_new_data_reset_the_tables_once(run):
    before = saved_tensors(run, 8)
    other = {"train_data": str(BUNDLED / "train-*.tar"), "resume": "auto", "reset_loss_state": True}
    assert train(run, max_steps=10, **other) == 0
    after = saved_tensors(run, 10)
    assert after["loss.state.log_u_image"].isfinite().sum() == 2 * 20  # the samples of two steps
    assert len(after["loss.state.log_u_image"]) != len(before["loss.state.log_u_image"])
    tau, tau_before = (tensors["loss.temperature_rule.log_inv_tau"] for tensors in (after, before))
    assert tau != tau_before and torch.isclose(tau, tau_before, atol=0.01)  # not reset
    assert after["optimizer.model.clip.text_projection.step"] == 10
    assert train(run, max_steps=11, **other) == 0
    assert train(run, max_steps=12, **other | {"reset_loss_state": False}) == 0  # as after a restart by torchrun
    assert train(run, max_steps=13, **other) == 0
    assert saved_tensors(run, 13)["loss.state.visited"] == 5 * 20


def test_another_loss_resumes_with_empty_tables(run):
    assert train(run, resume="auto", reset_loss_state=True, loss="infonce", max_steps=10) == 0
    assert train(run, resume="auto", loss="infonce", max_steps=11) == 0


def test_a_copied_checkpoint_resumes(run, tmp_path):
    shutil.copytree(run / "logs/run/checkpoints/step_00000006", tmp_path / "copy")
    assert train(run, resume=tmp_path / "copy", name="other") == 0
    assert steps_of_metrics(run)[-1] == 8


@pytest.mark.parametrize("captions", [1, 2])
def test_learned_pair_weights_resume_inside_an_epoch(captions, tmp_path):
    """The weights that the run had at the end are those of a run that was interrupted after the first fit."""
    settings = {"pair_weights": "learned", "loss": "dcl", "global_batch_size": 64, "epochs": 5, "max_steps": 14}
    settings["captions_per_sample"] = captions
    assert train(tmp_path, save_every=7, **settings) == 0
    shutil.copytree(tmp_path / "logs/run/checkpoints/step_00000007", tmp_path / "copy")
    expected = saved_tensors(tmp_path, 14)
    (tmp_path / "logs/run").rename(tmp_path / "logs/whole")
    assert train(tmp_path, save_every=7, resume=tmp_path / "copy", **settings) == 0
    equal(saved_tensors(tmp_path, 14), expected)
    fits = [value for name, value in expected.items() if name.endswith("pair_weights.fit")]
    assert [float(fit[-1]) for fit in fits] == [4.0]  # fitted at the start of this epoch


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_stops_a_run_after_the_step(number, tmp_path, monkeypatch, capsys):
    after = Stopping.after

    def send(self, step):
        if step == 3:
            os.kill(os.getpid(), number)
        return after(self, step)

    monkeypatch.setattr(Stopping, "after", send)
    handler = signal.getsignal(number)
    assert train(tmp_path, save_every=0) == STOPPED
    assert signal.getsignal(number) == handler
    assert signal.Signals(number).name in capsys.readouterr().out
    assert names(tmp_path) == ["last", "step_00000003"]
    assert json.loads((tmp_path / "logs/run/run.json").read_text())["status"] == "stopped"
    monkeypatch.setattr(Stopping, "after", after)
    assert train(tmp_path, save_every=0, resume="auto") == 0
    assert steps_of_metrics(tmp_path) == list(range(1, 9))


def test_litter_of_killed_processes_is_removed(run):
    """Of this run at its next start, but no file that a live process has locked, and none that is new."""
    directory = run / "logs/run"
    old, locked, new = (directory / f".{name}.tmp" for name in ("run.json.abcdefgh", "report.html.abcdefgh", "new"))
    for path in (old, locked, new):
        path.write_text("half")
    for path in (old, locked):
        os.utime(path, (1, 1))
    with locked.open("rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert train(run, resume="auto", max_steps=9) == 0
        assert sorted(directory.glob(".*.tmp")) == sorted((locked, new))


def test_a_killed_write_is_removed_by_the_next(tmp_path):
    code = "import sys, os; from pathlib import Path; from leanclip.filesystem import atomic_path\n"
    code += f"with atomic_path(Path({str(tmp_path / 'x[1].json')!r})) as path:\n path.write_text('half')\n"
    subprocess.run([sys.executable, "-c", code + " os.kill(os.getpid(), 9)"], check=False)
    (litter,) = tmp_path.iterdir()
    os.utime(litter, (1, 1))
    with atomic_path(tmp_path / "x[1].json") as first:
        os.utime(first, (1, 1))
        write_atomically(tmp_path / "x[1].json", "second")  # does not remove the first one's
        first.write_text("first")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("x[1].json", "first")]


def test_a_run_does_not_depend_on_files_that_others_overwrite(tmp_path, monkeypatch):
    """Its own are kept in memory; every checkpoint has the configuration that the run began with."""
    after, directory = Stopping.after, tmp_path / "logs/run"
    expected = []

    def overwrite(self, step):
        if step == 1:
            expected.append((directory / "config.toml").read_text())
            for name in ("config.toml", "run.json", "README.md", "manifest.json"):
                (directory / name).write_bytes(b"\xff\xfe[")
        if step == 3:
            (directory / "config.toml").unlink()
            (directory / "run.json").write_text('{"environment": 3, "notes": 4, "ema": "x"}')
        return after(self, step)

    monkeypatch.setattr(Stopping, "after", overwrite)
    assert train(tmp_path) == 0
    checkpoints = sorted((directory / "checkpoints").glob("step_*"))
    assert [(path / "config.toml").read_text() for path in checkpoints] == expected * 3
    monkeypatch.undo()
    assert train(tmp_path, resume="auto", max_steps=10) == 0


@pytest.mark.parametrize(("restarts", "code"), [("0", STOPPED), ("3", 0)])
def test_max_hours_stop_a_run(tmp_path, monkeypatch, capsys, restarts, code):
    """With an exit code that a torchrun with restarts does not take for a failure."""
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
    assert train(tmp_path, save_every=0, max_hours=1e-9) == code
    assert names(tmp_path) == ["last", "step_00000001"]
    assert "1e-09 hours" in capsys.readouterr().out.replace("\n", " ")


@pytest.fixture
def torchrun(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"}.items():
        monkeypatch.setenv(name, value)


def test_a_run_restarted_by_torchrun_resumes(torchrun, tmp_path):
    assert train(tmp_path) == 0
    RunDirectory(tmp_path / "logs/run").describe(pid=1)  # of the process before
    assert train(tmp_path, max_steps=10, overwrite=True) == 0
    assert steps_of_metrics(tmp_path) == list(range(1, 11)), "replaced or restarted"
    assert train(tmp_path, max_steps=3, overwrite=True) == 0
    assert steps_of_metrics(tmp_path) == [1, 2, 3], "the same process did not overwrite its own run"


def test_torchrun_does_not_resume_another_run(torchrun, run, capsys):
    assert_train_refused("run.exists", run, capsys, max_steps=10)
    assert steps_of_metrics(run) == list(range(1, 9))


def test_later_checkpoints_are_moved_aside(run):
    checkpoint = run / "logs/run/checkpoints/step_00000004"
    assert train(run, resume=checkpoint, max_steps=5, save_every=1, keep_last=2) == 0
    assert names(run) == ["aside_step_00000006", "aside_step_00000008", "last", "step_00000004", "step_00000005"]
    assert train(run, resume="auto", max_steps=7) == 0
    assert steps_of_metrics(run) == list(range(1, 8))


def test_checkpoints_moved_aside_are_not_overwritten(run, capsys):
    checkpoints = run / "logs/run/checkpoints"
    shutil.copytree(checkpoints / "step_00000008", checkpoints / "best")
    for best in ("aside_best", "aside_best_2"):
        assert train(run, resume=checkpoints / "step_00000004", max_steps=6) == 0
        assert f"kept as {best}" in capsys.readouterr().err
    kept = [f"aside_{name}" for name in ("best", "best_2", "step_00000006", "step_00000006_2", "step_00000008")]
    assert names(run) == [*kept, "best", "last", "step_00000004", "step_00000006"]
    verify(checkpoints / "aside_step_00000006_2")


def test_a_best_checkpoint_that_was_not_written_is_not_recorded(tmp_path, monkeypatch):
    """Whatever other saves succeed, and in a resumed run as well."""
    saves = Checkpoints(tmp_path, job_of(tmp_path).state, facts={}, notify=lambda _: None)
    position = Position(step=1, epoch=0, epoch_step=1, samples=20, seconds=1.0, best=0.5)
    with monkeypatch.context() as patched:
        patched.setattr("leanclip.checkpointing.checkpoint.shutil.copytree", lambda *_, **__: 1 / 0)
        saves.save(position, {}, best=True)
        saves.finish()
    assert saves.best_lost
    saves.save(replace(position, step=2), {})
    saved = saves.save(replace(position, step=3), {})
    saves.finish()
    assert saves.best_lost and json.loads((saved / "state.json").read_text())["position"]["best"] is None
    saves.save(replace(position, step=4), {}, best=True)
    saves.finish()
    assert not saves.best_lost and (tmp_path / "best").is_dir()


def test_files_of_a_running_save_are_not_removed(run):
    half = run / "logs/run/checkpoints/.step_00000010.tmp"
    half.mkdir()
    assert find_checkpoint(str(run / "logs/run"), run / "logs/other")[0] is not None
    assert half.is_dir()
    find_checkpoint("auto", run / "logs/run")
    assert half.is_dir()
    with RunDirectory(run / "logs/run").held():
        find_checkpoint("auto", run / "logs/run")
    assert not half.exists()


def test_a_start_temperature_has_no_effect_on_a_resumed_run(run, capsys):
    assert train(run, resume="auto", max_steps=9, tau=0.02) == 0
    assert "--tau 0.02 has no effect" in capsys.readouterr().out.replace("\n", " ")
    assert train(run, resume="auto", max_steps=10) == 0
    assert "--tau" not in capsys.readouterr().out


def test_a_resumed_run_uses_a_new_learning_rate(run):
    job = job_of(run, lr=1.0, lr_scheduler="const", resume="latest", max_steps=20)
    set_learning_rate(job.context.optimizer, 1.0, peak=1.0)
    towers = [group for group in job.context.optimizer.param_groups if group.get("follows_schedule", True)]
    assert {group["lr"] for group in towers} == {1.0}


@pytest.mark.parametrize("opt", ["lamb", "lion", "sgdm", "adamw"])
def test_every_optimizer_resumes_exactly(opt, tmp_path):
    one_run, two_runs = tmp_path / "one", tmp_path / "two"
    for folder in (one_run, two_runs):
        folder.mkdir()
    assert train(one_run, opt=opt, max_steps=6, lr=1e-3) == 0
    assert train(two_runs, opt=opt, max_steps=6, lr=1e-3, save_every=3, keep_last=0) == 0
    shutil.rmtree(two_runs / "logs/run/checkpoints/step_00000006")
    job = job_of(two_runs, opt=opt, lr=1e-3, max_steps=6, resume="latest")
    assert [name for name in job.state.tensors() if name.startswith("optimizer.")]
    equal(job.state.tensors(), saved_tensors(two_runs, 3))
    content = SavedRun.open(two_runs / "logs/run/checkpoints/step_00000003").content
    assert content["values"] == json.loads(json.dumps(job.state.values()))
    assert train(two_runs, opt=opt, max_steps=6, lr=1e-3, resume="auto") == 0
    equal(saved_tensors(two_runs, 6), saved_tensors(one_run, 6))


def test_a_run_does_not_resume_into_the_directory_of_another(run, capsys):
    assert train(run, name="other", max_steps=2) == 0
    assert_train_refused("run.other", run, capsys, name="other", resume=run / "logs/run")


def test_fp16_loss_scale_after_fp32_and_after_fp16(run):
    job = job_of(run, resume="latest", max_steps=20)  # an fp32 run
    job.state.scale.grows, job.state.scale.value = True, 2.0**16  # now fp16
    saved = SavedRun.open(run / "logs/run/checkpoints/step_00000008")
    saved.load(job.state, None, reset_loss=False)
    assert job.state.scale.value == 2.0**16
    saved.content["values"]["scale"] = {"value": 8.0, "good_steps": 3, "grows": True}
    saved.load(job.state, None, reset_loss=False)
    assert (job.state.scale.value, job.state.scale.good_steps) == (8.0, 3)


def test_bias_of_a_checkpoint_without_one(eight_steps, tmp_path):
    first = job_of(tmp_path, loss="siglip", pretrained=str(eight_steps / "logs/run"))
    assert first.config.loss.bias == -10.0
    assert train(tmp_path, loss="siglip", max_steps=3) == 0
    second = job_of(tmp_path, loss="siglip", pretrained=str(tmp_path / "logs/run"), name="second")
    assert second.config.loss.bias != -10.0 and second.config.loss.bias == pytest.approx(-10.0, abs=0.5)

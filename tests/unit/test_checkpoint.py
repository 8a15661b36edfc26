"""Checkpoints: what is kept, what goes on and what is refused."""

import json
import os
import shutil
import signal
from dataclasses import replace

import pytest
import torch
from checkpoint_runs import VALUES, arguments, job_of, leanclip, names, steps_of_metrics, train

from leanclip.checkpointing.checkpoint import Checkpoints, Position, load_tensors_of, tidy
from leanclip.checkpointing.resume import FREE, SAME, SavedRun, find_saved, settings
from leanclip.checkpointing.storage import verify
from leanclip.config import override
from leanclip.data.datasets import BUNDLED
from leanclip.errors import STOPPED
from leanclip.optim import set_learning_rate
from leanclip.runs import RunDirectory, TrainConfig
from leanclip.runs.stopping import Stopping
from leanclip.training import set_up


def test_the_newest_stay_and_every_so_many(tmp_path):
    assert train(tmp_path, keep_last=1, keep_every=4) == 0
    assert names(tmp_path) == ["last", "step_00000004", "step_00000008"]


def test_the_newest_three_stay_by_default(eight_steps):
    assert names(eight_steps) == ["last", "step_00000004", "step_00000006", "step_00000008"]
    for step in (4, 6, 8):
        verify(eight_steps / f"logs/run/checkpoints/step_{step:08d}")


def test_waiting_for_the_disk_is_told_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("leanclip.checkpointing.checkpoint.LONG_WAIT", -1.0)
    assert train(tmp_path) == 0
    assert capsys.readouterr().out.count("for the last checkpoint to be written") == 1


def test_a_short_run_saves_only_at_its_end(tmp_path):
    assert train(tmp_path, save_every=None) == 0
    assert names(tmp_path) == ["last", "step_00000008"]


def test_the_best_stays_beside_them(tmp_path):
    assert train(tmp_path, val_data=str(BUNDLED / "val-*.tar"), eval_every=3, keep_last=1, max_steps=7) == 0
    assert names(tmp_path) == ["best", "last", "step_00000007"]
    verify(tmp_path / "logs/run/checkpoints/best")


def test_auto_starts_goes_on_and_is_content_with_a_finished_run(run, tmp_path, capsys):
    logs = tmp_path / "other"
    assert train(run, resume="auto", logs=logs, max_steps=4) == 0  # starts
    assert train(run, resume="auto", logs=logs) == 0  # goes on
    assert "step 4 of 8" in capsys.readouterr().out.replace("\n", "")
    before = names(run)
    assert train(run, resume="auto") == 0
    assert "the run is finished" in capsys.readouterr().out
    assert names(run) == before


def test_auto_begins_anew_what_was_killed_before_its_first_checkpoint(run):
    shutil.rmtree(run / "logs/run/checkpoints")
    assert train(run, resume="auto", max_steps=3) == 0
    assert steps_of_metrics(run) == [1, 2, 3]


def test_what_was_put_aside_stays_however_often_it_begins_anew(run):
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


def test_latest_wants_a_checkpoint_and_a_name(tmp_path, capsys):
    assert train(tmp_path, resume="latest") == 2
    assert "no such run or checkpoint" in capsys.readouterr().err
    words = arguments(tmp_path, resume="auto")
    at = words.index("--name")
    assert leanclip(*words[:at], *words[at + 2 :]) == 2
    assert "give --name" in capsys.readouterr().err


def test_what_a_killed_run_left_is_tidied(run):
    checkpoints = run / "logs/run/checkpoints"
    (checkpoints / ".step_00000009.tmp").mkdir()
    (checkpoints / "step_00000008").rename(checkpoints / ".step_00000008.old")
    tidy(checkpoints)
    assert names(run) == ["last", "step_00000004", "step_00000006", "step_00000008"]


@pytest.mark.parametrize(
    ("changed", "said"),
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
def test_another_run_is_named(run, changed, said, capsys):
    assert train(run, resume="auto", **changed) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.strip().splitlines()) == 1, error


def test_other_settings_are_told_and_free_ones_are_not(run, capsys):
    assert train(run, resume="auto", epochs=4, max_steps=9, lr=0.02, workers=1, log_every=2, micro_batch=7) == 0
    said = capsys.readouterr().out.replace("\n", " ")
    assert "resumed with --lr 0.02, the run has 0.01" in said and "--max-steps 9" in said
    assert "--workers" not in said and "--log-every" not in said and "--micro-batch" not in said


def test_every_setting_that_is_sorted_exists():
    known = set(settings(TrainConfig()))
    assert set(SAME) <= known and set(FREE) <= known
    assert not set(SAME) & set(FREE)


def test_new_data_begin_the_tables_anew(run, capsys):
    before = load_tensors_of(run / "logs/run/checkpoints/step_00000008")
    other = {"train_data": str(BUNDLED / "train-*.tar"), "max_steps": 10}
    assert train(run, resume="auto", reset_loss_state=True, **other) == 0
    after = load_tensors_of(run / "logs/run/checkpoints/step_00000010")
    assert after["loss.state.log_u_image"].isfinite().sum() == 2 * 20  # what the two steps met
    assert len(after["loss.state.log_u_image"]) != len(before["loss.state.log_u_image"])
    tau, was = (found["loss.temperature_rule.log_inv_tau"] for found in (after, before))
    assert tau != was and torch.isclose(tau, was, atol=0.01)  # it went on
    assert after["optimizer.model.clip.text_projection.step"] == 10


def test_another_loss_may_take_over_with_fresh_tables(run):
    assert train(run, resume="auto", reset_loss_state=True, loss="infonce", max_steps=10) == 0
    assert train(run, resume="auto", loss="infonce", max_steps=11) == 0


def test_a_copied_checkpoint_knows_its_data(run, tmp_path, capsys):
    shutil.copytree(run / "logs/run/checkpoints/step_00000006", tmp_path / "copy")
    assert train(run, resume=tmp_path / "copy", name="other") == 0
    assert steps_of_metrics(run)[-1] == 8


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_a_run_after_its_step(number, tmp_path, monkeypatch, capsys):
    after = Stopping.after

    def send(self, step):
        if step == 3:
            os.kill(os.getpid(), number)
        return after(self, step)

    monkeypatch.setattr(Stopping, "after", send)
    handler = signal.getsignal(number)
    assert train(tmp_path, save_every=0) == STOPPED
    assert signal.getsignal(number) == handler
    assert f"since {signal.Signals(number).name} came" in capsys.readouterr().out.replace("\n", " ")
    assert names(tmp_path) == ["last", "step_00000003"]
    assert json.loads((tmp_path / "logs/run/run.json").read_text())["status"] == "stopped"
    monkeypatch.setattr(Stopping, "after", after)
    assert train(tmp_path, save_every=0, resume="auto") == 0
    assert steps_of_metrics(tmp_path) == list(range(1, 9))


def test_max_hours_end_a_run(tmp_path, capsys):
    assert train(tmp_path, save_every=0, max_hours=1e-9) == STOPPED
    assert names(tmp_path) == ["last", "step_00000001"]
    assert "1e-09 hours are over" in capsys.readouterr().out.replace("\n", " ")


def test_under_a_torchrun_that_restarts_the_code_is_success(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    assert train(tmp_path, save_every=0, max_hours=1e-9) == 0


def under_torchrun(monkeypatch, restarts):
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "TORCHELASTIC_RESTART_COUNT": restarts}.items():
        monkeypatch.setenv(name, str(value))


def test_restarted_by_torchrun_a_run_goes_on(tmp_path, monkeypatch):
    under_torchrun(monkeypatch, restarts=0)
    assert train(tmp_path) == 0
    under_torchrun(monkeypatch, restarts=1)
    assert train(tmp_path, max_steps=10, overwrite=True) == 0
    assert steps_of_metrics(tmp_path) == list(range(1, 11)), "neither replaced nor begun anew"


def test_restarted_by_torchrun_another_run_is_left_alone(run, monkeypatch, capsys):
    under_torchrun(monkeypatch, restarts=1)
    assert train(run, max_steps=10) == 2
    assert "exists; give another --name" in capsys.readouterr().err
    assert steps_of_metrics(run) == list(range(1, 9))


def test_going_back_to_an_earlier_checkpoint_starts_another_future(run):
    checkpoint = run / "logs/run/checkpoints/step_00000004"
    assert train(run, resume=checkpoint, max_steps=5, save_every=1, keep_last=2) == 0
    assert names(run) == ["aside_step_00000006", "aside_step_00000008", "last", "step_00000004", "step_00000005"]
    assert train(run, resume="auto", max_steps=7) == 0
    assert steps_of_metrics(run) == list(range(1, 8))


def test_nothing_that_was_set_aside_is_lost(run, capsys):
    checkpoints = run / "logs/run/checkpoints"
    shutil.copytree(checkpoints / "step_00000008", checkpoints / "best")
    for best in ("aside_best", "aside_best_2"):
        assert train(run, resume=checkpoints / "step_00000004", max_steps=6) == 0
        assert f"kept as {best}" in capsys.readouterr().err
    kept = [f"aside_{name}" for name in ("best", "best_2", "step_00000006", "step_00000006_2", "step_00000008")]
    assert names(run) == [*kept, "best", "last", "step_00000004", "step_00000006"]
    verify(checkpoints / "aside_step_00000006_2")


def test_a_best_that_could_not_be_written_stays_lost_until_one_is(tmp_path, monkeypatch):
    """However many other saves succeed, and in a resumed run as well."""
    saves = Checkpoints(tmp_path, job_of(tmp_path).state, facts={}, tell=lambda _: None)
    position = Position(step=1, epoch=0, epoch_step=1, samples=20, seconds=1.0, best=0.5)
    with monkeypatch.context() as patched:
        patched.setattr("leanclip.checkpointing.checkpoint._copy_model", lambda *_: 1 / 0)
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


def test_what_another_run_is_writing_is_left_alone(run):
    half = run / "logs/run/checkpoints/.step_00000010.tmp"
    half.mkdir()
    assert find_saved(str(run / "logs/run"), run / "logs/other")[0] is not None
    assert half.is_dir()
    find_saved("auto", run / "logs/run")
    assert half.is_dir()
    with RunDirectory(run / "logs/run").held():
        find_saved("auto", run / "logs/run")
    assert not half.exists()


def test_a_temperature_that_is_not_taken_is_said_to_be(run, capsys):
    assert train(run, resume="auto", max_steps=9, tau=0.02) == 0
    assert "--tau 0.02 has no effect: a resumed run goes on with its own" in capsys.readouterr().out.replace(
        "\n", " "
    )
    assert train(run, resume="auto", max_steps=10) == 0
    assert "--tau" not in capsys.readouterr().out


def test_another_learning_rate_is_really_used(run):
    values = VALUES | {"lr": 1.0, "lr_scheduler": "const", "model": str(run / "tiny.json"), "logs": str(run / "logs")}
    job = set_up(override(TrainConfig(), values | {"resume": "latest", "max_steps": 20}, "test"))
    set_learning_rate(job.context.optimizer, 1.0, peak=1.0)
    towers = [group for group in job.context.optimizer.param_groups if group.get("follows_schedule", True)]
    assert {group["lr"] for group in towers} == {1.0}


@pytest.mark.parametrize("opt", ["lamb", "lion", "sgdm", "adamw"])
def test_every_optimizer_resumes_exactly(opt, tmp_path):
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    assert train(tmp_path / "whole", opt=opt, max_steps=6, lr=1e-3) == 0
    assert train(tmp_path / "parts", opt=opt, max_steps=6, lr=1e-3, save_every=3, keep_last=0) == 0
    shutil.rmtree(tmp_path / "parts/logs/run/checkpoints/step_00000006")
    assert train(tmp_path / "parts", opt=opt, max_steps=6, lr=1e-3, resume="auto") == 0
    whole, parts = (
        load_tensors_of(tmp_path / each / "logs/run/checkpoints/step_00000006") for each in ("whole", "parts")
    )
    for name, value in whole.items():
        assert torch.equal(value, parts[name]), name


def test_a_checkpoint_of_one_run_does_not_go_into_another(run, capsys):
    assert train(run, name="other", max_steps=2) == 0
    assert train(run, name="other", resume=run / "logs/run") == 2
    assert "is another run than the one to go on from" in capsys.readouterr().err


def test_the_tables_are_reset_once(run):
    other = {"train_data": str(BUNDLED / "train-*.tar"), "resume": "auto", "reset_loss_state": True}
    assert train(run, max_steps=10, **other) == 0
    assert train(run, max_steps=11, **other) == 0
    after = load_tensors_of(run / "logs/run/checkpoints/step_00000011")
    assert after["loss.state.visited"] == 3 * 20
    assert train(run, max_steps=12, **other) == 0
    assert train(run, max_steps=13, **other | {"reset_loss_state": False}) == 0  # as torchrun starts it again
    assert train(run, max_steps=14, **other) == 0
    after = load_tensors_of(run / "logs/run/checkpoints/step_00000014")
    assert after["loss.state.visited"] == 6 * 20


@pytest.mark.parametrize("opt", ["lamb", "lion", "sgdm", "adamw"])
def test_the_optimizers_state_comes_back(opt, tmp_path):
    assert train(tmp_path, opt=opt, max_steps=4, lr=1e-3) == 0
    values = VALUES | {"opt": opt, "lr": 1e-3, "model": str(tmp_path / "tiny.json"), "logs": str(tmp_path / "logs")}
    job = set_up(override(TrainConfig(), values | {"resume": "latest"}, "test"))
    saved = load_tensors_of(tmp_path / "logs/run/checkpoints/step_00000004")
    found = job.state.tensors()
    assert {name for name in found if name.startswith("optimizer.")}
    assert found.keys() == saved.keys()
    for name, value in saved.items():
        assert torch.equal(found[name], value), name
    content = SavedRun.open(tmp_path / "logs/run/checkpoints/step_00000004").content
    assert content["values"] == json.loads(json.dumps(job.state.values()))


def test_fp16_begins_with_its_own_scale_and_goes_on_with_it(run):
    job = job_of(run, resume="latest", max_steps=20)  # a run of fp32
    job.state.scale.grows, job.state.scale.value = True, 2.0**16  # that is fp16 from now on
    saved = SavedRun.open(run / "logs/run/checkpoints/step_00000008")
    saved.load(job.state, None, reset_loss=False)
    assert job.state.scale.value == 2.0**16
    saved.content["values"]["scale"] = {"value": 8.0, "good_steps": 3, "grows": True}
    saved.load(job.state, None, reset_loss=False)
    assert (job.state.scale.value, job.state.scale.good_steps) == (8.0, 3)


def test_a_bias_that_a_checkpoint_does_not_have_is_not_zero(eight_steps, tmp_path):
    began = job_of(tmp_path, loss="siglip", pretrained=str(eight_steps / "logs/run"))
    assert began.config.loss.bias == -10.0
    assert train(tmp_path, loss="siglip", max_steps=3) == 0
    again = job_of(tmp_path, loss="siglip", pretrained=str(tmp_path / "logs/run"), name="again")
    assert again.config.loss.bias != -10.0 and again.config.loss.bias == pytest.approx(-10.0, abs=0.5)

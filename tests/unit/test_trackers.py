"""Trackers besides metrics.jsonl, and the per-sample histograms."""

import importlib
import json
import shutil
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
from histograms_worker import filled_loss, histograms
from ranks_job import run_ranks

import leanclip
from leanclip.runs.config import RunConfig, tracker_names
from leanclip.runs.histograms import state_histograms
from leanclip.runs.trackers import check_trackers
from refusal import exit_code, refusal_code, refuses
from run_records import records

FEW = ["--batch-size", "64", "--log-every", "1", "--eval-every", "0", "--workers", "0", "--warmup", "1"]


def train(logs, name, *arguments):
    assert exit_code("train", "--recipe", "demo", "--logs", logs, "--name", name, *arguments) == 0
    return logs / name


def rows(run, kind):
    lines = records(run)
    return [row for row in lines if row["kind"] == kind]


@pytest.mark.parametrize(
    ("report_to", "names"),
    [
        ("tensorboard", ("tensorboard",)),
        ("wandb,tensorboard", ("tensorboard", "wandb")),
        ("tensorboard, wandb", ("tensorboard", "wandb")),
        ("all", ("tensorboard", "wandb")),
        ("", ()),
        ("none", ()),
        ("jsonl", ()),
    ],
)
def test_report_to_is_spelled_as_in_openclip(report_to, names):
    assert tracker_names(report_to) == names


def test_an_unknown_tracker_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'comet'; choose from tensorboard, wandb, all, none"):
        RunConfig(report_to="wandb,comet")


def test_a_missing_wandb_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    check_trackers("tensorboard")
    with refuses("trackers.not_installed", "leanclip[wandb]"):
        check_trackers("all")


def test_metrics_are_written_without_trackers(tmp_path):
    run = train(tmp_path, "run", *FEW, "--max-steps", "2", "--report-to", "none")
    assert not (run / "tensorboard").exists() and not (run / "wandb").exists()
    assert [row["step"] for row in rows(run, "train")] == [1, 2]
    if sys.platform == "linux":
        assert all(0.1 < row["resident_gib"] < 64 for row in rows(run, "train"))


def test_tensorboard_shows_the_same_numbers_after_a_resume(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = train(tmp_path, "run", *FEW, "--max-steps", "4", "--save-every", "2", "--loss", "fastclip-v2")
    shutil.rmtree(run / "checkpoints" / "step_00000004")
    train(tmp_path, "run", *FEW, "--max-steps", "4", "--loss", "fastclip-v2", "--resume", "latest")
    shown = EventAccumulator(str(run / "tensorboard"), size_guidance={"histograms": 0, "scalars": 0}).Reload()
    losses = {event.step: event.value for event in shown.Scalars("train/loss")}
    assert losses == pytest.approx({row["step"]: row["loss"] for row in rows(run, "train")}, rel=1e-6)
    assert list(losses) == [1, 2, 3, 4], "step 2, the checkpoint's own, is kept"
    drawn = shown.Histograms("state/tau_image")[-1].histogram_value
    written = rows(run, "histogram")[-2]
    assert written["name"] == "tau_image"
    assert drawn.num == sum(written["counts"]) and list(drawn.bucket)[: len(written["counts"])] == written["counts"]


def wandb_records(path: Path):
    """The records of an offline run: protobuf messages in LevelDB's log format, 32 KiB blocks after a 7-byte head."""
    messages: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    data, at, parts = path.read_bytes(), 7, []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts.append(data[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield messages.Record.FromString(b"".join(parts))
            parts = []


def wandb_history(path: Path):
    history = []
    for record in wandb_records(path):
        if record.WhichOneof("record_type") == "history":
            row: dict[str, Any] = {}
            for item in record.history.item:
                *outer, name = [item.key] if item.key else item.nested_key
                place = row
                for key in outer:
                    place = place.setdefault(key, {})
                place[name] = json.loads(item.value_json)
            history.append(row)
    return history


@pytest.fixture
def fresh_wandb():
    """wandb reads its environment once per process."""
    import wandb

    wandb.teardown()
    yield
    wandb.teardown()


def without_login(home, monkeypatch):
    monkeypatch.setenv("HOME", str(home))
    for name in ("WANDB_MODE", "WANDB_API_KEY", "NETRC", "WANDB_CONFIG_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("fresh_wandb")
def test_wandb_offline_continues_the_same_run_after_a_resume(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "offline")
    arguments = [*FEW, "--loss", "fastclip-v3", "--report-to", "wandb", "--wandb-project-name", "images"]
    run = train(tmp_path, "run", *arguments, "--max-steps", "3", "--save-every", "2")
    identity = json.loads((run / "run.json").read_text())["wandb_id"]
    output = capsys.readouterr()
    assert "wandb sync" in output.out and "wandb" not in output.err
    shutil.rmtree(run / "checkpoints" / "step_00000003")
    import wandb

    wandb.teardown()
    without_login(tmp_path, monkeypatch)
    train(tmp_path, "run", *arguments, "--max-steps", "3", "--resume", "latest")
    assert json.loads((run / "run.json").read_text())["wandb_id"] == identity
    wandb.teardown()  # the file is complete when wandb's process ends, not when finish returns

    first, second = sorted(run.glob("wandb/offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime)
    assert first.name == second.name == f"run-{identity}.wandb"
    started = next(r.run for r in wandb_records(second) if r.WhichOneof("record_type") == "run")
    assert (started.run_id, started.project, started.display_name) == (identity, "images", "run")
    history = wandb_history(second)
    losses = {row["step"]: row["train/loss"] for row in history if "train/loss" in row}
    assert losses == {row["step"]: row["loss"] for row in rows(run, "train") if row["step"] > 2}
    assert [row["step"] for row in history if "val/text_to_image_recall@10" in row] == [3]
    (estimates,) = [row["state/log_u_image"] for row in history if "state/log_u_image" in row]
    assert estimates["_type"] == "histogram" and sum(estimates["values"]) == 3 * 64
    assert not (run / "tensorboard").exists()


@pytest.mark.usefixtures("fresh_wandb")
def test_a_wandb_that_does_not_start_is_reported_on_one_line(tmp_path, monkeypatch, capsys):
    without_login(tmp_path, monkeypatch)
    monkeypatch.setenv("WANDB_MODE", "online")
    few = [*FEW, "--max-steps", "2"]
    assert (
        exit_code("train", "--recipe", "demo", "--logs", tmp_path, "--name", "run", *few, "--report-to", "wandb") != 0
    )
    error = capsys.readouterr().err.strip()
    assert refusal_code(error) == "trackers.wandb" and "\n" not in error
    assert not (tmp_path / "run").exists()
    train(tmp_path, "run", *few)  # nothing blocks the corrected command


def test_histograms_count_every_sample_once():
    by_name = {histogram.name: histogram for histogram in state_histograms(filled_loss())}
    assert list(by_name) == ["log_u_image", "log_u_text", "tau_image", "tau_text"]
    image = by_name["log_u_image"]
    for value in range(7):
        at = next(i for i, edge in enumerate(image.edges[1:]) if -value < edge)
        assert image.counts[at] == 1 and image.edges[at] <= -value
    assert sum(image.counts) == 7 and image.absent == 3
    assert by_name["log_u_text"].counts[0] == 7, "values beyond the edges"
    tau = by_name["tau_image"]
    assert tau.edges[0] == 0.01 and tau.edges[-1] == 1.0 and tau.counts[0] == 1 and sum(tau.counts) == 10


def test_losses_without_tables_have_no_histograms():
    assert state_histograms(leanclip.create_loss("infonce")) == []
    assert [h.name for h in state_histograms(filled_loss("fastclip-v3"))] == ["log_u_image", "log_u_text"]


def test_ranks_count_what_one_process_counts(tmp_path):
    expected = histograms(None, tmp_path)
    assert run_ranks(histograms, 3, tmp_path) == [expected] * 3

"""Resuming runs that OpenCLIP started."""

import json
import math
import shlex
import subprocess
import sys
from dataclasses import replace

import open_clip
import pytest
import torch
from open_clip.loss import ClipLoss
from test_openclip_flags import VIT

from leanclip.checkpointing.openclip import OpenClipCheckpoint
from leanclip.cli.openclip_flags import from_openclip
from leanclip.cli.train import parse_command
from leanclip.data.datasets import BUNDLED
from leanclip.models import with_temperature
from leanclip.optim import scheduled, set_learning_rate
from leanclip.optim.loss_scale import LossScale
from leanclip.training import set_up
from leanclip.training.step import training_step
from refusal import assert_refused, exit_code, refusal, refuses
from run_records import records

DATA = str(BUNDLED / "train-000000.tar")
# pandas is only for OpenCLIP's tables, and this run has none.
OPENCLIP = """
import sys, types, warnings
warnings.simplefilter("ignore")
import torch, open_clip, torch._dynamo
sys.modules.setdefault("pandas", types.ModuleType("pandas"))
torch.set_num_threads(1)
open_clip.add_model_config(sys.argv[1])
from open_clip_train.main import main
main(sys.argv[2:])
"""
COMMON = (
    "--model MODEL --batch-size 32 --lr 1e-3 --wd 0.1 --warmup 4 --workers 0 --device cpu --precision fp32 --seed 0"
)


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """Two epochs of OpenCLIP's own training, on a fifth of the bundled images; "vit" decides its betas."""
    folder = tmp_path_factory.mktemp("openclip")
    (folder / "tiny-vit.json").write_text(json.dumps(VIT))
    line = (
        COMMON.replace("MODEL", "tiny-vit")
        + f" --train-data {DATA} --dataset-type webdataset --train-num-samples 384"
    )
    line += f" --epochs 2 --logs {folder} --name begun --save-frequency 1"
    done = subprocess.run(
        [sys.executable, "-c", OPENCLIP, str(folder / "tiny-vit.json"), *shlex.split(line)],
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


def command(begun, tmp_path, *more):
    line = COMMON.replace("MODEL", str(begun / "tiny-vit.json")) + f" --train-data {DATA} --logs {tmp_path} --name on"
    return ["train", *shlex.split(line), "--resume", str(begun / "begun/checkpoints/epoch_2.pt"), *more]


def set_up_job(begun, tmp_path, *more):
    words, _ = from_openclip(command(begun, tmp_path, *more)[1:])
    return set_up(replace_device(parse_command(words).settings))


def replace_device(settings):
    return replace(settings, run=replace(settings.run, device="cpu"))


def openclip_optimizer(model, saved):
    """As OpenCLIP's main makes it."""
    spared = [p for n, p in model.named_parameters() if p.ndim < 2 or any(s in n for s in ("bn", "ln", "bias"))]
    others = [p for p in model.parameters() if not any(p is q for q in spared)]
    groups = [{"params": spared, "weight_decay": 0.0}, {"params": others, "weight_decay": 0.1}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.98), eps=1e-6)
    optimizer.load_state_dict(saved["optimizer"])
    return optimizer


def test_the_next_step_equals_openclips(begun, tmp_path):
    """The same batch, from the same file, through OpenCLIP's own model, loss and optimizer."""
    job = set_up_job(begun, tmp_path, "--loss", "infonce", "--epochs", "4")
    per_epoch = job.loader.steps_per_epoch
    assert (job.position.epoch, job.position.step, job.steps) == (2, 2 * per_epoch, 4 * per_epoch)
    batch = next(job.loader.epoch(job.position.epoch))
    lr = scheduled(job.config.optim, job.position.step, steps=job.steps, steps_per_epoch=per_epoch)

    saved = torch.load(begun / "begun/checkpoints/epoch_2.pt", weights_only=True)
    open_clip.add_model_config(begun / "tiny-vit.json")
    theirs = open_clip.create_model("tiny-vit", output_dict=True)
    theirs.load_state_dict(saved["state_dict"])
    optimizer = openclip_optimizer(theirs, saved)
    for group in optimizer.param_groups:
        group["lr"] = lr
    ClipLoss()(**theirs(job.model.normalised(batch.images), batch.tokens)).backward()
    optimizer.step()

    job.model.train()
    set_learning_rate(job.context.optimizer, lr, peak=1e-3)
    training_step(job.context, batch)
    ours = with_temperature(job.model.clip.state_dict(), job.context.loss.temperature(), None)
    for name, value in theirs.state_dict().items():
        assert torch.allclose(ours[name], value, atol=2e-6, rtol=1e-5), name
    moved = {name for name, value in saved["state_dict"].items() if not torch.equal(value, ours[name])}
    assert len(moved) > 0.9 * len(ours) and "logit_scale" in moved


def test_a_run_resumes_and_reports_what_it_loaded(begun, tmp_path, capsys):
    few = ["--epochs", "3", "--max-steps", "120", "--log-every", "2", "--eval-every", "0"]
    code = exit_code(*command(begun, tmp_path, *few))
    captured = capsys.readouterr()
    assert code == 0, captured.err
    shown = " ".join(captured.out.split())
    assert "the weights after epoch 2, the temperature, AdamW's state of 73 of 74 parameters" in shown
    assert "fastclip-v3 starts with new per-sample state" in shown
    steps = [line["step"] for line in records(tmp_path / "on", "train")]
    assert steps == [116, 118, 120]  # two epochs of 57 were done
    # From here on it is a run like any other.
    again = ["--name", "on", "--resume", "latest", "--max-steps", "122", "--device", "cpu"]
    assert exit_code("train", "--config", tmp_path / "on/config.toml", *again) == 0


def test_a_file_saved_by_several_processes_and_with_a_loss_scale(begun, tmp_path):
    saved = torch.load(begun / "begun/checkpoints/epoch_2.pt", weights_only=True)
    saved["state_dict"] = {f"module.{name}": value for name, value in saved["state_dict"].items()}
    saved["state_dict"]["module.logit_scale"] = torch.tensor(3.5)
    saved["scaler"] = {"scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000,
                       "_growth_tracker": 17}  # fmt: skip
    torch.save(saved, tmp_path / "epoch_2.pt")
    more = ["--resume", str(tmp_path / "epoch_2.pt"), "--loss", "infonce", "--precision", "amp"]
    job = set_up_job(begun, tmp_path, *more)
    assert (job.context.scale.value, job.context.scale.good_steps) == (1024.0, 17)
    assert "74 of 74 parameters, the loss scale" in " ".join(job.notes)
    assert float(job.context.loss.temperature().log()) == pytest.approx(-3.5)
    assert torch.equal(job.model.clip.ln_final.weight, saved["state_dict"]["module.ln_final.weight"])


def test_optimizer_state_that_does_not_fit_is_reported(begun, tmp_path):
    locked = set_up_job(begun, tmp_path, "--lock-text", "--loss", "infonce")
    assert "not the optimizer's state, which does not fit" in " ".join(locked.notes)
    assert locked.context.optimizer.state_dict()["state"] == {}
    other = set_up_job(begun, tmp_path, "--opt", "lamb", "--loss", "infonce")
    assert "does not fit" in " ".join(other.notes)


@pytest.mark.parametrize("epoch", [-1, True, 10**400, 2.0, "2", None])
def test_an_impossible_epoch_is_refused(epoch, tmp_path):
    torch.save({"epoch": epoch, "state_dict": {}}, tmp_path / "epoch.pt")
    with refuses("resume.weights_only"):
        OpenClipCheckpoint.read(tmp_path / "epoch.pt")


def test_odd_values_of_optimizer_and_scaler_do_not_end_in_a_traceback(begun, tmp_path):
    saved = torch.load(begun / "begun/checkpoints/epoch_2.pt", weights_only=True)
    job = set_up_job(begun, tmp_path, "--loss", "infonce", "--epochs", "4")
    scale, groups = LossScale(2.0, grows=True), saved["optimizer"]["param_groups"]
    one = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(1), "exp_avg_sq": torch.zeros(1)}
    odd = [5, "x", [], {}, {"param_groups": 3}, {"param_groups": [1, 2]}, {"param_groups": groups, "state": 3},
           {"param_groups": groups, "state": {0: 7}}, {"param_groups": groups, "state": {0: {"step": 1}}},
           {"param_groups": groups, "state": {0: one}}]  # fmt: skip
    for optimizer in odd:
        for scaler in (5, {"scale": "x"}, {"scale": math.nan, "_growth_tracker": 0}, {"scale": 4.0}):
            file = OpenClipCheckpoint(tmp_path, 2, optimizer, scaler)
            shown = file.restore(job.model, job.context.loss, job.context.optimizer, scale)
            assert "does not fit" in shown and "loss scale" not in shown and scale.value == 2.0


def test_runs_that_cannot_resume_are_refused(begun, tmp_path, capsys):
    assert "raise --epochs" in refusal(command(begun, tmp_path, "--epochs", "2"), capsys)
    saved = torch.load(begun / "begun/checkpoints/epoch_2.pt", weights_only=True)
    torch.save(saved["state_dict"], tmp_path / "bare.pt")
    (tmp_path / "junk.pt").write_text("junk")
    for name, code in (("bare.pt", "resume.weights_only"), ("junk.pt", "resume.not_openclip")):
        assert_refused(code, command(begun, tmp_path, "--resume", str(tmp_path / name)), capsys, name)
    assert "does not hold weights of RN50" in refusal(command(begun, tmp_path, "--model", "RN50"), capsys)

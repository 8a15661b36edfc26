"""OpenCLIP's command lines: every flag has an answer, and lines from its documentation run."""

import argparse
import csv
import json
import re
import shlex
from pathlib import Path

import pytest
from data_forms import bundled, make_csv
from open_clip_train import params
from shard_files import write_shard

from leanclip.cli.openclip_flags import BY_NAME, FLAGS, OURS, RULES, TABLE, from_openclip
from leanclip.cli.train import parse_command
from leanclip.data.datasets import BUNDLED
from leanclip.models import ModelConfig, create_model
from leanclip.optim import OptimConfig, scheduled
from leanclip.runs.defaults import fill, total_steps
from refusal import assert_refused, exit_code
from run_records import records

ROOT = Path(__file__).parents[2]


def openclip_actions(monkeypatch):
    """The flags of open_clip_train, as its own parser has them."""
    found = []

    def parse(self, _):
        found.append(self)
        raise StopIteration

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    with pytest.raises(StopIteration):
        params.parse_args([])
    return [action for action in found[0]._actions if action.dest != "help"]


def settings(line):
    words, notes = from_openclip(shlex.split(line))
    return parse_command(words).settings, " / ".join(notes)


def test_the_table_has_every_flag_of_openclip(monkeypatch):
    actions = openclip_actions(monkeypatch)
    assert [flag.name for flag in FLAGS] == [action.option_strings[0].removeprefix("--") for action in actions]
    takes_value = {action.option_strings[0].removeprefix("--"): action.nargs != 0 for action in actions}
    assert [flag.name for flag in FLAGS if flag.takes_value != takes_value[flag.name] and flag.name not in OURS] == []
    assert all(flag.text for flag in FLAGS) and RULES.keys() <= BY_NAME.keys()


def test_honoured_flags_are_those_that_leanclip_has():
    """A flag that leanclip gets later must change its row."""
    for flag in FLAGS:
        if flag.status == "honoured":
            assert flag.name in OURS, flag.name
        elif flag.name != "eps":  # which means something else here
            assert flag.name not in OURS, flag.name


def test_the_documentation_has_the_same_table():
    assert TABLE in (ROOT / "docs" / "from-openclip.md").read_text(), "paste src/leanclip/cli/openclip_flags.md"


def test_honoured_and_translated_values_arrive():
    config, notes = settings(
        "--train-data x.tar --train_data_upsampling_factors=2 --batch-size 32 --accum-freq 4 --precision pure_bf16 "
        "--siglip --log-every-n-steps 7 --opt timm/lamb --eps 1e-7 --beta2=0.95 --lr-scheduler const-cooldown "
        "--epochs-cooldown 2 --lr-cooldown-end 1e-6 --lr-cooldown-power 2 --save-frequency 2 --val-frequency 0 "
        "--force-image-size 64 64 --image-mean 0.5 --image-std 0.2 0.3 0.4 --image-resize-mode squash "
        "--lock-image --lock-image-unlocked-groups 2 --force-patch-dropout 0.5 --force-context-length 16 "
        "--aug-cfg scale='(0.4, 1.0)' color_jitter='(0.32, 0.32, 0.32, 0.08)' color_jitter_prob=0.8 "
        "gray_scale_prob=0.2 --grad-checkpointing --local-loss --gather-with-grad --pretrained '' --lr 1e-3 --lr 2e-3"
    )
    expected = {
        "batch_size": 128, "micro_batch": 32, "precision": "amp_bf16", "loss": "siglip", "log_every": 7,
        "opt": "lamb", "eps_opt": 1e-7, "beta2": 0.95, "lr": 2e-3, "lr_scheduler": "const-cooldown",
        "epochs_cooldown": 2, "lr_floor": 1e-6, "lr_cooldown_power": 2.0, "save_frequency": 2, "val_frequency": 0,
        "eps": None, "force_image_size": 64, "force_patch_dropout": 0.5, "force_context_length": 16,
        "lock_image": True, "lock_image_unlocked_groups": 2, "pretrained": None, "aug_scale": (0.4, 1.0),
        "aug_color_jitter": (0.32, 0.32, 0.32, 0.08), "aug_color_jitter_prob": 0.8, "aug_gray_scale_prob": 0.2,
        "grad_checkpointing": True,
    }  # fmt: skip
    values = config.values()
    assert {name: values.get(name) for name in expected} == expected
    assert config.model.preprocess == {"mean": (0.5,) * 3, "std": (0.2, 0.3, 0.4), "resize_mode": "squash"}
    for note in ("--accum-freq becomes --batch-size 128", "--accum-freq becomes --micro-batch 32",
                 "--siglip becomes --loss siglip", "--eps becomes --eps-opt 1e-7",
                 "--log-every-n-steps becomes --log-every 7",
                 "for OpenCLIP's add --model RN50", "--local-loss is ignored"):  # fmt: skip
        assert note in notes
    assert "--loss infonce" not in notes


def test_a_line_of_leanclip_is_unchanged():
    words = shlex.split("--recipe demo --eps 1e-6 --loss=fastclip-v3 --lr 1 --lr 2 --name -x")
    assert from_openclip(words) == (words, [])
    assert settings("--eps 1e-6 --loss fastclip-v3")[0].loss.eps == 1e-6
    assert settings("--eps 1e-6 --loss infonce")[0].optim.eps_opt == 1e-6  # it has no eps of its own


def test_the_flags_of_the_note_on_defaults_are_accepted(tmp_path, capsys):
    """Also by a short run, which refuses OpenCLIP's warm-up."""
    words = ["train", "--train-data", str(BUNDLED / "val-*.tar"), "--dataset-type", "webdataset", "--dry-run"]
    words += ["--model", "leanclip-tiny", "--batch-size", "8", "--logs", str(tmp_path), "--name", "run"]
    assert exit_code(*words) == 0
    said = " ".join(" ".join(capsys.readouterr()).split())
    (listed,) = re.findall("for OpenCLIP's add (.*) and, in a run of more steps, --warmup 10000", said)
    assert "--lr 5e-4" in listed and exit_code(*words, *listed.split()) == 0


def test_data_in_openclip_notation():
    config, notes = settings(
        "--train-data 'pipe:aws s3 cp s3://b/cc3m/{00000..00329}.tar -::/data/x.tar' "
        "--val-data 'pipe:cat gs://b/v.tar' --dataset-type webdataset --train-num-samples 4e8"
    )
    assert config.data.train_data == "s3://b/cc3m/{00000..00329}.tar::/data/x.tar"
    assert config.data.val_data == "gs://b/v.tar" and config.data.train_num_samples == 400_000_000
    assert "--val-data becomes --val-data gs://b/v.tar" in notes
    assert settings("--dataset-type synthetic --train-num-samples 64")[0].data.train_data == "synthetic:64"


def test_a_run_with_replacement_keeps_its_length(monkeypatch):
    line = "--train-data x.tar --dataset-resampled --train-num-samples 1000 --batch-size 10 --epochs 3"
    config = settings(line)[0]
    assert config.run.max_steps == 300
    filled = fill(config, samples=25)  # epochs of two steps
    assert total_steps(filled, samples=25, batch=10) == 300
    assert settings(f"{line} --accum-freq 5")[0].run.max_steps == 60
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert settings(line)[0].run.max_steps == 75


def test_latest_starts_a_run_that_has_no_checkpoint(tmp_path):
    line = f"--train-data x.tar --dataset-type webdataset --resume latest --logs {tmp_path} --name run"
    config, notes = settings(line)
    assert config.run.resume == "auto" and "--resume becomes --resume auto" in notes
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    for name in ("epoch_9.pt", "epoch_10.pt"):
        (checkpoints / name).touch()
    assert settings(line)[0].run.resume == str(checkpoints / "epoch_10.pt")
    (checkpoints / "step_00000001").mkdir()
    assert settings(line)[0].run.resume == "auto"
    assert settings(f"{line} --delete-previous-checkpoint")[0].run.keep_last == 1


@pytest.mark.parametrize("flag", [flag for flag in FLAGS if flag.status == "refused"], ids=lambda flag: flag.name)
def test_refused_flags_name_the_reason(flag, capsys):
    arguments = ["train", "--train-data", "x.tar", f"--{flag.name}", *["1"] * flag.takes_value]
    assert_refused("openclip.refused", arguments, capsys, f"--{flag.name} ", flag.text)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("--train-data x --aug-cfg re_prob=0.2", "openclip.bad_value"),
        ("--train-data x --aug-cfg scale", "openclip.bad_value"),
        ("--train-data 'pipe:cat x.tar'", "openclip.bad_value"),
        ("--train-data x.tar --accum-freq many", "openclip.bad_value"),
        ("--train-data x.tar --local-loss yes", "openclip.bad_value"),
        ("--train-data x.tar --force-image-size 32 64", "openclip.bad_value"),
        ("--train-data x.tar --logs none --debug", "openclip.bad_value"),
        ("--val-data v.csv --model RN101 --pretrained epoch_3.pt", "openclip.evaluation_only"),
        ("--train-data x.tar --lr-scheduler const-cooldown", "config.bad_value"),
        ("--train-data x.tar --save-frequency 1 --save-every 5", "config.bad_value"),
        ("--train-data 0.tar 1.tar", "cli.unexpected_argument"),  # a pattern without quotes
        ("--train-data x.tar --val-data 0.tar 1.tar", "cli.unexpected_argument"),
        ("--train-data x.tar --precision amp bf16", "cli.unexpected_argument"),
    ],
)
def test_bad_values_are_refused(line, code, capsys):
    assert_refused(code, ["train", *shlex.split(line)], capsys)


def test_frequencies_are_epochs():
    config = fill(settings("--save-frequency 2 --val-frequency 1 --batch-size 10 --epochs 4")[0], samples=105)
    assert (config.run.save_every, config.run.eval_every, config.run.save_frequency) == (20, 10, None)
    config = fill(settings("--save-frequency 0 --val-frequency 0 --batch-size 10 --epochs 4")[0], samples=105)
    assert (config.run.save_every, config.run.eval_every) == (0, 0)


@pytest.mark.parametrize("name", ["cosine", "const", "const-cooldown"])
def test_schedules_equal_openclip(name):
    from open_clip_train import scheduler

    class Optimizer:
        param_groups = [{}]  # noqa: RUF012

    steps, warmup, per_epoch = 50, 7, 10
    theirs = {
        "cosine": scheduler.cosine_lr(Optimizer, 0.3, warmup, steps),
        "const": scheduler.const_lr(Optimizer, 0.3, warmup, steps),
        "const-cooldown": scheduler.const_lr_cooldown(Optimizer, 0.3, warmup, steps, 2 * per_epoch, 1.5, 0.01),
    }[name]
    cooldown = {"lr_floor": 0.01, "epochs_cooldown": 2, "lr_cooldown_power": 1.5} if name == "const-cooldown" else {}
    config = OptimConfig(lr=0.3, warmup=warmup, lr_scheduler=name, **cooldown)
    for step in range(steps):
        assert scheduled(config, step, steps=steps, steps_per_epoch=per_epoch) == pytest.approx(theirs(step))


VIT = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 64, "head_width": 32, "patch_size": 8},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 64, "heads": 2, "layers": 3},
}
# From OpenCLIP's README and its docs/script_examples; what a launcher gets is left out, and the --remote-sync of the
# cluster's, which is refused. The README has the two sources in prose, and the last line only in its --help.
DOCUMENTED = {
    "one process": """--save-frequency 1 --zeroshot-frequency 1 --report-to tensorboard --train-data="CSV"
        --val-data="CSV" --csv-img-key filepath --csv-caption-key title --imagenet-val=IMAGENET --warmup 10000
        --batch-size=128 --lr=1e-3 --wd=0.1 --epochs=30 --workers=8 --model RN50""",
    "one node": """--train-data 'TARS' --train-num-samples 10968539 --dataset-type webdataset --batch-size 320
        --precision amp --workers 4 --imagenet-val IMAGENET""",
    "slurm": """--save-frequency 1 --report-to tensorboard --train-data="TARS" --warmup 2000 --batch-size=256
        --epochs=32 --workers=8 --model ViT-B-32 --name "ViT-B-32-Vanilla" --seed 0 --local-loss
        --gather-with-grad""",
    "language model": """--train-data="TARS" --train-num-samples 3000000 --val-data="TARS" --val-num-samples 10000
        --dataset-type webdataset --batch-size 256 --warmup 2000 --epochs 10 --lr 5e-4 --precision amp --workers 6
        --model "roberta-ViT-B-32" --lock-text --lock-text-unlocked-layers 10 --name "10_unfrozen"
        --report-to "tensorboard" --pretrained 'WEIGHTS' """,  # whose text tower starts from random weights otherwise
    "two sources": """--train-data "TARS::TARS2" --dataset-resampled --train-data-upsampling-factors=1::2
        --train-num-samples 800 --force-patch-dropout 0. --dataset-type webdataset""",
    "clipa b16": """--save-frequency 1 --save-most-recent --zeroshot-frequency 1 --train-data 'FOLDER'
        --dataset-type webdataset --lr "2.048e-3" --beta1 0.9 --beta2 0.95 --warmup 782 --wd 0.2 --batch-size 8192
        --aug-cfg scale='(0.4, 1.0)' --epochs 6 --workers 6 --model ViT-B-16-CL16 --precision 'amp_bf16'
        --ddp-static-graph --local-loss --gather-with-grad --force-image-size 112 --grad-checkpointing
        --log-every-n-steps 32 --seed 0 --logs ./logs/ --imagenet-val 'IMAGENET'""",
    "clipa b16 fine-tuned": """--save-frequency 1 --save-most-recent --zeroshot-frequency 1 --train-data 'FOLDER'
        --dataset-type webdataset --lr "2.56e-5" --beta1 0.9 --beta2 0.95 --warmup 3072 --wd 0.2 --batch-size 1024
        --aug-cfg scale='(0.4, 1.0)' --epochs 1 --train-num-samples 131072000 --workers 6 --model ViT-B-16-CL16
        --pretrained 'WEIGHTS' --precision 'amp_bf16' --ddp-static-graph --local-loss --gather-with-grad
        --grad-checkpointing --log-every-n-steps 256 --seed 0 --logs ./logs/ --imagenet-val 'IMAGENET'""",
    "clipa l16": """--save-frequency 1 --save-most-recent --zeroshot-frequency 1 --train-data 'FOLDER'
        --dataset-type webdataset --lr "1.024e-3" --beta1 0.9 --beta2 0.95 --warmup 1563 --wd 0.2 --batch-size 4096
        --aug-cfg scale='(0.4, 1.0)' color_jitter='(0.32, 0.32, 0.32, 0.08)' color_jitter_prob=0.8
        gray_scale_prob=0.2 --epochs 6 --workers 6 --model ViT-L-16-CL16-GAP --precision 'amp_bf16'
        --ddp-static-graph --local-loss --gather-with-grad --force-image-size 64 --grad-checkpointing
        --log-every-n-steps 64 --seed 0 --logs ./logs/ --imagenet-val 'IMAGENET'""",
    "clipa h14 fine-tuned": """--save-frequency 1 --save-most-recent --zeroshot-frequency 1 --train-data 'FOLDER'
        --train-num-samples 131072000 --dataset-type webdataset --lr "5.12e-5" --beta1 0.9 --beta2 0.95 --warmup 800
        --wd 0.2 --batch-size 4096 --epochs 4 --workers 6 --model ViT-H-14-CL32-GAP --pretrained 'WEIGHTS'
        --precision 'amp_bf16' --ddp-static-graph --local-loss --gather-with-grad --force-image-size 224
        --force-patch-dropout 0.3 --grad-checkpointing --log-every-n-steps 64 --seed 0 --logs ./logs/
        --imagenet-val 'IMAGENET'""",
    "cluster": """--save-frequency 1 --train-data="TARS" --train-num-samples 135646078 --dataset-type webdataset
        --dataset-resampled --warmup 2000 --batch-size=375 --epochs=97 --lr 1e-3 --workers=8 --report-to wandb
        --name run --logs /scratch/logs/ --model ViT-B-32 --seed 0 --ddp-static-graph --local-loss --gather-with-grad
        --grad-checkpointing --precision amp_bfloat16 --wandb-project-name open_clip6 --resume "latest" """,
    "synthetic": """--dataset-type synthetic --train-num-samples 64 --batch-size 8 --accum-freq 2 --siglip
        --torchcompile --save-frequency 0 --zeroshot-frequency 0""",
}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """What stands for the names of files in the lines."""
    folder = tmp_path_factory.mktemp("openclip")
    (folder / "tiny.json").write_text(json.dumps(VIT))
    tars = folder / "tars"
    tars.mkdir()
    (tars / "000.tar").symlink_to(BUNDLED / "train-000000.tar")
    labelled = {f"{number}.jpg": image for number, (image, _) in enumerate(bundled(4))}
    labelled |= {f"{number}.cls": b"%d" % (number * 100) for number in range(4)}
    write_shard(folder / "imagenet.tar", dict(sorted(labelled.items())))
    (folder / "prompts.txt").write_text("a photo of a {}.\n")
    start = ["train", "--model", str(folder / "tiny.json"), "--force-image-size", "224", "--max-steps", "1"]
    start += ["--batch-size", "2", "--workers", "0", "--logs", str(folder), "--name", "start", "--device", "cpu"]
    exit_code(*start, "--train-data", str(tars), "--warmup", "0", "--loss", "infonce")
    table = make_csv(folder / "csv", 20)
    with table.open() as file:
        rows = [(str(table.parent / row["filepath"]), row["title"]) for row in csv.DictReader(file)]
    with (folder / "pairs.csv").open("w") as file:
        csv.writer(file, delimiter="\t").writerows([("filepath", "title"), *rows])  # OpenCLIP's own separator
    return {
        "CSV": str(folder / "pairs.csv"),
        "TARS2": str(BUNDLED / "val-000000.tar"),
        "TARS": f"{tars}/{{000..000}}.tar",
        "FOLDER": str(tars),
        "IMAGENET": str(folder / "imagenet.tar"),
        "WEIGHTS": str(folder / "start" / "checkpoints" / "last" / "open_clip_model.safetensors"),
        "model": str(folder / "tiny.json"),
        "prompts": str(folder / "prompts.txt"),
    }


@pytest.mark.parametrize("name", DOCUMENTED)
def test_documented_lines_run(name, places, tmp_path, capsys, monkeypatch):
    """As they are but for the names of files, with the sizes of this machine added at the end."""
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.chdir(tmp_path)
    line = DOCUMENTED[name]
    for place in ("CSV", "TARS2", "TARS", "FOLDER", "IMAGENET", "WEIGHTS"):
        line = line.replace(place, places[place])
    line += (
        f" --model {places['model']} --max-steps 2 --warmup 1 --workers 0 --device cpu --logs {tmp_path} --name run"
    )
    line += " --batch-size 4 --precision fp32 --val-frequency 0"
    if "templates" in OURS and "imagenet-val" in line:
        line += f" --templates {places['prompts']}"
    code = exit_code("train", *shlex.split(line))
    captured = capsys.readouterr()
    assert code == 0, captured.err
    steps = [line["step"] for line in records(tmp_path / "run", "train")]
    assert steps[-1] == 2 and (tmp_path / "run" / "checkpoints" / "last").exists()
    if any(word in line for word in ("--local-loss", "--zeroshot-frequency")):
        assert "is ignored" in captured.err
        said = "note: the loss is fastclip-v3, which is not OpenCLIP's" in captured.err
        assert said == ("--pretrained" not in line and "--siglip" not in line)


def test_forced_settings_reach_the_model(places):
    forced = create_model(
        ModelConfig(
            model=places["model"], force_context_length=8, force_patch_dropout=0.5, force_quick_gelu=True,
            force_custom_text=True, image_mean=(0.1, 0.2, 0.3), image_interpolation="bilinear",
        )
    )  # fmt: skip
    assert forced.tokenizer(["a cat"]).shape == (1, 8)
    assert forced.clip.visual.patch_dropout.prob == 0.5
    assert type(forced.clip).__name__ == "CustomTextCLIP"
    assert type(forced.clip.visual.transformer.resblocks[0].mlp.gelu).__name__ == "QuickGELU"
    assert forced.image_mean.flatten().tolist() == pytest.approx([0.1, 0.2, 0.3])
    assert forced.preprocess.interpolation == "bilinear"
    assert forced.encode_text(forced.tokenizer(["a cat"])).shape == (1, 32)

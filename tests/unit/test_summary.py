"""A run opens with a summary, and a dry run prints the same; weights that are given change what is filled in."""

import json
import re
import shlex

import pytest
import torch
from safetensors.torch import save_file
from shard_files import picture, write_shard
from test_locked_towers import COCA
from test_names import SHORT, finishes

from leanclip.cli.openclip_flags import from_openclip
from leanclip.config import TrainConfig, override
from leanclip.models import ModelConfig, create_model
from leanclip.recipes import load_recipe
from leanclip.runs.defaults import fill
from leanclip.training.model_setup import model_for_run
from refusal import assert_refused, exit_code

FACTS = [
    "run",
    "data",
    "held out",
    "model",
    "image tower",
    "text tower",
    "loss",
    "batch",
    "steps",
    "optimizer",
    "device",
]


def command(folder, *flags):
    return ["train", "--model", "leanclip-tiny", "--logs", str(folder), *SHORT, *flags]


def facts(printed):
    """The lines of the summary, by name."""
    lines = (line.partition(":") for line in printed.splitlines())
    return {name: text.strip() for name, _, text in lines if name in (*FACTS, "captions", "decoder", "expected")}


@pytest.fixture(scope="module")
def weights(tmp_path_factory):

    folder = tmp_path_factory.mktemp("start")
    exit_code(*command(folder, "--name", "start", "--loss", "infonce"))
    return folder / "start"


def test_a_run_and_its_dry_run_print_the_same_summary(tmp_path, capsys):
    flags = command(tmp_path, "--name", "x", "--loss", "fastclip-v3")
    dry, real = facts(finishes([*flags, "--dry-run"], capsys)), facts(finishes(flags, capsys))
    assert dry.keys() == real.keys() >= set(FACTS) and len(real) <= 15
    measured = {"device", "expected"}  # threads and seconds
    assert all(dry[name] == real[name] for name in real.keys() - measured)
    assert str(tmp_path / "x") in real["run"] and "1,830 samples" in real["data"]
    assert (
        "rho 6.5" in real["loss"] and "gamma_min 0.2" in real["loss"] and real["batch"].startswith("4 on 1 process")
    )
    assert "random weights" in real["image tower"] and "fp32" in real["device"]


def test_weights_are_fine_tuned_with_what_was_left_open(weights, tmp_path, capsys):
    printed = finishes(command(tmp_path, "--name", "tuned", "--pretrained", str(weights)), capsys)
    lines = facts(printed)
    assert lines["loss"].startswith("infonce") and "learning rate 1.25e-06" in lines["optimizer"]  # 1e-5 at batch 256
    assert "filled for fine-tuning, as weights are given: --loss infonce --lr 1.25e-06" in printed
    assert str(weights) in lines["image tower"] and str(weights) in lines["text tower"]
    given = command(
        tmp_path, "--name", "given", "--pretrained", str(weights), "--lr", "3e-4", "--loss", "fastclip-v3"
    )
    printed = finishes([*given, "--dry-run"], capsys)
    assert "learning rate 0.0003" in printed and "fastclip-v3 (" in printed and "fine-tuning" not in printed


def test_the_file_of_a_run_from_scratch_is_named_where_it_keeps_its_settings(weights, tmp_path, capsys):
    flags = ["--config", str(weights / "config.toml"), "--logs", str(tmp_path), "--dry-run"]
    start = ["--pretrained", str(weights)]
    expected = {(): False, (*start,): True, (*start, "--loss", "dcl", "--lr", "1"): False}
    for more, said in expected.items():
        capsys.readouterr()
        assert exit_code("train", *flags, *more) == 0
        assert ("config.toml sets --loss infonce --lr " in capsys.readouterr().err) == said


def test_a_run_that_began_with_other_rates_keeps_them(weights, tmp_path, capsys):
    """As one from before the rule knew of weights."""
    start = command(tmp_path, "--name", "x", "--pretrained", str(weights))
    finishes([*start, "--lr", "1e-3", "--loss", "fastclip-v3"], capsys)
    printed = finishes([*start, "--resume", "auto"], capsys)
    assert "learning rate 0.001" in printed and "fastclip-v3" in facts(printed)["loss"]


def test_the_recipe_for_fine_tuning_has_the_rules_values():
    values = load_recipe("finetune")
    config = fill(override(TrainConfig(), values | {"pretrained": "x", "model": "ViT-B-32"}, "test"), samples=100_000)
    assert (config.run.loss, config.optim.lr, config.optim.warmup) == ("infonce", 1e-5, 195)
    assert not values.keys() & {"loss", "lr", "warmup", "lr_tau"}, "a second source of these"
    long = fill(override(TrainConfig(), {"pretrained": "x", "loss": "fastclip-v3"}, "test"), samples=10**7)
    assert (long.optim.warmup, long.loss.lr_tau) == (1000, 1e-5)


def filled(**values):
    return fill(override(TrainConfig(), {"model": "ViT-B-32"} | values, "test"), samples=100_000)


LOCKED = {"lock_image": True, "lock_text": True}
ELSEWHERE = {"image_tower": "timm:resnet50", "pretrained_image": "x", "text_tower": "hf:y", "pretrained_text": "y"}
VIT_TOWER = {"image_tower": "timm:vit_small_patch16_224", "pretrained_image": "x"}  # the text tower is random
ADAPTERS = {"lora_image": 8, "lora_text": 8}
MIXED = {"image_tower": "timm:resnet50", "text_tower": "ViT-B-32", "pretrained_image": "x", "pretrained_text": "x"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"loss": "fastclip-v3"}),
        ({"pretrained": "x"} | LOCKED, {"loss": "infonce", "lr": 5e-4, "global_batch_size": 128}),
        ({"pretrained": "x", "lock_image": True}, {"lr": 1e-5 / 2**0.5}),
        (ELSEWHERE, {"loss": "infonce", "pair_weights": "off"}),
        # As the study of wrong captions has chosen.
        (ELSEWHERE | LOCKED, {"loss": "fastclip-v1", "pair_weights": "auto", "lr": 5e-4}),
        (ELSEWHERE | LOCKED | {"loss": "dcl", "pair_weights": "off"}, {"loss": "dcl", "pair_weights": "off"}),
        ({"pretrained": "x", "global_batch_size": 1024} | ADAPTERS, {"lr": 1e-4, "lr_image": None, "lr_text": None}),
        ({"pretrained": "x", "lora_image": 8, "lock_text": True}, {"lr": 1e-4 / 2**0.5}),
        (
            {"pretrained": "x", "lora_image": 8, "lock_text": True, "lock_text_unlocked_layers": 1},
            {"lr": 1e-4 / 2**0.5, "lr_image": None},  # an unlocked projection leaves adapters alone
        ),
        (
            {"pretrained": "x", "lora_text": 8, "global_batch_size": 256},
            {"lr": 1e-5, "lr_image": None, "lr_text": 1e-4},
        ),
        ({"pretrained": "x", "lora_text": 8, "lr": 1e-3}, {"lr_text": None}),
        (
            VIT_TOWER | ADAPTERS | {"pretrained_text": "x", "global_batch_size": 256},
            {"lr": 1e-3, "lr_head": 5e-4, "lr_image": None},
        ),
        (
            VIT_TOWER | {"pretrained_text": "x", "text_tower": "hf:y", "global_batch_size": 256},
            {"lr": 1e-5, "lr_head": 5e-4, "lr_image": None, "lr_text": None},
        ),
        (
            VIT_TOWER | {"global_batch_size": 1024},
            {"lr": 1e-5, "lr_head": 5e-4, "lr_image": None, "lr_text": 1e-3},
        ),
        (VIT_TOWER | {"lr": 1e-3}, {"lr_head": None}),
        (
            {"pretrained_image": "x", "lock_image": True, "global_batch_size": 1024},
            {"lr": 1e-5, "lr_head": 5e-4, "lr_image": None, "lr_text": 1e-3},
        ),
        ({"pretrained_text": "x", "lora_text": 8}, {"lr_head": 5e-4}),
        ({"pretrained_image": "x", "pretrained_text": "timm:x"} | LOCKED, {"lr": 5e-4, "lr_head": None}),
        (
            MIXED | LOCKED | {"lock_text_unlocked_layers": 1},  # its projection, beside a new one
            {"loss": "fastclip-v1", "pair_weights": "auto", "lr": 5e-4},
        ),
        (MIXED | LOCKED | {"lock_image_unlocked_groups": 1}, {"loss": "infonce", "pair_weights": "off"}),
    ],
)
def test_what_is_trained_decides_the_values_that_are_filled_in(given, expected):
    values = filled(**given).values()
    assert {name: values.get(name) for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_projections_that_the_files_hold_are_trained_like_their_towers(suffix, tmp_path):
    clip = create_model(ModelConfig(model="leanclip-tiny")).clip
    whole = {name: value.contiguous() for name, value in clip.state_dict().items()}
    images = {name.removeprefix("visual."): value for name, value in whole.items() if name.startswith("visual.")}
    texts = {name: value for name, value in whole.items() if not name.startswith(("visual.", "logit_"))}
    bare = {name: value for name, value in texts.items() if name != "text_projection"}
    files = {"whole": whole, "images": images, "texts": texts, "bare": bare}
    for name, weights in files.items():
        if suffix == "pt":
            torch.save(
                {"state_dict": {f"module.{key}": value for key, value in weights.items()}}, tmp_path / f"{name}.pt"
            )
        else:
            save_file(weights, tmp_path / f"{name}.safetensors")
    expected = {("whole", "whole"): None, ("images", "texts"): None, ("whole", "bare"): HEADS}
    for (image, text), rate in expected.items():
        image, text = (str(tmp_path / f"{name}.{suffix}") for name in (image, text))
        assert filled(model="leanclip-tiny", pretrained_image=image, pretrained_text=text).optim.lr_head == rate
        built = create_model(ModelConfig(model="leanclip-tiny", pretrained_image=image, pretrained_text=text))
        assert bool(built.new_projections) == (rate is not None)


HEADS, TOWERS = 5e-4, 1e-5 / 2**0.5  # rates at batch 128


@pytest.mark.parametrize(
    ("model", "image", "text", "rate"),
    [
        ("ViT-B-32", 1, 1, HEADS),  # the projection is the last layer of open_clip's own transformers
        ("ViT-B-32", 1, 0, HEADS),
        ("ViT-B-32", 2, 0, TOWERS),
        ("ViT-B-32", 0, 2, TOWERS),
        ("RN50", 0, 1, HEADS),
        ("RN50", 1, 0, TOWERS),  # and not that of others
        ("leanclip-tiny", 1, 0, TOWERS),
    ],
)
def test_unlocked_projections_have_the_rates_of_projections(model, image, text, rate):
    locked = {"pretrained": "x", "lock_image": True, "lock_text": True}
    unlocked = {"lock_image_unlocked_groups": image, "lock_text_unlocked_layers": text}
    assert filled(model=model, **locked, **unlocked).optim.lr == pytest.approx(rate)
    towers = model_for_run(override(TrainConfig(), {"model": model} | locked | unlocked, "test"), shapes_only=True)
    assert all(tower.frozen_layers == tower.layers for tower in towers.summary()) == (rate == HEADS)


def test_a_lock_that_freezes_nothing_is_said(weights, tmp_path, capsys):
    locked = command(tmp_path, "--name", "x", "--pretrained", str(weights), "--lock-text", "--dry-run")
    projection, few, all_of_them = ([*locked, "--lock-text-unlocked-layers", count] for count in ("1", "2", "20"))
    equal = "--lock-text-unlocked-layers 1 equals --lock-text alone"
    assert equal in finishes(projection, capsys)
    printed = finishes(few, capsys)
    assert "freezes nothing" not in printed and "equals" not in printed
    printed = finishes(all_of_them, capsys)
    assert "--lock-text freezes nothing: 20 layers are unlocked, and the text tower has" in printed
    assert "frozen" not in facts(printed)["text tower"]


@pytest.mark.parametrize("flag", ["--lock-image", "--lock-text"])
def test_a_random_tower_is_not_frozen(flag, tmp_path, capsys):
    assert_refused("model.locked_without_weights", command(tmp_path, flag, "--name", "x"), capsys)
    assert not list(tmp_path.iterdir())


def test_the_summary_names_what_is_frozen(weights, tmp_path, capsys):
    locked = command(tmp_path, "--name", "x", "--pretrained", str(weights), "--lock-image", "--dry-run")
    tower = facts(finishes(locked, capsys))["image tower"]
    assert str(weights) in tower and "frozen" in tower and "1.4 M of 1.4 M" not in tower


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        (
            ["--lr-image", "1e-6", "--lr-text", "1e-5", "--lr-head", "1e-3"],
            "1e-06 (image tower), 1e-05 (text tower), 0.001 (projections), cosine",
        ),
        (["--lr", "1e-4", "--lr-head", "1e-3"], "0.0001 (image tower, text tower), 0.001 (projections), cosine"),
        (["--lr", "5e-4", "--lr-text", "5e-5", "--lock-image"], "5e-05 (text tower), 0.0005 (projections), cosine"),
        (["--lr", "1e-4", "--lr-head", "1e-3", "--lock-image", "--lock-text"], "0.001 cosine"),
        (
            ["--lr", "1e-4", "--lr-text", "1e-3", "--lock-image", "--lora-text", "2"],
            "0.0001 (projections), 0.001 (text tower), cosine",
        ),
        (["--lr", "1e-4", "--layer-decay", "0.5"], "0.0001, layer decay 0.5, cosine"),
    ],
)
def test_the_summary_names_every_rate_in_use(flags, shown, weights, tmp_path, capsys):
    start = command(tmp_path, "--name", "x", "--pretrained", str(weights), "--dry-run")
    assert f"learning rate {shown} after" in facts(finishes([*start, *flags], capsys))["optimizer"]


def test_a_coca_model_says_that_its_decoder_is_not_trained(tmp_path, capsys):
    text = COCA["text_cfg"] | {"vocab_size": 49408, "context_length": 77}
    decoder = COCA["multimodal_cfg"] | {"vocab_size": 49408}
    (tmp_path / "coca.json").write_text(json.dumps(COCA | {"text_cfg": text, "multimodal_cfg": decoder}))
    arguments = ["train", "--recipe", "demo", *SHORT, "--model", str(tmp_path / "coca.json"), "--logs", str(tmp_path)]
    assert "not trained" in facts(finishes([*arguments, "--dry-run"], capsys))["decoder"]


def test_a_line_of_openclip_says_that_the_loss_is_not_openclips():
    line = "--train-data x.tar --dataset-type webdataset"
    for flags, said in ((line, True), (f"{line} --loss infonce", False), (f"{line} --siglip", False)):
        notes = " / ".join(from_openclip(shlex.split(flags))[1])
        assert ("fastclip-v3, which is not OpenCLIP's; --loss infonce is" in notes) == said


def test_captions_that_the_model_cuts_off_are_counted(tmp_path, capsys):
    flags = command(tmp_path, "--name", "x", "--dry-run")
    cut = facts(finishes([*flags, "--force-context-length", "8"], capsys))["captions"]
    share, sampled = cut.split("%")[0], cut.split(" of ")[1].split()[0]
    assert int(share) > 10 and int(sampled) == 300 and "8 tokens" in cut and "--force-context-length" in cut
    assert "captions" not in facts(finishes([*flags, "--force-context-length", "32"], capsys))


def test_small_runs_are_described_as_they_are(tmp_path, capsys):
    flags = command(tmp_path, "--name", "x", "--train-data", "synthetic:40", "--val-split", "0.2", "--workers", "0")
    lines = facts(finishes([*flags, "--max-steps", "4", "--warmup", "1", "--dry-run"], capsys))
    assert (
        lines["data"].endswith("40 samples, each an image with 1 caption, 8 held out")
        and "after 1 step of" in lines["optimizer"]
    )
    assert re.fullmatch(r"\d+ s or more, \d\.\d GiB or more", lines["expected"])
    assert lines["steps"].endswith("evaluation at the end, checkpoint at the end")
    files = {f"{n}.jpg": picture(n) for n in range(9)} | {f"{n}.json": b'{"captions": ["a", "b"]}' for n in range(9)}
    shard = write_shard(tmp_path / "a.tar", dict(sorted(files.items())))
    several = command(tmp_path, "--name", "z", "--train-data", str(shard), "--dry-run")
    assert facts(finishes(several, capsys))["data"].endswith("9 samples in 1 file, each an image with 2 captions")
    given = command(tmp_path, "--name", "y", "--train-data", "synthetic:40", "--workers", "0", "--dry-run")
    assert "no evaluation, checkpoint" in facts(finishes(given, capsys))["steps"]

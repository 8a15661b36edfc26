import json
from dataclasses import fields

import pytest

from leanclip.cli.train import parse_command
from leanclip.config import TrainConfig, load_toml, override, save_toml
from leanclip.losses import LOSSES, loss_from_config
from leanclip.models import CONFIG_FILE, WEIGHTS_FILE, model_config_of
from leanclip.runs.defaults import PUBLISHED, fill, interpolated
from leanclip.training_run import repeatable
from refusal import refuses


def test_flag_names_are_unique_over_the_tree():
    config = TrainConfig()
    names = [entry.name for part in fields(config) for entry in fields(getattr(config, part.name))]
    assert len(names) == len(set(names))


def test_flags_win_over_file_and_file_over_recipe(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("epochs = 3\nlr = 1\nbeta2 = 0.95\n")
    settings = parse_command(["--recipe", "demo", "--config", str(file), "--lr", "0.5"]).settings
    assert settings.run.epochs == 3  # the recipe says 16
    assert settings.optim.lr == 0.5  # the file says 1
    assert settings.optim.beta2 == 0.95
    assert settings.model.model == "leanclip-tiny"


def test_batch_size_per_process_replaces_the_recipes_global_one():
    settings = parse_command(["--recipe", "demo", "--batch-size", "32"]).settings
    assert settings.data.batch_size == 32 and settings.data.global_batch_size is None
    with refuses("config.bad_value", "--batch-size", "--global-batch-size"):
        parse_command(["--batch-size", "32", "--global-batch-size", "64"])


def test_a_later_source_says_the_batch_its_own_way(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("batch_size = 64\n")
    settings = parse_command(["--recipe", "demo", "--config", str(file)]).settings
    assert settings.data.batch_size == 64 and settings.data.global_batch_size is None
    settings = parse_command(["--config", str(file), "--global-batch-size", "32"]).settings
    assert settings.data.batch_size is None and settings.data.global_batch_size == 32


def test_another_loss_drops_what_was_said_for_the_first(tmp_path):
    config = repeatable(fill(parse_command(["--loss", "fastclip-v3"]).settings, samples=1000))
    save_toml(config, tmp_path / "config.toml")
    settings = parse_command(["--config", str(tmp_path / "config.toml"), "--loss", "infonce"]).settings
    assert settings.loss.rho is None
    settings = parse_command(["--config", str(tmp_path / "config.toml"), "--rho", "3"]).settings
    assert settings.loss.rho == 3 and settings.loss.lr_tau == config.loss.lr_tau


def test_a_resolved_configuration_survives_its_file(tmp_path):
    config = parse_command(["--loss", "fastclip-v2", "--aug-scale", "0.5", "1", "--tau-betas", "0.8", "0.9"]).settings
    config = repeatable(fill(config, samples=1000))
    save_toml(config, tmp_path / "config.toml")
    assert override(TrainConfig(), load_toml(tmp_path / "config.toml"), "file") == config


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("epoch = 3", "config.unknown_key", ["'epoch'", "epochs?"]),
        ("learning_rate = 1", "config.unknown_key", ["lr?"]),
        ("epochs = 'many'", "config.bad_value", ["epochs is 'many'", "INT"]),
        ("epochs = true", "config.bad_value", ["epochs is True", "INT"]),
        ("precision = 'fp8'", "config.bad_value", ["'fp8'", "amp_bf16"]),
        ("epochs = 0", "config.bad_value", ["epochs is 0"]),
        ("aug_scale = [0.9, 0.1]", "config.bad_value", ["aug_scale", "first at most the second"]),
        ("aug_scale = [0.9]", "config.bad_value", ["aug_scale is [0.9]", "2 values"]),
        ("tau_betas = ['a', 'b']", "config.bad_value", ["tau_betas is 'a'", "FLOAT FLOAT"]),
        ("zero_shot = [3]", "config.bad_value", ["zero_shot is 3", "STR"]),
        ("epochs = ", "config.bad_toml", ["bad.toml"]),
    ],
)
def test_bad_toml_is_refused(tmp_path, text, code, words):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with refuses(code, *words):
        override(TrainConfig(), load_toml(path), str(path))


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_can_be_built_from_what_is_filled_in(loss, tmp_path):
    config = fill(override(TrainConfig(), {"loss": loss}, "test"), samples=1000)
    assert loss_from_config(loss, config.loss, num_samples=1000).temperature() > 0
    save_toml(config, tmp_path / "config.toml")
    again = fill(override(TrainConfig(), load_toml(tmp_path / "config.toml"), "test"), samples=1000)
    assert again.loss == config.loss


def test_the_rule_passes_through_the_published_points():
    for point in PUBLISHED:
        assert interpolated(point.samples) == pytest.approx(point)
    between = interpolated(5_000_000)
    assert PUBLISHED[1].lr < between.lr < PUBLISHED[0].lr and 6.5 < between.rho < 8.5
    assert interpolated(1000).rho == 6.5 and interpolated(10**9).rho == 16


@pytest.mark.parametrize(("steps", "every"), [(7, 10), (10, 10), (99, 10), (224, 22), (5000, 500)])
def test_short_runs_do_not_evaluate_all_the_time(steps, every):
    config = override(TrainConfig(), {"max_steps": steps, "epochs": 5000, "warmup": 0}, "test")
    assert fill(config, samples=1000).run.eval_every == every
    asked = override(config, {"eval_every": 1}, "test")
    assert fill(asked, samples=1000).run.eval_every == 1


def test_weights_of_a_run_bring_their_model(tmp_path):
    own, known = tmp_path / "own.json", model_config_of("ViT-S-32")[1]
    own.write_text(json.dumps(known | {"embed_dim": 48}))

    def saved(name, called, architecture):
        folder = tmp_path / name / "checkpoints" / "last"
        folder.mkdir(parents=True)
        (tmp_path / name / "run.json").write_text(json.dumps({"model": called}))
        (folder / WEIGHTS_FILE).touch()
        (folder / CONFIG_FILE).write_text(json.dumps({"model_cfg": architecture, "preprocess_cfg": {}}))
        return folder / CONFIG_FILE

    def model(weights, **given):
        settings = {"train_data": "x.tar", "pretrained": str(tmp_path / weights), **given}
        return fill(override(TrainConfig(), settings, "test"), samples=1000).model.model

    saved("plain", "ViT-S-32", known)
    saved("given", str(own), known | {"embed_dim": 48})
    forced = saved("forced", "ViT-S-32", known | {"quick_gelu": True})
    moved = saved("moved", str(tmp_path / "gone.json"), known | {"embed_dim": 52})
    assert model("plain") == model("plain/checkpoints/last") == "ViT-S-32"
    assert model("given") == str(own)
    assert (model("forced"), model("moved")) == (str(forced), str(moved))
    assert model("plain", model="RN50") == "RN50"
    (tmp_path / "else").mkdir()
    assert model("else") == model("absent") == model("plain/run.json") == "ViT-B-32"

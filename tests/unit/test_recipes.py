"""Every recipe parses, fits its loss, holds the published numbers and says in its header what it is."""

import json
import math
import re
from dataclasses import asdict

import pytest
from safetensors.torch import load_file

from leanclip.cli import main
from leanclip.config import load_toml, override
from leanclip.data.datasets import BUNDLED
from leanclip.losses import loss_from_config
from leanclip.recipes import DIRECTORY, list_recipes, load_recipe
from leanclip.runs import TrainConfig
from leanclip.runs.defaults import PUBLISHED, fill
from refusal import exit_code, refusal_code
from run_records import records

NAMES = [name for name, _ in list_recipes() if name != "demo"]
PUBLISHED_NAMES = [name for name in NAMES if "/" in name]

SETTINGS = {
    "cc3m": {
        "model": "RN50", "global_batch_size": 8 * 128, "epochs": 37, "warmup": 10_000, "lr": 1e-3, "wd": 0.1,
        "beta1": 0.9, "beta2": 0.999, "eps_opt": 1e-8,
    },
    "cc12m": {
        "model": "ViT-B-32", "global_batch_size": 8 * 256, "epochs": 33, "warmup": 10_000, "lr": 4e-4, "wd": 0.1,
        "beta1": 0.9, "beta2": 0.98, "eps_opt": 1e-6,
    },
    "laion400m": {
        "model": "ViT-B-16", "global_batch_size": 16 * 320, "epochs": 30, "warmup": 13_200, "lr": 2e-4,
        "lr_floor": 4e-5, "wd": 0.2, "beta1": 0.9, "beta2": 0.98, "eps_opt": 1e-6,
    },
}  # fmt: skip
COSINE = {
    "cc3m": {"gamma_schedule": "cosine", "gamma_min": 0.2, "gamma_decay_epochs": 18, "eps": 1e-14},
    "cc12m": {"gamma_schedule": "cosine", "gamma_min": 0.2, "gamma_decay_epochs": 16, "eps": 1e-14},
    "laion400m": {"gamma_schedule": "cosine", "gamma_min": 0.8, "gamma_decay_epochs": 10, "eps": 1e-6},
}
V3 = {
    "cc3m": {"tau": 0.07, "lr_tau": 2e-4, "rho": 6.5, "tau_gradient": "published"},
    "cc12m": {"tau": 0.07, "lr_tau": 1e-4, "rho": 8.5, "tau_gradient": "published"},
    "laion400m": {"tau": 0.07, "lr_tau": 5e-5, "rho": 16.0, "tau_gradient": "published"},
}
RESULTS = {
    "sogclr/cc3m": "16.90", "fastclip-v1/cc3m": "18.86", "isogclr/cc3m": "17.05", "fastclip-v2/cc3m": "18.52",
    "openclip/cc3m": "14.72", "fastclip-v3/cc3m": "19.10", "sogclr/cc12m": "22.98", "fastclip-v1/cc12m": "24.26",
    "isogclr/cc12m": "24.96", "fastclip-v2/cc12m": "25.52", "openclip/cc12m": "21.09", "fastclip-v3/cc12m": "24.78",
    "openclip/laion400m": "62.92", "fastclip-v3/laion400m": "64.49", "fastclip-v0/cc3m": "none",
}  # fmt: skip


def header(name: str) -> list[str]:
    lines = (DIRECTORY / f"{name}.toml").read_text().splitlines()
    return lines[: lines.index("")]


def test_every_published_setting_has_its_recipe():
    assert set(PUBLISHED_NAMES) == set(RESULTS)
    assert {"small", "finetune", "lit", "heads", "lora", "disco-clip-32k", "disco-clip-196k"} <= set(NAMES)


@pytest.mark.parametrize("name", [*NAMES, "demo"])
def test_recipe_fits_its_loss(name):
    config = fill(override(TrainConfig(), load_recipe(name), f"recipe {name}"), samples=30_000_000)
    loss = loss_from_config(config.run.loss, config.loss, num_samples=10)
    family = name.split("/")[0]
    assert "/" not in name or loss.name == {"openclip": "infonce"}.get(family, family)


@pytest.mark.parametrize("name", PUBLISHED_NAMES)
def test_published_numbers(name):
    family, data = name.split("/")
    values = load_recipe(name)
    expected = SETTINGS[data] | {"precision": "amp_bf16", "tau": 0.07}
    if family.startswith("fastclip"):
        expected |= COSINE[data]
    if family == "fastclip-v3":
        expected |= V3[data]
    if family in ("fastclip-v2", "isogclr"):
        expected |= {"tau": 0.03, "lr_tau": 0.0133, "rho": 7.0, "tau_adam": "published"}
    assert expected.items() <= values.items()
    result = header(name)[3].removeprefix("# Published result: ")
    assert result.startswith(RESULTS[name])
    metric = "ImageNet top-1" if data == "laion400m" else "over ImageNet and its variants"
    assert metric in result or RESULTS[name] == "none"


# The seven scripts of FastCLIP (github.com/Optimization-AI/fast_clip, read in 2026), all with AdamW and seed 2024.
CC3M = "2,723,840/3,318,333 RN50 8x128 37 10000 1e-3 0.1"
CC12M = "9,187,328/12,423,374 ViT-B-32 8x256 33 10000 4e-4 0.1"
LAION = "315,658,316/414,080,000 ViT-B-16 16x320 30 13200 2e-4 0.2 lr_floor=4e-5"
SCRIPTS = {
    "openclip/cc3m": CC3M,
    "fastclip-v0/cc3m": f"{CC3M} gamma_min=0.2 gamma_decay_epochs=18",
    "fastclip-v1/cc3m": f"{CC3M} gamma_min=0.2 gamma_decay_epochs=18",
    "fastclip-v2/cc3m": f"{CC3M} gamma_min=0.2 gamma_decay_epochs=18 lr_tau=0.0133 tau=0.03 rho=7",
    "fastclip-v3/cc3m": f"{CC3M} gamma_min=0.2 gamma_decay_epochs=18 lr_tau=2e-4 rho=6.5",
    "fastclip-v3/cc12m": f"{CC12M} gamma_min=0.2 gamma_decay_epochs=16 lr_tau=1e-4 rho=8.5",
    "fastclip-v3/laion400m": f"{LAION} eps=1e-6 gamma_min=0.8 gamma_decay_epochs=10 lr_tau=5e-5 rho=16",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_recipe_has_the_values_of_its_script(name):
    sizes, model, ranks, epochs, warmup, lr, wd, *others = SCRIPTS[name].split()
    gpus, share = map(int, ranks.split("x"))
    values, text = load_recipe(name), (DIRECTORY / f"{name}.toml").read_text()
    assert values["opt"] == "adamw" and values["seed"] == 2024 and values["model"] == model
    assert values["global_batch_size"] == gpus * share and f"{gpus} GPUs x {share} as" in header(name)[2]
    assert all(re.search(rf"\b{size}\b", text) for size in sizes.split("/"))
    numbers = {"epochs": epochs, "warmup": warmup, "lr": lr, "wd": wd} | dict(other.split("=") for other in others)
    assert {key: values[key] for key in numbers} == {key: float(value) for key, value in numbers.items()}
    settings = {"lr_floor", "lr_tau", "rho", "gamma_min", "gamma_decay_epochs"}
    assert settings & set(values) == settings & set(numbers)
    assert "gamma_min" not in values or values["gamma_schedule"] == "cosine"


@pytest.mark.parametrize("name", PUBLISHED_NAMES)
def test_a_header_says_whose_choice_the_values_are(name):
    text = (DIRECTORY / f"{name}.toml").read_text()
    assert ("published script" in header(name)[0]) == (name in SCRIPTS)
    assert ("No script is published for this setting, so its values are our choice" in text) == (name not in SCRIPTS)
    assert "/laion400m" not in name or "13.3 billion samples seen" in header(name)[3]


@pytest.mark.parametrize("name", PUBLISHED_NAMES)
def test_per_sample_adam_takes_the_models_settings(name):
    values = load_recipe(name)
    if values["loss"] in ("isogclr", "fastclip-v2"):
        assert values["tau_betas"] == [values["beta1"], values["beta2"]]
        assert values["tau_adam_eps"] == values["eps_opt"]


def test_recipes_and_the_rule_for_open_values_agree():
    for data, point in zip(SETTINGS, PUBLISHED, strict=True):
        values = load_recipe(f"fastclip-v3/{data}")
        shared = {key: value for key, value in point._asdict().items() if key in values}
        assert set(shared) == {"lr", "lr_tau", "rho", "gamma_min"}
        assert shared.items() <= values.items()
        assert values["gamma_decay_epochs"] / values["epochs"] == pytest.approx(point.decay_share)


def test_show_prints_a_recipe(capsys):
    for name in ("finetune", "fastclip-v3/cc3m"):
        with pytest.raises(SystemExit) as stop:
            main(["train", "--recipe", "show", name])
        assert stop.value.code == 0
        assert capsys.readouterr().out == (DIRECTORY / f"{name}.toml").read_text()
    for words in (["show", "finetunes"], ["show"]):
        with pytest.raises(SystemExit) as stop:
            main(["train", "--recipe", *words])
        assert stop.value.code == 2 and refusal_code(capsys.readouterr().err) == "recipe.unknown"


def test_a_hyper_parameter_of_another_loss_is_refused():
    config = override(TrainConfig(), {**load_recipe("openclip/cc3m"), "rho": 6.5}, "test")
    assert asdict(config.loss)["rho"] == 6.5
    with pytest.raises(ValueError, match="no hyper-parameter 'rho'"):
        loss_from_config(config.run.loss, config.loss, num_samples=10)


FINE_TUNING = {  # by recipe: the code without weights, and which trunks are trained
    "finetune": ("recipe.needs_weights", {"image", "text"}),
    "lit": ("model.locked_without_weights", {"text"}),
    "heads": ("model.locked_without_weights", set()),
    "lora": ("lora.without_weights", {"image", "text"}),
}


STAND_INS = {  # in place of a recipe's model, data and length
    "model": "leanclip-tiny", "train_data": BUNDLED / "val-000000.tar", "global_batch_size": 20, "max_steps": 2,
    "warmup": 1, "workers": 0,
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in (*NAMES, "demo") if name not in FINE_TUNING])
def test_two_steps_on_stand_ins(name, tmp_path):
    """With every other value of the recipe."""
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in STAND_INS.items()]
    flags += ["--device", "cpu", "--threads", "1", "--logs", str(tmp_path), "--name", "run"]
    assert exit_code("train", "--recipe", name, *flags) == 0
    losses = {record["step"]: record["loss"] for record in records(tmp_path / "run") if "loss" in record}
    assert math.isfinite(losses[2])
    kept = {key: value for key, value in load_recipe(name).items() if key not in STAND_INS}
    assert kept.items() <= load_toml(tmp_path / "run/config.toml").items()


@pytest.mark.parametrize(("name", "gpus", "share"), [("disco-clip-32k", 8, 4096), ("disco-clip-196k", 64, 3072)])
def test_batches_of_disco_clip(name, gpus, share, small_run, tmp_path):
    """As many as the abstract says on as many GPUs; the image tower can start from weights."""
    values, lines = load_recipe(name), header(name)
    assert values["loss"] == "infonce" and values["model"] == "ViT-B-32"
    assert values["global_batch_size"] == gpus * share and f" {gpus} GPUs of 40 GB, {share:,} each" in lines[2]
    weights = small_run / "checkpoints/last/open_clip_model.safetensors"
    flags = ["--model", small_run.parent / "small.json", "--pretrained-image", weights, "--lr-image", "5e-5"]
    flags += ["--train-data", BUNDLED / "val-000000.tar", "--global-batch-size", 20, "--device", "cpu"]
    flags += ["--max-steps", 2, "--warmup", 1, "--workers", 0, "--threads", 1, "--seed", 1]
    assert exit_code("train", "--recipe", name, *flags, "--logs", tmp_path, "--name", "run") == 0
    before, after = load_file(weights), load_file(tmp_path / "run/checkpoints/last/open_clip_model.safetensors")
    change = {key: float((after[key] - before[key]).norm() / before[key].norm()) for key in
              ("visual.conv1.weight", "token_embedding.weight")}  # fmt: skip
    assert change["visual.conv1.weight"] < 0.1 < 0.5 < change["token_embedding.weight"]


@pytest.mark.parametrize("name", FINE_TUNING)
def test_fine_tuning_needs_weights(name, capsys):
    assert exit_code("train", "--recipe", name, "--model", "leanclip-tiny", "--dry-run") == 2
    assert f"[{FINE_TUNING[name][0]}]" in capsys.readouterr().err


@pytest.mark.parametrize("name", FINE_TUNING)
def test_fine_tuning_of_a_small_model(name, small_run, tmp_path, monkeypatch):
    """Two steps of the recipe change what it says, and nothing else."""
    monkeypatch.setenv("LEANCLIP_CACHE", str(tmp_path / "cache"))
    flags = ["--pretrained", small_run, "--train-data", BUNDLED / "val-000000.tar", "--global-batch-size", 20]
    flags += ["--max-steps", 2, "--workers", 0, "--device", "cpu", "--logs", tmp_path, "--name", "run"]
    assert exit_code("train", "--recipe", name, *map(str, flags)) == 0
    before, after = (load_file(tmp_path / f"run/checkpoints/{place}/open_clip_model.safetensors")
                     for place in ("start", "last"))  # fmt: skip
    changed = {key for key, value in after.items() if not value.equal(before[key])}
    assert {"visual.proj", "text_projection"} <= changed
    trunks = {"image": "visual.transformer", "text": "transformer"}
    assert {side for side, trunk in trunks.items() if any(key.startswith(trunk) for key in changed)} == (
        FINE_TUNING[name][1]
    )
    tables = json.loads((tmp_path / "run/run.json").read_text())["features"]
    assert set(tables) == {"lit": {"images"}, "heads": {"images", "texts"}}.get(name, set())
    assert all(table["rows"] >= 200 and table["seconds"] > 0 for table in tables.values())

"""Model configs, weights and hub names from other people: the right model, or one line and exit code 2."""

import copy
import json
import math
import zipfile

import huggingface_hub
import open_clip
import pytest
import torch
from safetensors.torch import save_file

from leanclip.models import HUB, ModelConfig, create_model, load_model
from leanclip.models.towers.sizes import check_sizes
from leanclip.models.untrusted import check_weights
from refusal import assert_refused, refusal, refuses

SMALL = {
    "embed_dim": 8,
    "vision_cfg": {"image_size": 16, "layers": 1, "width": 16, "head_width": 8, "patch_size": 8},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
}
RESNET = {"image_size": 32, "layers": [1, 1, 1, 1], "width": 16, "patch_size": None}
TRAIN = ["train", "--recipe", "demo", "--batch-size", "16", "--max-steps", "1", "--workers", "0", "--device", "cpu"]


def changed(part, **values):
    config = copy.deepcopy(SMALL)
    (config[part] if part else config).update(values)
    return config


def saved(directory, config, **preprocess):
    """A checkpoint directory; the weights are those of another model, which is not reached."""
    directory.mkdir(exist_ok=True)
    content = {"model_cfg": config, "preprocess_cfg": preprocess}
    (directory / "open_clip_config.json").write_text(json.dumps(content))
    return directory


@pytest.mark.parametrize(
    "config",
    [
        changed("text_cfg", heads=3),
        changed("text_cfg", heads=0),
        changed("text_cfg", context_length=0),
        changed("text_cfg", layers=10**9),
        changed("text_cfg", width=-16),
        changed("text_cfg", width=1.5),
        changed("text_cfg", mlp_ratio=math.nan),
        changed("vision_cfg", head_width=32),
        changed("vision_cfg", patch_size=0),
        changed("vision_cfg", patch_size=17),
        changed("vision_cfg", image_size=-16),
        changed("vision_cfg", image_size=[16, True]),
        changed("vision_cfg", layers=10**9),
        changed("vision_cfg", patch_dropout=1e300),
        changed("", embed_dim=10**15),
        changed("", init_logit_scale=math.inf),
        changed("", vision_cfg=RESNET | {"image_size": 16}),
        changed("", vision_cfg=RESNET | {"layers": [1, 1, 1]}),
        changed("", vision_cfg=RESNET | {"layers": [1, 1, 1, 10**9]}),
        changed("", multimodal_cfg={"layers": 10**9}),
        changed("", multimodal_cfg=3),
        changed("vision_cfg", timm_model_name="no such model"),
        changed("vision_cfg", unknown=1),
        changed("text_cfg", act_kwargs=3),
    ],
)
def test_impossible_configs_are_refused(config, tmp_path):
    (tmp_path / "model.json").write_text(json.dumps(config))
    with refuses("model.bad_config"):
        create_model(ModelConfig(model=str(tmp_path / "model.json")))
    with refuses("model.bad_config"):
        load_model(saved(tmp_path / "saved", config))


def test_models_that_memory_cannot_hold_are_refused_before_they_are_built(tmp_path):
    huge = [
        changed("vision_cfg", width=2**17, layers=1024),
        changed("text_cfg", vocab_size=2**22, width=2**17),
        changed("text_cfg", context_length=2**17),  # its attention mask
        changed("", vision_cfg=RESNET | {"width": 2**14}),
    ]
    for config in huge:
        (tmp_path / "model.json").write_text(json.dumps(config))
        with refuses("model.too_large", "GiB"):
            create_model(ModelConfig(model=str(tmp_path / "model.json")))


@pytest.mark.parametrize(
    "preprocess",
    [{"mean": [math.nan] * 3}, {"std": [0.1, 0.0, 0.1]}, {"std": [math.nan] * 3}, {"mean": 0.5}, {"mean": [1, 2]},
     {"mean": [1e300] * 3}, {"interpolation": 7}, {"resize_mode": "stretch"}],
)  # fmt: skip
def test_bad_preprocessing_is_refused(preprocess, tmp_path):
    with refuses("model.bad_preprocessing"):
        load_model(saved(tmp_path, SMALL, **preprocess))


def test_settings_of_preprocessing_are_numbers():
    with pytest.raises(ValueError, match="image_mean"):
        ModelConfig(image_mean=(math.nan, 0.5, 0.5))
    with pytest.raises(ValueError, match="image_std"):
        ModelConfig(image_std=(math.nan, 0.5, 0.5))


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(tmp_path, capsys):
    """Its first word ended the run with an IndexError."""
    path = tmp_path / "model.json"
    path.write_text(json.dumps(changed("text_cfg", vocab_size=10)))
    arguments = [*TRAIN, "--model", path, "--logs", tmp_path]
    assert_refused("model.small_vocabulary", arguments, capsys, "49408")


def test_every_architecture_of_open_clip_passes():
    for name in open_clip.list_models():
        config = open_clip.get_model_config(name)
        assert config is not None
        check_sizes(config, name, in_memory=False)


def test_weights_that_lie_about_their_size_are_refused(tmp_path):
    """Bombs: one number that is repeated, and an archive that is compressed."""
    torch.save({"positional_embedding": torch.zeros(1).expand(10**6, 10**5)}, tmp_path / "repeated.pt")
    with refuses("weights.unsafe", "100,000,000,000"):
        check_weights(tmp_path / "repeated.pt")
    torch.save({"weight": torch.zeros(10**6)}, tmp_path / "plain.pt")
    with (
        zipfile.ZipFile(tmp_path / "plain.pt") as plain,
        zipfile.ZipFile(tmp_path / "deflated.pt", "w", zipfile.ZIP_DEFLATED) as deflated,
    ):
        for name in plain.namelist():
            deflated.writestr(name, plain.read(name))
    check_weights(tmp_path / "plain.pt")
    with refuses("weights.damaged"):
        check_weights(tmp_path / "deflated.pt")
    torch.save({"epoch": 3}, tmp_path / "empty.pt")
    with refuses("weights.not_weights"):
        check_weights(tmp_path / "empty.pt")


@pytest.mark.usefixtures("offline_hub")
def test_a_hub_name_without_network_is_one_line(tmp_path, capsys):
    for flags in (["--model", "hf-hub:some/model"], ["--model", "ViT-B-32", "--pretrained", "hf-hub:some/model"]):
        arguments = [*TRAIN, *flags, "--logs", tmp_path / "logs"]
        assert_refused("hub.unavailable", arguments, capsys, "hf-hub:some/model", "network")


def test_an_unreachable_hub_is_not_asked_again_and_again(tmp_path, monkeypatch, capsys):
    """Its library retries every request for half a minute."""
    refused = []

    def refuse(address, timeout):
        refused.append((address, timeout))
        raise OSError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("leanclip.models.open_clip_api.getproxies", dict)
    monkeypatch.setattr("leanclip.models.open_clip_api.socket.create_connection", refuse)
    line = refusal([*TRAIN, "--model", "hf-hub:some/model", "--logs", str(tmp_path / "logs")], capsys)
    assert line.endswith("[hub.unavailable]") and "cannot be reached" in line
    assert [address for address, _ in refused] == [("huggingface.co", 443)] and refused[0][1] < 5
    assert huggingface_hub.constants.HF_HUB_OFFLINE  # its library asks nothing either


def test_a_hub_name_is_found_in_the_cache(tmp_path, offline_hub):
    """Laid out as huggingface_hub does."""
    (tmp_path / "small.json").write_text(json.dumps(SMALL))
    model = create_model(ModelConfig(model=str(tmp_path / "small.json")))
    snapshot = offline_hub("some", "model")
    saved(snapshot, SMALL, mean=[0.25, 0.5, 0.75])
    save_file(model.clip.state_dict(), snapshot / "open_clip_model.safetensors")
    again = create_model(ModelConfig(model=f"{HUB}some/model", pretrained=f"{HUB}some/model"))
    torch.testing.assert_close(dict(again.clip.state_dict()), dict(model.clip.state_dict()), rtol=0, atol=0)
    assert again.image_mean.flatten().tolist() == [0.25, 0.5, 0.75]
    assert again.summary()[0].weights == "hf-hub:some/model"


def test_a_directory_with_a_config_names_an_architecture(tmp_path):
    """What the message for a hub that cannot be reached advises, for --model too."""
    tiny = create_model(ModelConfig(model="leanclip-tiny"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "open_clip_config.json").write_text(json.dumps(tiny.open_clip_config()))
    again = create_model(ModelConfig(model=str(tmp_path / "mine")))
    assert again.config == tiny.config and again.preprocess == tiny.preprocess

"""Any two towers: put together, trained, saved with all they need, and loaded by open_clip alone."""

import json
import shutil
import subprocess
import sys

import open_clip
import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

import leanclip
from leanclip.config import TrainConfig, override
from leanclip.data.datasets import BUNDLED
from leanclip.models import ModelConfig, create_model, load_model
from leanclip.models.text_length import MOST_BUCKETS
from leanclip.training.model_setup import model_for_run
from leanclip.training.probe import _texts
from refusal import assert_refused, refuses
from refusal import exit_code as command

TEXTS = ["a cat", "two", "a red dog a red dog", ""]
TRAIN = ["train", "--train-data", BUNDLED / "val-*.tar", "--batch-size", "8", "--max-steps", "2", "--workers", "0",
         "--device", "cpu", "--eval-every", "0", "--save-every", "1", "--warmup", "0", "--lr", "1e-3", "--model",
         "leanclip-tiny"]  # fmt: skip


@pytest.fixture(scope="module")
def timm_weights(tmp_path_factory):
    """State dicts as timm saves them, classifier included."""
    folder = tmp_path_factory.mktemp("timm")
    for name in ("test_efficientnet", "test_vit"):
        torch.manual_seed(1)
        model = timm.create_model(name, pretrained=False)
        weights = {key: value.contiguous() for key, value in model.state_dict().items()}
        save_file(weights, folder / f"{name}.safetensors")
    return folder


def towers(bert, timm_weights, name="test_efficientnet", **changed):
    config = ModelConfig(
        model="leanclip-tiny", image_tower=f"timm:{name}", text_tower=f"hf:{bert}", pretrained_text=str(bert),
        pretrained_image=str(timm_weights / f"{name}.safetensors"), **changed
    )  # fmt: skip
    return create_model(config)


def test_two_towers_make_a_model(bert, timm_weights):
    model = towers(bert, timm_weights, name="test_vit")
    assert type(model.clip).__name__ == "CustomTextCLIP" and model.config["embed_dim"] == 128
    for name, value in load_file(timm_weights / "test_vit.safetensors").items():
        if not name.startswith("head."):
            assert torch.equal(model.clip.visual.trunk.state_dict()[name], value), name
    for name, value in load_file(bert / "model.safetensors").items():
        if not name.startswith("pooler."):
            assert torch.equal(model.clip.text.transformer.state_dict()[name], value), name
    assert model.preprocess.mean == [0.5, 0.5, 0.5]  # timm's, not CLIP's
    assert model.clip.visual.image_size == (160, 160)
    assert [tower.weights for tower in model.summary()] == [str(timm_weights / "test_vit.safetensors"), str(bert)]
    assert type(model.clip.visual.head.proj) is torch.nn.Linear and type(model.clip.text.proj) is torch.nn.Linear
    other = towers(bert, timm_weights, head="mlp", image_mean=(0.1, 0.2, 0.3), embed_dim=24).eval()
    assert other.encode_image(torch.randn(2, 3, 160, 160)).shape == (2, 24)
    assert other.encode_text(other.tokenizer(["a", "b"])).shape == (2, 24)
    assert hasattr(other.clip.visual.head, "mlp") and len(other.clip.text.proj) == 3
    assert other.image_mean.flatten().tolist() == pytest.approx([0.1, 0.2, 0.3])


def test_towers_of_open_clip_are_taken_from_its_models(tmp_path, bert):
    whole = create_model(ModelConfig(model="leanclip-tiny"))
    torch.save(whole.clip.state_dict(), tmp_path / "whole.pt")
    file = str(tmp_path / "whole.pt")
    mixed = create_model(ModelConfig(model="leanclip-tiny", text_tower=f"hf:{bert}", pretrained_image=file))
    assert torch.equal(mixed.clip.visual.conv1.weight, whole.clip.visual.conv1.weight)
    other = create_model(ModelConfig(model="ViT-S-32-alt", text_tower="leanclip-tiny"), shapes_only=True)
    assert other.config["vision_cfg"] == open_clip.get_model_config("ViT-S-32-alt")["vision_cfg"]  # pyright: ignore
    both = create_model(
        ModelConfig(model="leanclip-tiny", image_tower="leanclip-tiny", pretrained_image=file, pretrained_text=file)
    )
    tokens = whole.tokenizer(["a cat"])
    assert torch.allclose(both.eval().encode_text(tokens), whole.eval().encode_text(tokens), atol=1e-6)


@pytest.mark.parametrize("locked", [(), ("text",), ("image", "text")])
@pytest.mark.parametrize("kind", ["whole", "whole, custom text", "text tower alone"])
def test_the_text_tower_of_a_plain_clip_takes_weights(kind, locked, tmp_path):
    """Its parts lie in the model itself, beside the image tower."""
    whole = create_model(ModelConfig(model="leanclip-tiny", force_custom_text="custom" in kind))
    weights = {name: value.contiguous() for name, value in whole.clip.state_dict().items()}
    if kind == "text tower alone":
        weights = {name: v for name, v in weights.items() if not name.startswith(("visual.", "logit_"))}
    save_file(weights, file := tmp_path / "weights.safetensors")
    files = {"pretrained_text": str(file)} | ({"pretrained_image": str(file)} if "image" in locked else {})
    settings = {"model": "leanclip-tiny"} | files | {f"lock_{side}": True for side in locked}
    config = override(TrainConfig(), settings, "test")
    if "image" in locked and kind == "text tower alone":
        with refuses("weights.other_model"):
            model_for_run(config)
        return
    model = model_for_run(config).eval()
    assert not hasattr(model.clip, "text") and not model.new_projections
    tokens, pixels = whole.tokenizer(TEXTS), torch.randn(2, 3, *whole.image_size)
    assert torch.allclose(model.encode_text(tokens), whole.eval().encode_text(tokens), atol=1e-6)
    assert torch.allclose(model.encode_image(pixels), whole.encode_image(pixels), atol=1e-6) == ("image" in locked)
    text = next(tower for tower in model.summary() if tower.side == "text")
    assert text.weights == str(file) and bool(text.frozen_layers) == ("text" in locked)
    assert model.clip.text_projection.requires_grad and model.clip.visual.attnpool.c_proj.weight.requires_grad


def test_a_text_tower_without_its_projection_gets_a_new_one(tmp_path):
    weights = create_model(ModelConfig(model="leanclip-tiny")).clip.state_dict()
    del weights["text_projection"]
    save_file({name: value.contiguous() for name, value in weights.items()}, file := tmp_path / "weights.safetensors")
    model = create_model(ModelConfig(model="leanclip-tiny", pretrained_text=str(file)))
    assert model.new_projections == {"text"}
    del weights["ln_final.bias"]
    save_file({name: value.contiguous() for name, value in weights.items()}, file)
    with refuses("weights.other_model", "ln_final.bias is missing"):
        create_model(ModelConfig(model="leanclip-tiny", pretrained_text=str(file)))


def test_position_embeddings_are_resized(bert, timm_weights):
    model = towers(bert, timm_weights, name="test_vit", force_image_size=64).eval()
    assert model.encode_image(torch.randn(2, 3, 64, 64)).shape == (2, 128)
    stored = load_file(timm_weights / "test_vit.safetensors")["pos_embed"]
    resized = model.clip.visual.trunk.pos_embed.detach()
    assert resized.shape[1] < stored.shape[1] and float((resized.mean() - stored.mean()).abs()) < 0.01


def test_texts_of_transformers_run_at_the_length_of_the_longest(bert, timm_weights):
    model = towers(bert, timm_weights).double().eval()
    tokens = model.tokenizer(TEXTS)
    lengths = []
    model.clip.text.transformer.embeddings.register_forward_hook(lambda _, __, out: lengths.append(out.shape[1]))
    with torch.no_grad():
        trimmed, padded = model.encode_text(tokens), model.clip.encode_text(tokens, normalize=True)
    assert torch.allclose(trimmed, padded, atol=1e-5)
    assert lengths == [8, tokens.shape[1]] and model.padding_reason is None


def test_passes_are_measured_with_captions_of_the_length_asked_for(bert, timm_weights):
    model = towers(bert, timm_weights)
    longest = model.tokenizer(TEXTS).shape[1]
    for length, width in ((None, longest), (16, 16), (longest + 1, longest)):
        assert _texts(model, 3, length).shape == (3, width)


def test_texts_of_transformers_run_in_buckets_of_similar_length(bert, timm_weights):
    model = towers(bert, timm_weights).double().eval()
    texts = [("cat " * (40 if number % 7 == 3 else 1 + number % 5)).strip() for number in range(60)]
    tokens, shapes = model.tokenizer(texts), []
    model.clip.text.transformer.embeddings.register_forward_hook(lambda _, __, out: shapes.append(out.shape[:2]))

    def results(buckets):
        model.buckets = buckets
        model.zero_grad()
        embeddings = model.encode_text(tokens)
        (embeddings * torch.arange(60.0)[:, None]).sin().sum().backward()
        return [
            embeddings,
            *(parameter.grad for parameter in model.clip.text.parameters() if parameter.grad is not None),
        ]

    torch.testing.assert_close(results(True), results(False), rtol=1e-5, atol=1e-9)
    *divided, whole = shapes
    assert 2 <= len(divided) <= MOST_BUCKETS and sum(rows for rows, _ in divided) == whole[0] == 60
    assert sum(rows * width for rows, width in divided) < 0.5 * 60 * whole[1]
    assert isinstance(model.texts(model.tokenizer(TEXTS)), torch.Tensor)  # so few that it does not pay


# Runs where leanclip is never imported, after the source of the text tower is gone.
FOREIGN = """
import sys, warnings, torch, open_clip
warnings.simplefilter("ignore")
given = torch.load(sys.argv[1], weights_only=True)
LOAD
tokens = open_clip.get_tokenizer(NAME)(given["texts"])
with torch.no_grad():
    image, text = model.eval().encode_image(given["pixels"], True), model.encode_text(tokens, True)
assert torch.allclose(image, given["image"], atol=1e-5), (image - given["image"]).abs().max()
assert torch.allclose(text, given["text"], atol=1e-5), (text - given["text"]).abs().max()
assert not any(module.startswith("leanclip") for module in sys.modules)
"""


def test_a_trained_pair_of_towers_needs_nothing_else(bert, timm_weights, tmp_path, capsys):
    """Trained, killed between two steps and resumed, moved, exported: always without the source of the text tower."""
    source = shutil.copytree(bert, tmp_path / "source")
    flags = [*TRAIN, "--image-tower", "timm:test_efficientnet", "--text-tower", f"hf:{source}", "--pretrained-image",
             timm_weights / "test_efficientnet.safetensors", "--pretrained-text", source, "--force-image-size", 32,
             "--lock-image", "--embed-dim", 40, "--logs", tmp_path, "--name", "run"]  # fmt: skip
    assert command(*flags) == 0
    assert f"timm:test_efficientnet + hf:{source}" in capsys.readouterr().out  # the summary names the towers
    shutil.rmtree(source)
    assert command(*flags, "--resume", tmp_path / "run/checkpoints/step_00000001", "--max-steps", "3") == 0, (
        capsys.readouterr()
    )
    ours, _, tokenizer = leanclip.load(tmp_path / "run")
    assert ours.clip.visual.image_size == (32, 32) and ours.preprocess.std == [0.229, 0.224, 0.225]
    assert ours.config["embed_dim"] == 40
    pixels = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        image, text = ours.encode_image(pixels), ours.encode_text(tokenizer(TEXTS))
    torch.save({"pixels": pixels, "texts": TEXTS, "image": image, "text": text}, tmp_path / "given.pt")
    capsys.readouterr()
    assert command("export", tmp_path / "run", tmp_path / "out" / "pair.safetensors") == 0
    shown = capsys.readouterr().out
    exported = shown[shown.index("import open_clip") :]
    checkpoint = f"local-dir:{tmp_path}/run/checkpoints/last"
    script = FOREIGN.replace("LOAD", exported).replace("NAME", "'pair'")
    script += FOREIGN.replace("LOAD", f"model = open_clip.create_model({checkpoint!r})").replace(
        "NAME", repr(checkpoint)
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "given.pt")], check=True, timeout=240)

    again = load_model(tmp_path / "out" / "pair.safetensors").eval()
    with torch.no_grad():
        assert torch.allclose(again.encode_text(again.tokenizer(TEXTS)), text, atol=1e-6)
    moved = shutil.copytree(tmp_path / "run/checkpoints/last/", tmp_path / "moved")
    shutil.rmtree(tmp_path / "run")
    with torch.no_grad():
        assert torch.allclose(load_model(moved).eval().encode_text(tokenizer(TEXTS)), text, atol=1e-6)


def test_towers_that_do_not_fit_are_one_line(bert, timm_weights, tmp_path, capsys):
    base = [*map(str, TRAIN), "--logs", str(tmp_path / "logs")]

    vit, wide, narrow = timm_weights / "test_vit.safetensors", tmp_path / "wide.pt", tmp_path / "narrow.json"
    torch.save(create_model(ModelConfig(model="leanclip-tiny")).clip.state_dict(), wide)
    config = open_clip.get_model_config("leanclip-tiny")
    narrow.write_text(json.dumps(config | {"embed_dim": 64}))  # pyright: ignore
    for name, model_type in (("unknown", None), ("gpt2", "gpt2"), ("list", [])):
        (tmp_path / name).mkdir()
        if model_type is not None:
            (tmp_path / name / "config.json").write_text(json.dumps({"model_type": model_type}))
    text, head, projection = f"hf:{bert}", "attnpool.c_proj.weight is", "text_projection is"
    for settings, code, *words in (
        ({"image_tower": "timm:test_efficientnet", "pretrained_image": vit}, "weights.other_model",
         "conv_stem.weight is missing", "more"),
        ({"model": narrow, "text_tower": text, "pretrained_image": wide}, "weights.other_model",
         f"{head} (128, 512) in the file and (64, 512)"),
        ({"model": narrow, "pretrained": wide}, "weights.other_model",
         f"{projection} (128, 128) in the file and (128, 64) in"),
        ({"model": "leanclip-tiny", "pretrained": vit}, "weights.other_model",
         "positional_embedding is missing", "more"),
        ({"text_tower": text, "pretrained_text": wide}, "weights.other_model"),
        ({"image_tower": "timm:test_vitt"}, "model.unknown"),
        ({"text_tower": f"hf:{tmp_path / 'unknown'}"}, "model.config_not_found"),
        ({"image_tower": "timm:test_vit", "pretrained_image": "absent"}, "weights.not_found"),
        ({"image_tower": "timm:test_vit", "pretrained_image": tmp_path}, "weights.not_found"),
        ({"text_tower": f"hf:{tmp_path / 'gpt2'}"}, "model.unsupported_text_tower", "roberta"),
        ({"image_tower": "timm:test_vit", "pretrained": vit}, "config.bad_value", "--pretrained-image"),
        ({"embed_dim": 64}, "config.bad_value"),
        ({"image_tower": "timm:test_vit", "embed_dim": 0}, "config.bad_value"),
        ({"image_tower": "ViT-B-32-quickgelu", "text_tower": "ViT-B-32"}, "model.other_activation"),
    ):  # fmt: skip
        flags = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        assert_refused(code, [*base, *flags], capsys, *words)
    assert not any((tmp_path / "logs").glob("*"))


def test_a_refusal_leaves_the_run_that_it_would_overwrite(timm_weights, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    base = [*map(str, TRAIN), "--logs", str(tmp_path / "logs"), "--name", "run"]
    assert command(*base) == 0
    capsys.readouterr()

    def files():
        names = [path for path in (tmp_path / "logs").rglob("*") if path.is_file() and path.name != ".lock"]
        return {path: path.read_bytes() for path in names}

    before, run, vit = files(), str(tmp_path / "logs/run"), str(timm_weights / "test_vit.safetensors")
    for words, code in (
        (["--pretrained", vit], "weights.other_model"),
        (["--image-tower", "timm:test_efficientnet", "--pretrained-image", vit], "weights.other_model"),
        (["--image-tower", "timm:test_vit", "--lock-image", "--cache-locked", "1"], "model.locked_without_weights"),
        (["--pretrained", run, "--lock-text", "--lora-text", "4"], "config.bad_value"),
        (["--pretrained", run, "--embed-dim", "64"], "config.bad_value"),
        (["--pretrained", "hf-hub:some/model"], "hub.unavailable"),
        (["--text-tower", "hf:some/bert"], "hub.unavailable"),
    ):
        assert_refused(code, [*base, *words, "--overwrite"], capsys)
        assert files() == before, words


def test_weights_of_towers_come_from_the_hub(bert, offline_hub):
    with refuses("hub.unavailable", "network"):
        create_model(ModelConfig(model="leanclip-tiny", text_tower="hf:some/bert"))
    with refuses("hub.unavailable", "test_vit"):
        name = "timm:test_vit.r160_in1k"
        create_model(ModelConfig(model="leanclip-tiny", image_tower=name, pretrained_image=name))
    shutil.copytree(bert, offline_hub("some", "bert"), dirs_exist_ok=True)
    model = create_model(ModelConfig(model="leanclip-tiny", text_tower="hf:some/bert", pretrained_text="some/bert"))
    stored = load_file(bert / "model.safetensors")["encoder.layer.0.attention.self.query.weight"]
    assert torch.equal(model.clip.text.transformer.encoder.layer[0].attention.self.query.weight, stored)

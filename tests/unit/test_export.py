"""Exported models have the same embeddings in other libraries; unsupported models are refused."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import leanclip
from leanclip.models import ModelConfig, create_model, model_config_of, transformers_clip
from leanclip.models.transformers_clip import unsupported
from refusal import exit_code, refusal, refusal_code

ROOT = Path(__file__).parents[2]
TEXT = {"context_length": 24, "vocab_size": 49408, "width": 64, "heads": 4, "layers": 2}
VIT = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 64, "head_width": 32, "patch_size": 8},
    "text_cfg": TEXT,
}
RESNET = VIT | {"vision_cfg": {"image_size": 32, "layers": [1, 1, 1, 1], "width": 16, "patch_size": None}}
ODD = [
    "a cat", "A  CAT\n\t", "it's John's, don't WE'RE 'LL", "café naïve", "cafe\u0301", "日本語", "한국어", "हिन्दी",
    "🙂 👩\u200d👩\u200d👧", "100% 3.14 1,000", "", " ", "a" * 300, "Ünïcödé İstanbul ẞ", "x\u200by", "a\u00a0b",
    "hello...world!!!", "_under_score_", "10½ ² ① Ⅳ", "😀" * 50, "—–…", "<b>html</b>", "word " * 100,
    "e\u0301\u0302", "[SEP] <s> \\n",
]  # fmt: skip


def checkpoint(directory, config):
    """A checkpoint whose weights are all random, gains and biases too."""
    directory.mkdir()
    (directory / "model.json").write_text(json.dumps(config))
    model = create_model(ModelConfig(model=str(directory / "model.json")))
    torch.manual_seed(3)
    weights = {
        name: value + 0.1 * torch.randn_like(value) if value.is_floating_point() and "running" not in name else value
        for name, value in model.clip.state_dict().items()
    }
    save_file(weights, directory / "open_clip_model.safetensors")
    (directory / "open_clip_config.json").write_text(json.dumps(model.open_clip_config()))
    return directory


def export(*arguments):
    assert exit_code("export", *map(str, arguments)) == 0


def modes(folder):
    return {path.stat().st_mode & 0o777 for path in folder.iterdir()}


def refused(capsys, *arguments):
    """The code of the refusal."""
    return refusal_code(refusal(["export", *map(str, arguments)], capsys))


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*_):
        raise AssertionError("a connection is opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def embeddings(directory, texts):
    model, _, tokenizer = leanclip.load(directory)
    pixels = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        return model, pixels, model.encode_image(pixels), model.encode_text(tokenizer(texts))


@pytest.mark.parametrize(("quick_gelu", "custom_text"), [(True, False), (False, True)])
def test_transformers_computes_the_same_embeddings(quick_gelu, custom_text, tmp_path, no_network, capsys):
    directory = checkpoint(tmp_path / "ours", VIT | {"quick_gelu": quick_gelu, "custom_text": custom_text})
    out = tmp_path / "theirs"
    (tmp_path / "mode").mkdir()
    (tmp_path / "mode" / "any file").touch()
    export(directory, out, "--format", "transformers")
    assert "embeddings equal to 1e-05" in capsys.readouterr().out

    assert modes(out) == modes(tmp_path / "mode")

    from transformers import AutoProcessor, AutoTokenizer, CLIPModel

    theirs = CLIPModel.from_pretrained(out).eval()
    processor = AutoProcessor.from_pretrained(out)
    assert json.loads((out / "config.json").read_text())["text_config"]["hidden_act"] == (
        "quick_gelu" if quick_gelu else "gelu"
    )
    model, pixels, image, text = embeddings(directory, ODD)
    tokens = processor.tokenizer(ODD, padding=True, truncation=True, return_tensors="pt")
    padding = tokens["attention_mask"] == 0
    assert torch.equal(tokens["input_ids"].masked_fill(padding, 0), model.tokenizer(ODD))
    for word in ("don’t", "&amp;", "ﬁne", "SchÃ¶n"):  # open_clip repairs these with ftfy, as docs/export.md says
        assert processor.tokenizer(word)["input_ids"] != [
            token for token in model.tokenizer(word)[0].tolist() if token
        ]
    assert tokens["input_ids"].shape[1] == 24  # the saved tokenizer truncates
    with torch.no_grad():
        outputs = theirs(pixel_values=pixels, **tokens)
        logits = image @ text.T * model.clip.logit_scale.exp()
    assert torch.allclose(outputs.image_embeds, image, atol=1e-5)
    assert torch.allclose(outputs.text_embeds, text, atol=1e-5)
    assert torch.allclose(outputs.logits_per_image, logits, atol=1e-4)
    assert type(AutoTokenizer.from_pretrained(out)).__name__ == "CLIPTokenizer"

    picture = Image.effect_noise((70, 50), 80).convert("RGB").resize((140, 100), Image.Resampling.BICUBIC)
    ours = model.transform()(picture)
    pixels = processor(images=picture, return_tensors="pt")["pixel_values"][0]
    assert pixels.shape == ours.shape and float((pixels - ours).abs().max()) < 2 / 255 / 0.26  # rounding when resized

    card = (out / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers") and "| Embedding size | 32 |" in card


def test_open_clip_computes_the_same_embeddings(tmp_path, capsys):
    (tmp_path / "mode").mkdir()
    (tmp_path / "mode" / "any file").touch()
    script = "import sys, warnings, torch\nwarnings.simplefilter('ignore')\n"
    for name, config, suffix in (("vit", VIT, "safetensors"), ("resnet", RESNET, "pt")):
        directory = checkpoint(tmp_path / name, config)
        export(directory, tmp_path / "some" / f"{name}.{suffix}")
        shown = capsys.readouterr().out
        assert modes(tmp_path / "some") == modes(tmp_path / "mode")
        _, pixels, image, text = embeddings(directory, ODD)
        torch.save({"pixels": pixels, "image": image, "text": text}, tmp_path / f"{name}.pt")
        script += f"""
{shown[shown.index("import open_clip") :]}
given = torch.load({str(tmp_path / f"{name}.pt")!r}, weights_only=True)
tokens = open_clip.get_tokenizer("{name}")({ODD!r})
with torch.no_grad():
    image, text = model.eval().encode_image(given["pixels"], True), model.encode_text(tokens, True)
assert torch.allclose(image, given["image"], atol=1e-5) and torch.allclose(text, given["text"], atol=1e-5)
"""
    script += "assert not any(module.startswith('leanclip') for module in sys.modules)\n"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ViT-B-32", "ViT-B-32-quickgelu", "RN50"])
def test_whole_models_are_exported(name, tmp_path, capsys):
    directory = checkpoint(tmp_path / "ours", model_config_of(name)[1])
    export(directory, tmp_path / "model.pt")
    assert f"create_model_and_transforms('{name}', pretrained=" in capsys.readouterr().out
    if name != "RN50":
        export(tmp_path / "model.pt", tmp_path / "theirs", "--format", "transformers", "--model", name)
        assert "embeddings equal to 1e-05" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("model", "change", "preprocess", "reason"),
    [
        ("RN50", {}, {}, "ResNet"),
        ("ViT-B-16-SigLIP", {}, {}, "timm's vit_base_patch16_siglip_224"),
        ("convnext_base", {}, {}, "timm's convnext_base"),
        ("coca_ViT-B-32", {}, {}, "CoCa"),
        ("roberta-ViT-B-32", {}, {}, "text tower is roberta-base"),
        ("ViT-L-14-CLIPA", {}, {}, "vision_cfg has no_ln_pre = True"),
        ("ViT-B-32", {}, {}, "None"),
        ("ViT-B-32", {"vision_cfg": {"pool_type": "avg"}}, {}, "vision_cfg has pool_type = avg"),
        ("ViT-B-32", {"vision_cfg": {"image_size": [32, 64]}}, {}, "not square"),
        ("ViT-B-32", {"vision_cfg": {"qk_norm": True}}, {}, "qk_norm"),
        ("ViT-B-32", {"text_cfg": {"pool_type": "last"}}, {}, "text_cfg has pool_type = last"),
        ("ViT-B-32", {"text_cfg": {"no_causal_mask": True}}, {}, "no_causal_mask"),
        ("ViT-B-32", {"text_cfg": {"vocab_size": 32000}}, {}, "vocabulary has 32000"),
        ("ViT-B-32", {"text_cfg": {"tokenizer_kwargs": {"clean": "canonicalize"}}}, {}, "tokenizer_kwargs"),
        ("ViT-B-32", {"init_logit_bias": -10}, {}, "bias"),
        ("ViT-B-32", {}, {"resize_mode": "longest"}, "padded"),
    ],
)
def test_unsupported_models(model, change, preprocess, reason):
    config = model_config_of(model)[1]
    changed = {key: config[key] | value if key in config else value for key, value in change.items()}
    assert reason in str(unsupported(config | changed, preprocess))


def test_refusals_write_nothing(tmp_path, capsys, monkeypatch):
    resnet, out = checkpoint(tmp_path / "ours", RESNET), tmp_path / "out"
    over = ["--format", "transformers", "--overwrite"]
    assert refused(capsys, resnet, out, *over) == "export.unsupported_model"
    assert refused(capsys, resnet, out) == "export.bad_suffix"
    alone = (resnet / "open_clip_model.safetensors").rename(resnet / "alone.safetensors")
    assert refused(capsys, alone, "x.pt") == "export.missing_model"
    alone.rename(resnet / "open_clip_model.safetensors")
    assert refused(capsys, resnet, "x.pt", "--model", "RN50") == "export.unexpected_model"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours"]
    file = tmp_path / "file.pt"
    file.write_text("mine")
    assert refused(capsys, resnet, file) == refused(capsys, resnet, file, *over) == "export.exists"
    for absent in (["absent"], ["absent.pt", "--model", "ViT-B-32"]):
        assert refused(capsys, absent[0], file, *absent[1:]) == "checkpoint.not_found"
    assert file.read_text() == "mine"
    out.mkdir()
    (out / "thesis.tex").write_text("x")
    assert refused(capsys, resnet, out, *over) == refused(capsys, resnet, out, "--overwrite") == "export.exists"
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert refused(capsys, resnet, tmp_path / "new", "--format", "transformers") == "install.transformers"


def test_a_config_of_another_model_is_kept(tmp_path, capsys):
    vit, resnet = checkpoint(tmp_path / "vit", VIT), checkpoint(tmp_path / "resnet", RESNET)
    config = tmp_path / "one.json"
    config.write_text(json.dumps(VIT))  # the user's own, on one line
    export(vit / "open_clip_model.safetensors", tmp_path / "one.safetensors", "--model", config)
    assert f"wrote {config}" not in capsys.readouterr().out
    assert refused(capsys, resnet, tmp_path / "one.pt") == "export.exists"
    assert config.read_text() == json.dumps(VIT) and not (tmp_path / "one.pt").exists()
    export(resnet, tmp_path / "one.pt", "--overwrite")
    assert f"wrote {config}" in capsys.readouterr().out and json.loads(config.read_text()) == RESNET


def test_an_export_with_other_embeddings_is_not_written(tmp_path, capsys, monkeypatch):
    renamed = transformers_clip.renamed

    def swapped(weights):
        converted = renamed(weights)
        one, two = (f"vision_model.encoder.layers.0.layer_norm{number}.bias" for number in (1, 2))
        return converted | {one: converted[two], two: converted[one]}

    monkeypatch.setattr(transformers_clip, "renamed", swapped)
    directory = checkpoint(tmp_path / "ours", VIT)
    assert refused(capsys, directory, tmp_path / "out", "--format", "transformers") == "export.different"
    assert list(tmp_path.iterdir()) == [directory]


def test_an_export_is_kept_until_its_replacement_is_complete(tmp_path, capsys, monkeypatch):
    vit, resnet = checkpoint(tmp_path / "vit", VIT), checkpoint(tmp_path / "resnet", RESNET)
    out, over = tmp_path / "out", ["--format", "transformers", "--overwrite"]
    export(vit, out, *over)
    (out / "mine.txt").write_text("old")

    def only_the_old_one():
        return (
            sorted(path.name for path in tmp_path.iterdir()) == ["out", "resnet", "vit"]
            and (out / "mine.txt").is_file()
        )

    assert refused(capsys, resnet, out, *over) == "export.unsupported_model" and only_the_old_one()
    out.rename(tmp_path / ".out.old")  # where a process was killed between the two renames
    (tmp_path / ".out.tmp").mkdir()
    (tmp_path / ".out.tmp" / "half.txt").write_text("half")
    assert refused(capsys, resnet, out, *over) == "export.unsupported_model" and only_the_old_one()
    with monkeypatch.context() as patch:
        rename = Path.rename
        patch.setattr(Path, "rename", lambda path, to: rename(path, to) if path.name != ".out.tmp" else 1 / 0)
        with pytest.raises(ZeroDivisionError):
            export(vit, out, *over)
    assert only_the_old_one()
    export(vit, out, *over)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "resnet", "vit"]
    assert (out / "config.json").is_file() and not (out / "mine.txt").exists()

"""Exports agree with the model in processes that do not import leanclip; ONNX from the command line."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from test_export import VIT, checkpoint, export, refused

from leanclip.models import ModelConfig, create_model, load_model
from leanclip.models.export import export_onnx, export_open_clip, export_transformers
from leanclip.models.formats import onnx_towers
from leanclip.models.formats.onnx_towers import pixels_of

TEXTS = ["a photo of a cat", "two dogs", "red", "word " * 40]


def write_exports(folder, model, formats):
    """All exports of a model, and what it computes itself."""
    folder.mkdir()
    pixels = pixels_of(model, 3)
    with torch.no_grad():
        image, text = model.eval().encode_image(pixels), model.encode_text(model.tokenizer(TEXTS))
    np.savez(folder / "expected.npz", pixels=pixels.numpy(), image=image.numpy(), text=text.numpy())
    (folder / "texts.json").write_text(json.dumps(TEXTS))
    for name in formats:
        if name == "open_clip":
            (folder / name / "options").mkdir(parents=True)
            export_open_clip(model, folder / name / f"exported-{folder.name}.safetensors")
            options = {"mean": model.preprocess.mean, "std": model.preprocess.std}
            (folder / name / "options" / "options.json").write_text(json.dumps(options))
        else:
            write = {"onnx": export_onnx, "transformers": export_transformers}[name]
            write(model, folder / name, lambda: "card")
    return folder


@pytest.mark.timeout(600)
def test_embeddings_agree_in_processes_without_leanclip(bert, tmp_path):
    vit = load_model(checkpoint(tmp_path / "weights", VIT))
    torch.manual_seed(0)
    demo = create_model(ModelConfig(model="leanclip-tiny"))
    composed = create_model(ModelConfig(model="leanclip-tiny", image_tower="timm:test_vit", text_tower=f"hf:{bert}"))
    folders = [
        write_exports(tmp_path / "vit", vit, ("onnx", "open_clip", "transformers")),
        write_exports(tmp_path / "demo", demo, ("onnx", "open_clip")),
        write_exports(tmp_path / "composed", composed, ("onnx", "open_clip")),
    ]
    script = Path(__file__).with_name("load_exports.py")
    done = subprocess.run(
        [sys.executable, script, *folders], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(rows) == 7
    assert all(row["difference"] <= 1e-4 for row in rows), rows


def test_onnx_from_the_command_line(tmp_path, capsys, monkeypatch):
    directory, out = checkpoint(tmp_path / "ours", VIT), tmp_path / "out"
    export(directory, out, "--format", "onnx")
    assert "embeddings equal to 0.0001" in capsys.readouterr().out
    assert {path.name for path in out.iterdir()} >= {
        "image.onnx", "text.onnx", "preprocess.json", "tokenizer.json", "README.md"
    }  # fmt: skip
    card = (out / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: onnx\npipeline_tag: zero-shot-image-classification\n")
    assert "| Embedding size | 32 |" in card and "onnxruntime" in card
    preprocess = json.loads((out / "preprocess.json").read_text())
    assert preprocess["image"]["size"] == [32, 32] and preprocess["text"]["context_length"] == 24
    assert refused(capsys, directory, out, "--format", "onnx") == "export.exists"
    assert refused(capsys, directory, tmp_path / "x.pt", "--format", "onnx", "--overwrite", "--model", "RN50") == (
        "export.unexpected_model"
    )
    for library in ("onnxruntime", "onnxscript"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, library, None)
            assert refused(capsys, directory, tmp_path / "other", "--format", "onnx") == "install.onnx"
    assert not (tmp_path / "other").exists()


def test_an_onnx_export_that_differs_is_not_written(tmp_path, capsys, monkeypatch):
    directory = checkpoint(tmp_path / "ours", VIT)
    monkeypatch.setattr(onnx_towers, "save", lambda folder, model: None)
    monkeypatch.setattr(
        onnx_towers, "load", lambda folder, model: (model.encode_image, lambda texts: torch.ones(5, 32))
    )
    assert refused(capsys, directory, tmp_path / "out", "--format", "onnx") == "export.different"
    assert list(tmp_path.iterdir()) == [directory]


def test_directories_are_ready_for_a_hub(tmp_path, small_run):
    """Weights, configuration and a card that the hub's own library reads; no hidden files."""
    from huggingface_hub import ModelCard

    export(small_run, tmp_path / "transformers", "--format", "transformers")
    weights = {
        "transformers": ("model.safetensors", "config.json", "tokenizer.json"),
        "open_clip": ("open_clip_model.safetensors", "open_clip_config.json"),
    }
    for library, files in weights.items():
        folder = tmp_path / library if library == "transformers" else small_run / "checkpoints/last"
        names = {path.name for path in folder.iterdir()}
        assert names >= {*files, "README.md"} and not any(name.startswith(".") for name in names)
        card = ModelCard.load(folder / "README.md").data.to_dict()
        assert card["library_name"] == library and card["pipeline_tag"] == "zero-shot-image-classification"
        assert {"clip", library, "leanclip"} <= set(card["tags"]) and card["license"] == "unknown"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ViT-B-32", "RN50", "convnext_base", "coca_ViT-B-32"])
def test_whole_models_as_onnx(name, tmp_path):
    torch.manual_seed(0)
    exported = export_onnx(create_model(ModelConfig(model=name)).eval(), tmp_path / "out", lambda: "card")
    assert exported.difference <= 1e-4

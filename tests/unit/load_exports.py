"""Computes embeddings from exports with the libraries that they are for. A process that does not import leanclip."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import torch


def onnx(folder, pixels, texts):
    import onnxruntime
    from tokenizers import Tokenizer

    preprocess = json.loads((folder / "preprocess.json").read_text())
    encoded = Tokenizer.from_file(str(folder / preprocess["text"]["tokenizer"])).encode_batch(texts)
    tokens = np.array([text.ids for text in encoded])
    assert tokens.shape == (len(texts), preprocess["text"]["context_length"])
    image = onnxruntime.InferenceSession(str(folder / "image.onnx"))
    text = onnxruntime.InferenceSession(str(folder / "text.onnx"))
    return image.run(None, {"pixels": pixels})[0], text.run(None, {"tokens": tokens})[0]


def normalised(pixels, mean, std):
    mean, std = (torch.tensor(value).view(3, 1, 1) for value in (mean, std))
    return (torch.from_numpy(pixels).float() / 255 - mean) / std


def in_open_clip(folder, pixels, texts):
    config = next(folder.glob("*.json"), None)
    assert config is not None
    open_clip.add_model_config(config)
    options = json.loads((folder / "options" / "options.json").read_text())
    model: Any = open_clip.create_model_and_transforms(
        config.stem, pretrained=str(config.with_suffix(".safetensors")), image_mean=options["mean"],
        image_std=options["std"],
    )[0]  # fmt: skip
    tokens = open_clip.get_tokenizer(config.stem)(texts)
    images = normalised(pixels, options["mean"], options["std"])
    return model.eval().encode_image(images, normalize=True), model.encode_text(tokens, normalize=True)


def transformers(folder, pixels, texts):
    from transformers import AutoImageProcessor, AutoModel, AutoTokenizer

    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    processor = AutoImageProcessor.from_pretrained(folder)
    length = model.config.text_config.max_position_embeddings
    tokens = tokenizer(texts, padding="max_length", truncation=True, max_length=length, return_tensors="pt")
    if model.config.model_type == "siglip":
        tokens = {"input_ids": tokens["input_ids"]}
    outputs = model(pixel_values=normalised(pixels, processor.image_mean, processor.image_std), **tokens)
    return outputs.image_embeds, outputs.text_embeds


LIBRARIES = {"onnx": onnx, "open_clip": in_open_clip, "transformers": transformers}

if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        expected, texts = np.load(path / "expected.npz"), json.loads((path / "texts.json").read_text())
        for name, load in LIBRARIES.items():
            if (path / name).is_dir():
                with torch.no_grad():
                    image, text = load(path / name, expected["pixels"], texts)
                found = {"image": np.asarray(image), "text": np.asarray(text)}
                off = max(float(np.abs(found[side] - expected[side]).max()) for side in found)
                print(json.dumps({"model": path.name, "library": name, "difference": off}))
    assert "leanclip" not in sys.modules

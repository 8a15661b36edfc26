"""Checkpoints load with open_clip alone, with the same embeddings and the same logits."""

import json
import subprocess
import sys

import pytest
import torch

import leanclip
from leanclip.data.datasets import BUNDLED
from refusal import exit_code
from run_records import records

SIGLIP_STYLE = {
    "embed_dim": 192,
    "init_logit_bias": -10,
    "custom_text": True,
    "vision_cfg": {
        "image_size": 224,
        "timm_model_name": "vit_tiny_patch16_224",
        "timm_model_pretrained": False,
        "timm_pool": "map",
        "timm_proj": "none",
    },
    "text_cfg": {
        "context_length": 16,
        "vocab_size": 49408,
        "width": 64,
        "heads": 2,
        "layers": 1,
        "no_causal_mask": True,
        "proj_bias": True,
        "pool_type": "last",
    },
}
# Runs where leanclip is never imported.
FOREIGN = """
import sys, warnings
import torch, open_clip
warnings.simplefilter("ignore")
name, weights, images, out = sys.argv[1:]
if name.endswith(".json"):
    open_clip.add_model_config(name)
    name = name.rpartition("/")[2].removesuffix(".json")
model, _, _ = open_clip.create_model_and_transforms(name, pretrained=weights or None)
model.eval()
given = torch.load(images, weights_only=True)
with torch.no_grad():
    image, text = model.encode_image(given["images"], True), model.encode_text(given["tokens"], True)
    logits = model.get_logits(given["images"], given["tokens"])[0]
assert not any(module.startswith("leanclip") for module in sys.modules)
torch.save({"image": image, "text": text, "logits": logits}, out)
"""


def in_open_clip(tmp_path, name, weights):
    out = tmp_path / "foreign.pt"
    arguments = [str(name), str(weights), str(tmp_path / "inputs.pt"), str(out)]
    subprocess.run([sys.executable, "-c", FOREIGN, *arguments], check=True, cwd=tmp_path, timeout=240)
    return torch.load(out, weights_only=True)


@pytest.mark.parametrize(
    ("model", "loss"),
    [
        pytest.param("RN50", "infonce", marks=pytest.mark.slow),
        pytest.param("ViT-B-32", "fastclip-v3", marks=pytest.mark.slow),
        ("ViT-S-32-alt", "fastclip-v3"),
        ("siglip-style.json", "siglip"),
    ],
)
def test_a_checkpoint_loads_in_open_clip(model, loss, tmp_path):
    if model.endswith(".json"):
        path = tmp_path / model
        path.write_text(json.dumps(SIGLIP_STYLE))
        model = str(path)
    flags = (
        f"--train-data {BUNDLED}/train-*.tar --model {model} --loss {loss} --max-steps 1 --batch-size 4 --warmup 0"
        " --eval-every 0 --workers 0 --val-split 0.002 --device cpu --lr 1e-4 --name run --log-every 1"
    )
    assert exit_code("train", *flags.split(), "--logs", tmp_path) == 0
    checkpoint = tmp_path / "run" / "checkpoints" / "last"
    ours, _, tokenizer = leanclip.load(tmp_path / "run")
    torch.manual_seed(1)
    inputs = {
        "images": torch.randn(3, 3, *ours.image_size),
        "tokens": tokenizer(["a cat", "two dogs", "a red house"]),
    }
    torch.save(inputs, tmp_path / "inputs.pt")
    with torch.no_grad():
        image, text = ours(inputs["images"], inputs["tokens"])

    by_file = in_open_clip(tmp_path, model, checkpoint / "open_clip_model.safetensors")
    by_directory = in_open_clip(tmp_path, f"local-dir:{checkpoint}", "")
    (last,) = records(tmp_path / "run", "train")
    logits = image @ text.T * ours.clip.logit_scale.exp()
    if loss == "siglip":
        logits = logits + ours.clip.logit_bias
        assert float(ours.clip.logit_bias) != -10.0  # the loss's bias after one step
    assert float(ours.clip.logit_scale.exp()) == pytest.approx(1 / last["tau"], rel=1e-2)
    for found in (by_file, by_directory):
        assert torch.allclose(found["image"], image, atol=1e-5)
        assert torch.allclose(found["text"], text, atol=1e-5)
        assert torch.allclose(found["logits"], logits, atol=1e-3, rtol=1e-5)

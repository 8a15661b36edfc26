"""SigLIP's models in transformers: the same embeddings, and what SiglipModel does not have is said."""

import json
from typing import Any

import pytest
import timm
import torch
from timm.models import VisionTransformer, register_model

from leanclip.models import ModelConfig, create_model
from leanclip.models.export import export_transformers
from refusal import refuses

TEXT = {
    "context_length": 12, "vocab_size": 40, "width": 16, "heads": 2, "layers": 2, "no_causal_mask": True,
    "proj_bias": True, "pool_type": "last", "norm_kwargs": {"eps": 1e-6},
    "tokenizer_kwargs": {"clean": "canonicalize"},
}  # fmt: skip
VISION = {"image_size": 32, "timm_model_name": "leanclip_test_siglip", "timm_pool": "map", "timm_proj": "none"}


def leanclip_test_siglip(pretrained=False, **options):
    """A small image tower of SigLIP's architecture."""
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2, "class_token": False}
    known = {name: value for name, value in options.items() if name in ("img_size", "num_classes")}
    tower: Any = VisionTransformer(**sizes | known, global_pool="map")
    tower.pretrained_cfg = tower.default_cfg = {
        "input_size": (3, 32, 32),
        "mean": (0.5, 0.5, 0.5),
        "std": (0.5, 0.5, 0.5),
    }
    return tower


@pytest.fixture(scope="module", autouse=True)
def registered():
    if not timm.is_model("leanclip_test_siglip"):
        register_model(leanclip_test_siglip)


def siglip(folder, bert, *, text=None, **change):
    config = {"embed_dim": 24, "init_logit_bias": -10, "custom_text": True, "vision_cfg": VISION} | change
    config["text_cfg"] = TEXT | {"hf_tokenizer_name": str(bert)} | (text or {})
    (folder / "siglip.json").write_text(json.dumps(config))
    torch.manual_seed(3)
    model = create_model(ModelConfig(model=str(folder / "siglip.json"))).eval()
    with torch.no_grad():
        for parameter in model.clip.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def test_transformers_computes_the_same_embeddings(bert, tmp_path):
    from transformers import AutoImageProcessor, AutoModel, AutoTokenizer

    model = siglip(tmp_path, bert)
    exported = export_transformers(model, tmp_path / "out", lambda: "card")
    assert exported.difference <= 1e-5 and "SiglipModel" in exported.load
    theirs, tokenizer = (kind.from_pretrained(tmp_path / "out") for kind in (AutoModel, AutoTokenizer))
    texts = ["A cat!", "two_dogs,   red", "a " * 40]
    tokens = tokenizer(texts, padding="max_length", max_length=12, truncation=True, return_tensors="pt")["input_ids"]
    assert torch.equal(tokens, model.tokenizer(texts))
    pixels = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        outputs = theirs(pixel_values=pixels, input_ids=tokens)
        image, text = model.encode_image(pixels), model.encode_text(tokens)
        logits = image @ text.T * model.clip.logit_scale.exp() + model.clip.logit_bias
    torch.testing.assert_close(outputs.image_embeds, image, atol=1e-5, rtol=0)
    torch.testing.assert_close(outputs.text_embeds, text, atol=1e-5, rtol=0)
    torch.testing.assert_close(outputs.logits_per_image, logits, atol=1e-4, rtol=0)
    assert list(AutoImageProcessor.from_pretrained(tmp_path / "out").image_mean) == list(model.preprocess.mean)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"init_logit_bias": None}, "its logits have no bias"),
        ({"text": {"no_causal_mask": False}}, "causal mask"),
        ({"text": {"pool_type": "argmax"}}, "the last position"),
        ({"text": {"proj_bias": False}}, "no bias"),
        ({"vision_cfg": VISION | {"timm_proj": "linear"}}, "ends in a projection"),
        ({"text": {"ls_init_value": 0.1}}, "ls_init_value"),
    ],
)
def test_what_transformers_does_not_have_is_said(change, reason, bert, tmp_path):
    with refuses("export.unsupported_model", "SiglipModel", reason):
        export_transformers(siglip(tmp_path, bert, **change), tmp_path / "out", lambda: "card")
    assert not (tmp_path / "out").exists()

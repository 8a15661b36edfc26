"""Small open_clip models of every family, captions, and both ways through them: for tests on CPU and on GPU."""

import torch

from leanclip.models import TwoTower
from leanclip.models.build import build_model

VISION = {"image_size": 32, "layers": 2, "width": 24, "head_width": 8, "patch_size": 8}
TEXT = {"context_length": 19, "vocab_size": 97, "width": 16, "heads": 2, "layers": 2}
CUSTOM = {"block_type": "custom", "qk_norm": True, "scale_heads": True, "scale_attn_inner": True, "scale_attn": True}
FAMILIES = {
    "clip": ({}, {}, {}),
    "clip, one layer": ({}, {"layers": 1}, {"layers": 1}),
    "quick gelu": ({"quick_gelu": True}, {}, {}),
    "end token by number": ({}, {}, {"pool_type": "eos", "eos_id": 2}),
    "a text tower of its own": ({"custom_text": True}, {}, {}),
    "its own, end token by number, projection with bias": (
        {"custom_text": True}, {}, {"pool_type": "eos", "eos_id": 2, "proj_bias": True}),
    "its own, no projection": ({"custom_text": True, "embed_dim": 16}, {}, {"proj_type": "none"}),
    "layer scale": ({}, {"ls_init_value": 0.3}, {"ls_init_value": 0.3}),
    "custom blocks": ({}, CUSTOM | {"scale_fc": True}, CUSTOM | {"scale_fc": True}),
    "custom blocks, plain": ({}, {"block_type": "custom"}, {"block_type": "custom"}),
    "norms and activations with settings": (
        {"custom_text": True}, {}, {"norm_kwargs": {"eps": 1e-4}, "act_kwargs": {"approximate": "tanh"}}),
    "average pooling": ({}, {"pool_type": "avg", "final_ln_after_pool": True, "no_ln_pre": True}, {}),
    "resnet": ({}, {"layers": [1, 1, 1, 1], "width": 8, "head_width": 8, "patch_size": None}, {}),
    "timm": ({}, {"timm_model_name": "convnext_atto", "timm_pool": "avg", "timm_proj": "linear", "layers": None}, {}),
}  # fmt: skip


def model_of(base, vision, text) -> TwoTower:
    torch.manual_seed(0)
    vision = {name: value for name, value in (VISION | vision).items() if value is not None}
    config = {"embed_dim": 12, "vision_cfg": vision, "text_cfg": TEXT | text} | base
    return build_model("small", config, None, {})


def captions(rows=11, *, vocab=97, eos=96, length=19, longest=9):
    """Of 3 tokens upwards; one has the full length; what lies behind the end is not all zero."""
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(3, vocab - 3, (rows, length), generator=generator)
    for row in range(rows):
        end = length - 1 if row == 5 else 2 + row % (longest - 2)
        tokens[row, end] = eos
        tokens[row, end + 1 :] = 0 if row % 2 else 1
    return tokens


def both_ways(model, images, tokens, *, ours):
    """Embeddings and all gradients, ours or open_clip's."""
    model.zero_grad()
    if ours:
        image, text = model(images, tokens)
    else:
        image = model.clip.encode_image(images, normalize=True)
        text = model.clip.encode_text(tokens, normalize=True)
    torch.manual_seed(1)
    (image * torch.randn_like(image)).sum().add((text * torch.randn_like(text)).sum()).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"image": image.detach(), "text": text.detach()} | gradients

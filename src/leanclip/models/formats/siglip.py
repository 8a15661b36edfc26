"""SigLIP's models as a `transformers` SiglipModel: timm's vision transformer with attention pooling, and a text tower
without a causal mask whose last position is pooled. `unsupported` says what SiglipModel does not have."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leanclip.errors import UserError
from leanclip.models import transformers_clip
from leanclip.models.two_tower import TwoTower

TEXT_SETTINGS = {"hf_tokenizer_name", "tokenizer_kwargs", "no_causal_mask", "proj_bias", "pool_type"}
TEXT_SETTINGS |= {"norm_kwargs", "act_kwargs"}
TRUNK = "visual.trunk."
# Names in timm and in transformers: outside the blocks, in the pooling head, and inside a block.
AROUND = {"patch_embed.proj": "embeddings.patch_embedding", "norm": "post_layernorm"}
HEAD = {"attn_pool.proj": "head.attention.out_proj", "attn_pool.norm": "head.layernorm"}
HEAD |= {"attn_pool.mlp.fc1": "head.mlp.fc1", "attn_pool.mlp.fc2": "head.mlp.fc2"}
BLOCK = {"norm1": "layer_norm1", "norm2": "layer_norm2", "attn.proj": "self_attn.out_proj"}
BLOCK |= {"mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2"}


def has_attention_pooling(model: TwoTower) -> bool:
    """Whether the image tower is built as SigLIP's is: CLIPModel has no such pooling."""
    return hasattr(getattr(getattr(model.clip.visual, "trunk", None), "attn_pool", None), "latent")


def unsupported(model: TwoTower) -> str | None:
    """Why transformers' SiglipModel cannot be this model; None if it can."""
    clip, text = model.clip, model.config["text_cfg"]
    trunk = clip.visual.trunk
    size = transformers_clip.square(model.config["vision_cfg"].get("image_size", 224))
    other = transformers_clip.other_settings(text, transformers_clip.TEXT_SHAPE | TEXT_SETTINGS)
    reasons = {
        "its image tower has a class token": getattr(trunk, "cls_token", None) is not None,
        "its image tower ends in a projection": bool(list(clip.visual.head.parameters())),
        "its logits have no bias": clip.logit_bias is None,
        "its text tower is one of transformers": "hf_model_name" in text,
        "its text tower has a causal mask": not text.get("no_causal_mask"),
        "its text tower does not pool the last position": text.get("pool_type") != "last",
        "its text projection has no bias": not text.get("proj_bias"),
        "its tokenizer is not one of transformers": not hasattr(model.tokenizer, "tokenizer"),
        "its images are not square": size is None,
        **{f"its text_cfg has {setting}": True for setting in other},
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def save(directory: Path, model: TwoTower) -> None:
    """Write configuration, weights, tokenizer and image processor for `SiglipModel.from_pretrained(directory)`."""
    transformers = transformers_clip.library()
    if reason := unsupported(model):
        raise UserError(
            f"transformers' SiglipModel cannot be this model: {reason}; use --format open_clip or onnx",
            code="export.unsupported_model",
        )
    tokenizer: Any = model.tokenizer.tokenizer  # pyright: ignore[reportFunctionMemberAccess]
    with transformers_clip.quiet(transformers):
        siglip = transformers.SiglipModel(transformers.SiglipConfig(**_config(model, tokenizer)))
        siglip.load_state_dict(renamed(model.clip.state_dict()), strict=True)
        siglip.save_pretrained(directory)
        clean = model.config["text_cfg"].get("tokenizer_kwargs", {}).get("clean", "whitespace")
        length = model.config["text_cfg"].get("context_length", 77)
        transformers_clip.save_tokenizer(directory, model.tokenizer, length=length, clean=clean, pad=False)
        preprocess = model.open_clip_config()["preprocess_cfg"]
        transformers_clip.image_processor(transformers, preprocess).save_pretrained(directory)


def load(directory: Path) -> tuple[Callable[[Tensor], Tensor], Callable[[list[str]], Tensor]]:
    """Both encoders of a model directory, loaded by transformers without a network."""
    transformers = transformers_clip.library()
    with transformers_clip.quiet(transformers):
        siglip = transformers.SiglipModel.from_pretrained(directory, local_files_only=True).eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
    options = {"padding": "max_length", "max_length": siglip.config.text_config.max_position_embeddings}

    def encode_text(texts: list[str]) -> Tensor:
        tokens = tokenizer(texts, truncation=True, return_tensors="pt", **options)["input_ids"]
        return transformers_clip.unit(siglip.get_text_features(input_ids=tokens))

    return lambda pixels: transformers_clip.unit(siglip.get_image_features(pixel_values=pixels)), encode_text


def renamed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """open_clip's state dict with transformers' names: query, key and value separate, those of the pooling joined."""
    text = {name: value for name, value in weights.items() if name.startswith("text.")}
    projection = {name: text.pop(name) for name in list(text) if ".text_projection." in name}
    converted = transformers_clip.renamed(text)
    converted |= {
        name.replace("text.text_projection", "text_model.head"): value for name, value in projection.items()
    }
    converted |= {name: weights[name].reshape(1) for name in ("logit_scale", "logit_bias")}
    trunk = {name.removeprefix(TRUNK): value for name, value in weights.items() if name.startswith(TRUNK)}
    for kind in ("weight", "bias"):
        joined = torch.cat([trunk.pop(f"attn_pool.q.{kind}"), trunk.pop(f"attn_pool.kv.{kind}")])
        converted[f"vision_model.head.attention.in_proj_{kind}"] = joined
    converted["vision_model.head.probe"] = trunk.pop("attn_pool.latent")
    converted["vision_model.embeddings.position_embedding.weight"] = trunk.pop("pos_embed")[0]
    for name, value in trunk.items():
        module, _, kind = name.rpartition(".")
        if module in AROUND | HEAD:
            converted[f"vision_model.{(AROUND | HEAD)[module]}.{kind}"] = value
            continue
        _, number, inside = [*module.split(".", 2), "", ""][:3]
        layer = f"vision_model.encoder.layers.{number}"
        if module.startswith("blocks.") and inside == "attn.qkv":
            for letter, part in zip("qkv", value.chunk(3), strict=True):
                converted[f"{layer}.self_attn.{letter}_proj.{kind}"] = part
        elif module.startswith("blocks.") and inside in BLOCK:
            converted[f"{layer}.{BLOCK[inside]}.{kind}"] = value
        else:
            raise UserError(
                f"transformers' SiglipModel has no weight for {TRUNK}{name}; use --format open_clip or onnx",
                code="export.unsupported_model",
            )
    return {name: value.detach().contiguous() for name, value in converted.items()}


def _config(model: TwoTower, tokenizer: Any) -> dict[str, Any]:
    text, trunk = model.config["text_cfg"], model.clip.visual.trunk
    block, width = trunk.blocks[0], text.get("width", 512)
    tanh = text.get("act_kwargs", {}).get("approximate") == "tanh"
    return {
        "vision_config": {
            "hidden_size": trunk.embed_dim,
            "intermediate_size": block.mlp.fc1.out_features,
            "num_hidden_layers": len(trunk.blocks),
            "num_attention_heads": block.attn.num_heads,
            "image_size": transformers_clip.square(model.config["vision_cfg"].get("image_size", 224)),
            "patch_size": trunk.patch_embed.patch_size[0],
            "hidden_act": _activation(block.mlp.act),
            "layer_norm_eps": trunk.norm.eps,
        },
        "text_config": {
            "hidden_size": width,
            "intermediate_size": int(width * text.get("mlp_ratio", 4.0)),
            "num_hidden_layers": text.get("layers", 12),
            "num_attention_heads": text.get("heads", 8),
            "vocab_size": text["vocab_size"],
            "max_position_embeddings": text.get("context_length", 77),
            "projection_size": model.config["embed_dim"],
            "hidden_act": "gelu_pytorch_tanh" if tanh else "gelu",
            "layer_norm_eps": text.get("norm_kwargs", {}).get("eps", 1e-5),
            **{f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")},
        },
    }


def _activation(module: Any) -> str:
    tanh = getattr(module, "approximate", "none") == "tanh" or type(module).__name__ == "GELUTanh"
    return "gelu_pytorch_tanh" if tanh else "gelu"

"""CLIP's vision transformers as a `transformers` CLIPModel. The only module that imports transformers.

Both libraries compute the same function of differently named weights. `unsupported` reads from the configuration
alone what CLIPModel does not have.
"""

import contextlib
import re
import string
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leanclip.errors import UserError

# All other entries of the configuration must have a neutral value, or CLIPModel computes something else.
VISION_SHAPE = {"layers", "width", "head_width", "mlp_ratio", "patch_size", "image_size"}
TEXT_SHAPE = {"layers", "width", "heads", "mlp_ratio", "context_length", "vocab_size"}
WITHOUT_EFFECT = {"patch_dropout", "output_tokens", "eos_id", "pad_id", "attn_pooler_queries", "attn_pooler_heads"}
NEUTRAL = {"pool_type": ("tok", "argmax"), "pos_embed_type": ("learnable",), "proj_type": ("linear",)}
VOCABULARY = 49408
SPECIAL = {"<start_of_text>": "<|startoftext|>", "<end_of_text>": "<|endoftext|>"}

# Names in open_clip and in transformers, inside a block and outside the blocks of either tower.
BLOCK = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
AROUND = {
    "logit_scale": "logit_scale",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.ln_pre.weight": "vision_model.pre_layrnorm.weight",
    "visual.ln_pre.bias": "vision_model.pre_layrnorm.bias",
    "visual.ln_post.weight": "vision_model.post_layernorm.weight",
    "visual.ln_post.bias": "vision_model.post_layernorm.bias",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final.weight": "text_model.final_layer_norm.weight",
    "ln_final.bias": "text_model.final_layer_norm.bias",
}
PROJECTIONS = {"visual.proj": "visual_projection.weight", "text_projection": "text_projection.weight"}
BLOCKS = {"visual.transformer.resblocks.": "vision_model", "transformer.resblocks.": "text_model"}


def unsupported(config: dict[str, Any], preprocess: dict[str, Any]) -> str | None:
    """Why transformers' CLIPModel cannot be this model; None if it can."""
    vision, text = config["vision_cfg"], config["text_cfg"]
    size, vocabulary = vision.get("image_size", 224), text.get("vocab_size", VOCABULARY)
    padded = preprocess.get("resize_mode") == "longest"
    reasons = {
        "it is a CoCa model, with a text decoder": "multimodal_cfg" in config,
        f"its image tower is timm's {vision.get('timm_model_name')}": vision.get("timm_model_name"),
        "its image tower is a ResNet": isinstance(vision.get("layers"), list | tuple),
        f"its text tower is {text.get('hf_model_name')}": text.get("hf_model_name"),
        "its logits have a bias (siglip)": config.get("init_logit_bias") is not None,
        **{f"its vision_cfg has {setting}": True for setting in other_settings(vision, VISION_SHAPE)},
        **{f"its text_cfg has {setting}": True for setting in other_settings(text, TEXT_SHAPE)},
        f"its images are not square ({size})": square(size) is None,
        f"its vocabulary has {vocabulary} entries, not CLIP's {VOCABULARY}": vocabulary != VOCABULARY,
        "its images are padded to a square, which CLIPImageProcessor does not do": padded,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def other_settings(part: dict[str, Any], shape: set[str]) -> list[str]:
    """The settings that CLIPModel does not have, unless their value is neutral."""
    return [
        f"{key} = {value}"
        for key, value in part.items()
        if key not in shape | WITHOUT_EFFECT
        and not key.startswith(("timm_", "hf_model_"))
        and value not in NEUTRAL.get(key, (None, False, 0, "", {}))
    ]


def save(directory: Path, model: Any) -> None:
    """Write configuration, weights, tokenizer and image processor for `CLIPModel.from_pretrained(directory)`."""
    transformers, config, preprocess = library(), model.config, model.open_clip_config()["preprocess_cfg"]
    if reason := unsupported(config, preprocess):
        raise UserError(
            f"transformers' CLIPModel cannot be this model: {reason}; use --format open_clip or onnx",
            code="export.unsupported_model",
        )
    with quiet(transformers):
        clip = transformers.CLIPModel(transformers.CLIPConfig(**_config(config)))
        clip.load_state_dict(renamed(model.clip.state_dict()), strict=True)
        clip.save_pretrained(directory)
        clip_tokenizer(model.tokenizer, config["text_cfg"].get("context_length", 77)).save_pretrained(directory)
        image_processor(transformers, preprocess).save_pretrained(directory)


def clip_tokenizer(tokenizer: Any, length: int) -> Any:
    """open_clip's tokenizer as one of transformers."""
    return library().CLIPTokenizer(
        vocab={SPECIAL.get(token, token): number for token, number in tokenizer.encoder.items()},
        merges=list(tokenizer.bpe_ranks),
        model_max_length=length,
    )


def save_tokenizer(directory: Path, tokenizer: Any, *, length: int, clean: str, pad: bool) -> bool:
    """Write the files of open_clip's tokenizer for transformers. The cleaning that open_clip does before goes into
    tokenizer.json; with `pad`, so does cutting and padding to `length`, for programs that read nothing else.

    False for a tokenizer that is neither CLIP's nor one of transformers.
    """
    is_clip = hasattr(tokenizer, "encoder")
    theirs = clip_tokenizer(tokenizer, length) if is_clip else getattr(tokenizer, "tokenizer", None)
    if theirs is None or not hasattr(theirs, "backend_tokenizer"):
        return False
    theirs.save_pretrained(directory)
    path = directory / "tokenizer.json"
    fast = fast_tokenizer(path)
    if not is_clip:
        fast.normalizer = _cleaning(clean, fast.normalizer)
        # A class of its own, such as BERT's, would replace the cleaning by what it does itself.
        generic = library().PreTrainedTokenizerFast
        generic(tokenizer_object=fast, model_max_length=length, **theirs.special_tokens_map).save_pretrained(
            directory
        )
    if pad:
        fast.enable_truncation(length)
        fast.enable_padding(length=length, pad_id=theirs.pad_token_id, pad_token=theirs.pad_token)
    fast.save(str(path))
    return True


def _cleaning(clean: str, then: Any) -> Any:
    """open_clip's cleaning by its name, without ftfy, and what the tokenizer does itself."""
    from tokenizers import Regex, normalizers

    spaces = [normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
    without = [
        normalizers.Replace("_", " "),
        normalizers.Replace(Regex(f"[{re.escape(string.punctuation)}]"), ""),
        normalizers.Lowercase(),
    ]
    steps = {"canonicalize": [*without, *spaces], "lower": [*spaces, normalizers.Lowercase()], "whitespace": spaces}
    return normalizers.Sequence([*steps[clean], *([] if then is None else [then])])


def square(size: Any) -> int | None:
    """The side of square images."""
    sides = {size} if isinstance(size, int) else set(size)
    return sides.pop() if len(sides) == 1 else None


def fast_tokenizer(path: Path) -> Any:
    """A tokenizer.json, read by the library below transformers."""
    library()
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))


def load(directory: Path) -> tuple[Callable[[Tensor], Tensor], Callable[[list[str]], Tensor]]:
    """Both encoders of a model directory, loaded by transformers without a network."""
    transformers = library()
    with quiet(transformers):
        clip = transformers.CLIPModel.from_pretrained(directory, local_files_only=True).eval()
        tokenizer = transformers.CLIPProcessor.from_pretrained(directory, local_files_only=True).tokenizer

    def encode_text(texts: list[str]) -> Tensor:
        return unit(clip.get_text_features(**tokenizer(texts, padding=True, truncation=True, return_tensors="pt")))

    return lambda pixels: unit(clip.get_image_features(pixel_values=pixels)), encode_text


def renamed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """open_clip's state dict with transformers' names: projections transposed, query, key and value separate."""
    converted: dict[str, Tensor] = {}
    for name, value in weights.items():
        plain = name.removeprefix("text.")  # of models with custom_text
        if plain in AROUND:
            converted[AROUND[plain]] = value.reshape(()) if plain == "logit_scale" else value
        elif plain in PROJECTIONS:
            converted[PROJECTIONS[plain]] = value.T
        elif prefix := next((prefix for prefix in BLOCKS if plain.startswith(prefix)), None):
            number, _, rest = plain.removeprefix(prefix).partition(".")
            layer = f"{BLOCKS[prefix]}.encoder.layers.{number}"
            if rest.startswith("attn.in_proj_"):
                kind = rest.removeprefix("attn.in_proj_")
                for letter, part in zip("qkv", value.chunk(3), strict=True):
                    converted[f"{layer}.self_attn.{letter}_proj.{kind}"] = part
            else:
                module, _, kind = rest.rpartition(".")
                converted[f"{layer}.{BLOCK[module]}.{kind}"] = value
        else:
            raise UserError(
                f"transformers' CLIPModel has no weight for {name}; use --format open_clip",
                code="export.unsupported_model",
            )
    return {name: value.detach().contiguous() for name, value in converted.items()}


def _config(config: dict[str, Any]) -> dict[str, Any]:
    vision, text = config["vision_cfg"], config["text_cfg"]
    activation = "quick_gelu" if config.get("quick_gelu") else "gelu"

    def tower(part: dict[str, Any], *, width: int, heads: int) -> dict[str, Any]:
        return {
            "hidden_size": width,
            "intermediate_size": int(width * part.get("mlp_ratio", 4.0)),
            "num_hidden_layers": part.get("layers", 12),
            "num_attention_heads": heads,
            "hidden_act": activation,
            "projection_dim": config["embed_dim"],
        }

    width, size = vision.get("width", 768), vision.get("image_size", 224)
    return {
        "projection_dim": config["embed_dim"],
        "vision_config": tower(vision, width=width, heads=width // vision.get("head_width", 64))
        | {"image_size": size if isinstance(size, int) else size[0], "patch_size": vision.get("patch_size", 16)},
        "text_config": tower(text, width=text.get("width", 512), heads=text.get("heads", 8))
        | {
            "vocab_size": VOCABULARY,
            "max_position_embeddings": text.get("context_length", 77),
            "bos_token_id": VOCABULARY - 2,
            "eos_token_id": VOCABULARY - 1,
            "pad_token_id": VOCABULARY - 1,
        },
    }


def image_processor(transformers: Any, preprocess: dict[str, Any]) -> Any:
    size = preprocess["size"]
    side = size if isinstance(size, int) else size[0]
    square, squash = {"height": side, "width": side}, preprocess["resize_mode"] == "squash"
    return transformers.CLIPImageProcessor(
        size=square if squash else {"shortest_edge": side},
        crop_size=square,
        do_center_crop=not squash,
        image_mean=list(preprocess["mean"]),
        image_std=list(preprocess["std"]),
        resample=2 if preprocess["interpolation"] == "bilinear" else 3,  # PIL's numbers
    )


def unit(features: Any) -> Tensor:
    return torch.nn.functional.normalize(features if isinstance(features, Tensor) else features.pooler_output, dim=-1)


def never_run_code() -> None:
    """Make transformers refuse to run a repository's code instead of prompting on the terminal."""
    library().dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0


def library() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise UserError(
            "transformers is not installed: pip install 'leanclip[transformers]'", code="install.transformers"
        ) from error
    return transformers


@contextlib.contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    messages = transformers.utils.logging
    level, bars = messages.get_verbosity(), messages.is_progress_bar_enabled()
    messages.set_verbosity_error()
    messages.disable_progress_bar()
    try:
        yield
    finally:
        messages.set_verbosity(level)
        if bars:
            messages.enable_progress_bar()

"""open_clip's models behind a small interface. The only module that imports open_clip."""

import difflib
import json
import logging
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import open_clip
import torch
from open_clip.tokenizer import SimpleTokenizer, get_clean_fn
from open_clip.transform import PreprocessCfg, image_transform_v2
from open_clip.transformer import CustomResidualAttentionBlock, ResidualAttentionBlock, VisionTransformer
from open_clip.zero_shot_metadata import IMAGENET_CLASSNAMES, OPENAI_IMAGENET_TEMPLATES, SIMPLE_IMAGENET_TEMPLATES
from torch import Tensor, nn
from torch.nn import functional as F

from leanclip.errors import UserError
from leanclip.models.blocks import Block
from leanclip.models.cached_tokenizer import Words
from leanclip.models.config import ModelConfig
from leanclip.models.kernel_barriers import mend_compiled_kernels
from leanclip.models.text_length import EndOfText, Texts, padded_because, pooling, text_tower
from leanclip.models.transformer_towers import embed_images, embed_texts, normalised
from leanclip.models.untrusted import check_architecture, check_weights, without_code

WEIGHTS_FILE = "open_clip_model.safetensors"  # the two names that open_clip looks for in a `local-dir:`
CONFIG_FILE = "open_clip_config.json"
PREPROCESS_FIELDS = {field.name for field in fields(PreprocessCfg)}
PROMPT_SETS = {"openai": OPENAI_IMAGENET_TEMPLATES, "simple": SIMPLE_IMAGENET_TEMPLATES}

for _path in sorted((Path(__file__).parent / "configs").glob("*.json")):
    open_clip.add_model_config(_path)


class OwnBlock(Block, ResidualAttentionBlock):
    """The usual block, with our way to run it."""


class OwnCustomBlock(Block, CustomResidualAttentionBlock):
    """The one with its own attention, likewise."""


OWN_BLOCKS = {ResidualAttentionBlock: OwnBlock, CustomResidualAttentionBlock: OwnCustomBlock}


class TwoTower(nn.Module):
    """An image tower and a text tower that map to unit vectors of one space, with what feeds them.

    The temperature belongs to the loss: the open_clip model's own `logit_scale` and `logit_bias` are frozen, and
    filled in by `weights` on saving.
    """

    image_mean: Tensor
    image_std: Tensor

    def __init__(self, clip: Any, name: str, config: dict[str, Any], tokenizer: Callable[..., Tensor]) -> None:
        super().__init__()
        self.clip: Any = clip  # open_clip's classes share an interface but no base class
        self.name, self.config, self.tokenizer = name, config, tokenizer
        self.image_locked = False
        self.preprocess = PreprocessCfg(**clip.visual.preprocess_cfg)
        for name in ("mean", "std"):
            values = torch.tensor(getattr(self.preprocess, name)).view(-1, 1, 1)
            self.register_buffer(f"image_{name}", values, persistent=False)
        for parameter in (clip.logit_scale, clip.logit_bias):
            if parameter is not None:
                parameter.requires_grad_(False)
        self.recomputed, self.compiled = 0, False
        self.own_image = _runs_here(clip.visual) and _adopted(clip.visual.transformer)
        self.padded_because = padded_because(clip)
        if self.padded_because is None and not _adopted(text_tower(clip).transformer):
            self.padded_because = "the text tower has blocks of an unknown kind"
        self.end_of_text: EndOfText | None = None if self.padded_because else pooling(clip)

    def train(self, mode: bool = True) -> "TwoTower":
        super().train(mode)
        if self.image_locked:  # open_clip's own way would replace the batch-norm layers, and their keys
            self.clip.visual.eval()
            for module in self.clip.visual.modules():
                if any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
                    module.training = mode
        return self

    def forward(
        self, images: Tensor, tokens: Tensor | Texts, between: Callable[[Tensor], None] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Both embeddings; `between` gets the images' before the texts' are computed."""
        image = self.encode_image(images)
        if between is not None:
            between(image)
        return image, self.encode_text(tokens)

    def encode_image(self, images: Tensor) -> Tensor:
        """Unit vectors of images: uint8 pixels, or what `transform` made of them."""
        visual = self.clip.visual
        if self.own_image:
            found = embed_images(
                visual, images, self.image_mean, self.image_std, recomputed=self.recomputed, compile=self.compiled
            )
            return F.normalize(found, dim=-1)
        return self.clip.encode_image(self.normalised(images), normalize=True)

    def encode_text(self, tokens: Tensor | Texts) -> Tensor:
        """Unit vectors of texts, from padded tokens (B, L) or from `texts`."""
        texts = self.texts(tokens) if isinstance(tokens, Tensor) else tokens
        if isinstance(texts, Tensor):
            return self.clip.encode_text(texts, normalize=True)
        return F.normalize(embed_texts(text_tower(self.clip), texts, recomputed=self.recomputed), dim=-1)

    def normalised(self, images: Tensor) -> Tensor:
        """uint8 pixels as the image tower wants them, in its precision; other images are what it wants already."""
        dtype = next(self.clip.visual.parameters()).dtype
        return normalised(images, self.image_mean, self.image_std, dtype)

    def texts(self, tokens: Tensor, lengths: Tensor | None = None) -> Tensor | Texts:
        """Padded tokens at their true length, where the text tower allows it, on the model's device.

        Tokens on the host, or their `lengths` there, spare a wait for the device.
        """
        device = self.image_mean.device
        if self.end_of_text is None:
            return tokens.to(device, non_blocking=True)
        if lengths is None:
            lengths = self.end_of_text(tokens).cpu()
        return Texts.pack(tokens.to(device, non_blocking=True), lengths, few_sizes=device.type == "cuda")

    def transform(self, *, train: bool, scale: tuple[float, float] | None = None) -> Callable[..., Tensor]:
        """open_clip's own image transform, from a PIL image to a normalised tensor: for inference and comparison."""
        augmentation = {"scale": scale} if scale and train else None
        made: Any = image_transform_v2(self.preprocess, is_train=train, aug_cfg=augmentation)
        return made

    def decode(self, tokens: Tensor) -> str:
        """The text of one row of tokens, without start, end and padding."""
        inner = getattr(self.tokenizer, "tokenizer", None)  # transformers' own, in open_clip's wrapper
        if inner is not None:
            return inner.decode(tokens, skip_special_tokens=True)
        special = {*getattr(self.tokenizer, "all_special_ids", ()), 0}
        return self.tokenizer.decode([t for t in tokens.tolist() if t not in special]).strip()  # pyright: ignore[reportFunctionMemberAccess]

    def lock_image(self, unlocked_groups: int = 0) -> None:
        """Freeze the image tower, but for its last groups: parameters, batch-norm statistics, dropout."""
        self.clip.lock_image_tower(unlocked_groups=unlocked_groups)
        self.image_locked = True

    def lock_text(self, unlocked_layers: int = 0) -> None:
        self.clip.lock_text_tower(unlocked_layers=unlocked_layers)

    def checkpoint_activations(self, blocks: int | None = None) -> None:
        """Keep only the inputs of each tower's first blocks for the backward pass, and compute the rest again.

        By default of all blocks. Towers that are not open_clip's own transformers know all or none.
        """
        self.clip.set_grad_checkpointing(blocks != 0)
        self.recomputed = sys.maxsize if blocks is None else blocks

    def pad_texts(self) -> None:
        """Run the text tower on padded texts, as open_clip does."""
        self.end_of_text = None

    def compile_towers(self, *, whole: bool = True) -> None:
        """Compile what a training step runs, when it first runs: the towers' blocks, or another image tower whole."""
        self.compiled = True
        for module in self.modules():
            if isinstance(module, Block):
                module.compiled = True
        if whole and not self.own_image:
            mend_compiled_kernels()
            self.clip.visual.compile()

    def temperature(self) -> float:
        return math.exp(-float(self.clip.logit_scale.detach().reshape(())))

    def bias(self) -> float | None:
        bias = self.clip.logit_bias
        return float(bias.detach().reshape(())) if isinstance(bias, Tensor) else None

    def open_clip_config(self) -> dict[str, Any]:
        """What open_clip's `local-dir:` reads beside the weights."""
        return {"model_cfg": self.config, "preprocess_cfg": asdict(self.preprocess)}


def with_temperature(weights: dict[str, Tensor], tau: Tensor, bias: Tensor | None) -> dict[str, Tensor]:
    """An open_clip state dict with the loss's temperature and bias in it."""
    scale = weights["logit_scale"]
    filled = {"logit_scale": tau.log().neg().to(scale.dtype).expand_as(scale).clone()}
    if "logit_bias" in weights:
        filled["logit_bias"] = (torch.zeros(()) if bias is None else bias).to(scale.dtype).expand_as(scale).clone()
    return weights | filled


def create_model(
    config: ModelConfig, *, siglip: bool = False, double: bool = False, shapes_only: bool = False
) -> TwoTower:
    """Build the model on the CPU. For siglip it starts at tau 0.1 and bias -10, as open_clip's does.

    `double` makes it float64 before weights are loaded, so that those of a float64 run come back exactly.
    With `shapes_only` it is built on the meta device, without weights, in no time.
    """
    assert config.model is not None
    name, found = model_config_of(config.model)
    siglip_start = {"init_logit_scale": math.log(10), "init_logit_bias": -10.0} if siglip else {}
    model_config: dict[str, Any] = siglip_start | found
    if config.force_image_size is not None:
        if "timm_model_name" in model_config["vision_cfg"]:
            raise UserError(f"--force-image-size does not work with {name}: its image tower has one size")
        model_config["vision_cfg"]["image_size"] = config.force_image_size
    if config.force_context_length is not None:
        model_config["text_cfg"]["context_length"] = config.force_context_length
    if config.force_patch_dropout is not None:
        if not isinstance(model_config["vision_cfg"].get("layers"), int):
            raise UserError(
                f"--force-patch-dropout does not work with {name}: its image tower has no patches to drop"
            )
        model_config["vision_cfg"]["patch_dropout"] = config.force_patch_dropout
    model_config |= {"quick_gelu": True} if config.force_quick_gelu else {}
    model_config |= {"custom_text": True} if config.force_custom_text else {}
    if shapes_only:
        with torch.device("meta"):
            return _build(name, model_config, None, config.preprocess, double=double, device="meta")
    weights, preprocess = _pretrained(config)
    return _build(name, model_config, weights, preprocess | config.preprocess, double=double)


def load_model(directory: Path) -> TwoTower:
    """The model saved in a checkpoint directory."""
    try:
        saved = json.loads((directory / CONFIG_FILE).read_text())
        config, preprocess = dict(saved["model_cfg"]), dict(saved["preprocess_cfg"])
        config |= {"vision_cfg": dict(config["vision_cfg"]), "text_cfg": dict(config["text_cfg"])}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{directory / CONFIG_FILE} does not describe a model ({type(error).__name__})") from error
    return _build(str(directory), config, directory / WEIGHTS_FILE, preprocess)


def model_from_file(config: dict[str, Any], weights: Path, preprocess: dict[str, Any]) -> TwoTower:
    """The model of an architecture, with the weights of a file."""
    return _build(weights.name, config, weights, preprocess)


def architecture_name(config: dict[str, Any]) -> str | None:
    """open_clip's own name of an architecture, if it has one: not what was registered in this process only."""
    wanted = json.loads(json.dumps(config))
    paths = sorted((Path(open_clip.__file__).parent / "model_configs").glob("*.json"))
    return next((path.stem for path in paths if json.loads(path.read_text()) == wanted), None)


def saved_weights(path: Path) -> Path | None:
    """The folder of the weights of a run or a checkpoint directory, if it is one."""
    folders = (path, path / "checkpoints" / "last")
    return next((folder for folder in folders if (folder / WEIGHTS_FILE).is_file()), None)


def saved_architecture(path: Path) -> Path | None:
    """The config beside the weights of a run or a checkpoint directory, if it is one."""
    folder = saved_weights(path)
    return None if folder is None or not (folder / CONFIG_FILE).is_file() else folder / CONFIG_FILE


def named_architecture(config: Path, names: Sequence[str]) -> str:
    """The one of these names that stands for the architecture of a config file, or open_clip's; else the file's."""
    own = model_config_of(str(config))[1]
    for name in names:
        with suppress(UserError):  # a file that is elsewhere now
            if model_config_of(name)[1] == own:
                return name
    return architecture_name(own) or str(config)


def loading_options(preprocess: PreprocessCfg) -> dict[str, Any]:
    """What open_clip must be told of the preprocessing, because the weights alone do not say it."""
    usual = PreprocessCfg()
    named = {"mean": "image_mean", "std": "image_std", "interpolation": "image_interpolation"}
    named |= {"resize_mode": "image_resize_mode"}
    return {
        option: value
        for name, option in named.items()
        if tuple(value := getattr(preprocess, name)) != tuple(getattr(usual, name))
    }


def model_config_of(model: str) -> tuple[str, dict[str, Any]]:
    """The name and open_clip config of a model given by name or by config file."""
    config: Any
    if model.endswith(".json"):
        path = Path(model)
        if not path.is_file():
            raise UserError(f"no such model config file: {path}")
        try:
            config = json.loads(path.read_text())
            config = config.get("model_cfg", config)
        except (ValueError, AttributeError) as error:
            raise UserError(f"{path} is not an open_clip model config ({error})") from error
        if missing := {"embed_dim", "vision_cfg", "text_cfg"} - set(config):
            raise UserError(f"{path} is no open_clip model config: it lacks {', '.join(sorted(missing))}")
        return path.stem, config
    config = open_clip.get_model_config(model)
    if config is None:
        near = difflib.get_close_matches(model, open_clip.list_models(), n=3, cutoff=0.4)
        raise UserError(f"unknown model {model!r}; nearest: {', '.join(near)} (or give the path of a config .json)")
    return model, config


def is_model_name(name: str) -> bool:
    return name in open_clip.list_models()


def create_tokenizer(model: str) -> Any:
    """open_clip's tokenizer of a model, without the model."""
    with _registered(model_config_of(model)[1]) as registered:
        try:
            return _faster(open_clip.get_tokenizer(registered))
        except (OSError, ValueError) as error:  # of the hub, and neither here nor within reach
            raise UserError(f"cannot load the tokenizer of {model}: {without_code(error)}") from error


def _faster(tokenizer: Any) -> Any:
    """The tokenizer, with the same tokens sooner where it is open_clip's own."""
    if type(tokenizer) is SimpleTokenizer and tokenizer.clean_fn is get_clean_fn("lower"):
        tokenizer.encode = Words(tokenizer)
    return tokenizer


def prompt_templates(name: str) -> tuple[str, ...]:
    """One of open_clip's sets of prompts, with {} for the name of the class."""
    return tuple(template("{}") for template in PROMPT_SETS[name])


def imagenet_classnames() -> tuple[str, ...]:
    """open_clip's names of ImageNet's 1,000 classes, in the order of their WordNet ids."""
    return tuple(IMAGENET_CLASSNAMES)


def is_resnet(model: str) -> bool:
    """Whether the image tower is one of CLIP's ResNets, which were trained with other optimizer settings."""
    return isinstance(model_config_of(model)[1]["vision_cfg"].get("layers"), list)


def _pretrained(config: ModelConfig) -> tuple[Path | None, dict[str, Any]]:
    """The weights file to start from, and the preprocessing it was trained with where open_clip knows it."""
    if config.pretrained is None:
        return None, {}
    path = Path(config.pretrained)
    if path.is_dir():
        if (folder := saved_weights(path)) is not None:
            return folder / WEIGHTS_FILE, _saved_preprocessing(folder)
        raise UserError(f"no weights in {path}: expected {WEIGHTS_FILE} there or in its checkpoints/last")
    if path.is_file():
        return path, {}
    assert config.model is not None
    tags = open_clip.list_pretrained_tags_by_model(config.model)
    if config.pretrained not in tags:
        near = difflib.get_close_matches(config.pretrained, tags, n=3) or tags[:3]
        raise UserError(
            f"--pretrained {config.pretrained}: no such file, and no open_clip tag of {config.model}"
            + (f" (nearest: {', '.join(near)})" if near else " (it has none)")
        )
    tag = open_clip.get_pretrained_cfg(config.model, config.pretrained)
    quick = tag.get("quick_gelu", False)
    own = model_config_of(config.model)[1].get("quick_gelu", False) or config.force_quick_gelu
    if quick != own:
        other = f"{config.model}-quickgelu" if quick else config.model.removesuffix("-quickgelu")
        raise UserError(
            f"{config.pretrained} was trained with {'' if quick else 'no '}QuickGELU; use --model {other}"
        )
    try:
        downloaded = Path(open_clip.download_pretrained(tag))
    except Exception as error:  # whatever the hub client raises: the remedy is the same
        raise UserError(
            f"could not download {config.model} {config.pretrained} ({type(error).__name__}); "
            "fetch the weights by hand and give the file to --pretrained"
        ) from error
    return downloaded, {key: value for key, value in tag.items() if key in PREPROCESS_FIELDS}


def _saved_preprocessing(folder: Path) -> dict[str, Any]:
    """What the weights of a directory were trained with."""
    path = folder / CONFIG_FILE
    found = json.loads(path.read_text()).get("preprocess_cfg", {}) if path.is_file() else {}
    return {key: value for key, value in found.items() if key in PREPROCESS_FIELDS and key != "size"}


def _build(
    name: str,
    config: dict[str, Any],
    weights: Path | None,
    preprocess: dict[str, Any],
    *,
    double: bool = False,
    device: str = "cpu",
) -> TwoTower:
    with _registered(config) as registered:
        try:
            clip = open_clip.create_model(
                registered, device=device, force_preprocess_cfg=preprocess, pretrained_text=False
            )
            tokenizer = _faster(open_clip.get_tokenizer(registered))
        except (OSError, ValueError, TypeError, KeyError) as error:  # a config of something else, or one with code
            raise UserError(f"cannot build {name}: {without_code(error)}") from error
    if double:
        clip = clip.double()
    if weights is not None:
        _load_weights(clip, weights, name, config)
    return TwoTower(clip, name, config, tokenizer)


def _adopted(transformer: Any) -> bool:
    """Give a transformer's blocks our way to run; whether they are of a kind that can."""
    blocks = list(transformer.resblocks)
    if not all(type(block) in OWN_BLOCKS and not hasattr(block, "ln_1_kv") for block in blocks):
        return False
    if any(getattr(block.attn, "logit_scale", None) is not None for block in blocks):
        return False  # cosine attention
    for block in blocks:
        block.__class__ = OWN_BLOCKS[type(block)]
    return True


def _runs_here(visual: Any) -> bool:
    return (
        type(visual) is VisionTransformer
        and visual.attn_pool is None
        and not visual.output_tokens
        and visual.conv1.bias is None
        and visual.conv1.stride == visual.conv1.kernel_size
    )


@contextmanager
def _registered(config: dict[str, Any]) -> Iterator[str]:
    """open_clip finds architectures by registered name only, so the config is registered for the moment."""
    check_architecture(config, "the model's config")
    if {"hf_model_name", "hf_tokenizer_name"} & set(config["text_cfg"]):
        from leanclip.models.transformers_clip import never_run_code

        never_run_code()
    registered = "leanclip-current"
    open_clip.factory._MODEL_CONFIGS[registered] = config
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)  # open_clip reports its progress on the root logger
    try:
        yield registered
    finally:
        root.setLevel(level)
        del open_clip.factory._MODEL_CONFIGS[registered]


def _load_weights(clip: Any, path: Path, name: str, config: dict[str, Any]) -> None:
    check_weights(path)
    saved = path.parent / CONFIG_FILE
    own = model_config_of(str(saved))[1] if saved.is_file() else config
    if bool(own.get("quick_gelu")) != bool(config.get("quick_gelu")):  # they fit, and would compute something else
        trained = f"{path} was trained with {'' if own.get('quick_gelu') else 'no '}QuickGELU"
        raise UserError(f"{trained}; give its own: --model {named_architecture(saved, ())}")
    try:
        open_clip.load_checkpoint(clip, str(path), weights_only=True)
    except Exception as error:  # whatever the many formats raise, the remedy is the same
        refusal = f"{path} does not hold weights of {name}"
        if own != config:
            raise UserError(f"{refusal}; give its own: --model {named_architecture(saved, ())}") from error
        reason = str(error).strip().splitlines()
        detail = next(
            (line.strip() for line in reason[1:] if line.strip()), reason[0] if reason else type(error).__name__
        )
        raise UserError(f"{refusal} ({type(error).__name__}: {detail[:160]}); give its own --model") from error

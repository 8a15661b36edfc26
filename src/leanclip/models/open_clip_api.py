"""open_clip's library, architectures and prompts. The only module that imports open_clip."""

import difflib
import json
import logging
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import open_clip
from huggingface_hub import constants as hub_constants
from open_clip import hf_configs, timm_model
from open_clip.pretrained import download_pretrained_from_hf
from open_clip.tokenizer import SimpleTokenizer, get_clean_fn
from open_clip.transform import PreprocessCfg, image_transform_v2
from open_clip.transformer import Attention, CustomResidualAttentionBlock, ResidualAttentionBlock, VisionTransformer
from open_clip.zero_shot_metadata import IMAGENET_CLASSNAMES, OPENAI_IMAGENET_TEMPLATES, SIMPLE_IMAGENET_TEMPLATES
from safetensors import SafetensorError, safe_open

from leanclip.errors import UserError, first_line
from leanclip.filesystem import parse_json, read_json
from leanclip.models.saved import CONFIG_FILE
from leanclip.models.towers.sizes import check_sizes
from leanclip.models.transformers_clip import never_run_code
from leanclip.models.untrusted import check_architecture

__all__ = [
    "IMAGENET_CLASSNAMES",
    "Attention",
    "CustomResidualAttentionBlock",
    "PreprocessCfg",
    "ResidualAttentionBlock",
    "SimpleTokenizer",
    "TimmMlp",
    "VisionTransformer",
    "get_clean_fn",
    "image_transform_v2",
    "open_clip",
]

TimmMlp: Any = timm_model.timm.layers.Mlp  # pyright: ignore[reportPrivateImportUsage]
HUB = "hf-hub:"
CONNECT_SECONDS = 3.0  # to the hub
HEADER_KEY = "open_clip_config"  # in the header of exported weights
HF_TEXT_MODELS = frozenset(hf_configs.arch_dict)  # the types of transformers' models that open_clip takes
TEMPLATES = {  # with {} for the name of the class
    "openai": tuple(template("{}") for template in OPENAI_IMAGENET_TEMPLATES),
    "simple": tuple(template("{}") for template in SIMPLE_IMAGENET_TEMPLATES),
}

open_clip.add_model_config(Path(__file__).parent / "configs")


def model_config_of(model: str) -> tuple[str, dict[str, Any]]:
    """The name and the open_clip config of a model: of a name, of the path of a file or a directory that holds it, or
    on the hub."""
    if model.startswith(HUB):
        return model, _read_config(hub_file(model, CONFIG_FILE))
    if (Path(model) / CONFIG_FILE).is_file():
        return Path(model).name, _read_config(Path(model) / CONFIG_FILE)
    if model.endswith((".json", ".safetensors")):
        return Path(model).stem, _read_config(Path(model))
    config = open_clip.get_model_config(model)
    if config is None:
        near = difflib.get_close_matches(model, open_clip.list_models(), n=3, cutoff=0)
        raise UserError(
            f"unknown model {model!r}; nearest: {', '.join(near)} (or give the path of a config .json)",
            code="model.unknown",
        )
    return model, config


def hub_file(name: str, file: str | None = None) -> Path:
    """A file of `hf-hub:ORG/NAME`, by default its weights: from the hub's cache on this machine, or downloaded."""
    reached = reach_hub()
    try:
        return Path(download_pretrained_from_hf(name.removeprefix(HUB), filename=file))
    except Exception as error:  # of many types, with one remedy
        unreached = f"{hub_constants.ENDPOINT} cannot be reached, or HF_HUB_OFFLINE is set"
        reason = "the hub has no such file" if reached else unreached
        raise UserError(
            f"cannot get {file or 'the weights'} of {name}: not in the cache of Hugging Face's hub on this machine"
            f" (HF_HUB_CACHE), and {reason} ({type(error).__name__}); download it where there is a network, or give a"
            " local directory",
            code="hub.unavailable",
        ) from error


def reach_hub() -> bool:
    """Whether the hub answers. If not, its library is set to offline: it would retry every file for half a minute."""
    address = urlsplit(hub_constants.ENDPOINT)
    if hub_constants.HF_HUB_OFFLINE or not address.hostname:
        return False
    if getproxies():  # what they reach is not known
        return True
    try:
        socket.create_connection((address.hostname, address.port or 443), timeout=CONNECT_SECONDS).close()
    except OSError:
        hub_constants.HF_HUB_OFFLINE = True
        return False
    return True


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"no such model config file: {path}", code="model.config_not_found")
    saved = read_object(path)
    config = saved.get("model_cfg", saved)
    parts = [config, config.get("vision_cfg"), config.get("text_cfg")] if isinstance(config, dict) else [None]
    if not all(isinstance(part, dict) for part in parts) or "embed_dim" not in config:
        raise bad_config(path, "it needs embed_dim, vision_cfg and text_cfg")
    check_sizes(config, str(path), in_memory=False)
    home = path.parent if path.name == CONFIG_FILE else path.with_suffix(".text")
    if "hf_model_name" in config["text_cfg"] and (home / "config.json").is_file():
        # a checkpoint or an export carries its text tower's configuration and tokenizer
        config["text_cfg"] |= dict.fromkeys(("hf_model_name", "hf_tokenizer_name"), str(home.resolve()))
    return config


def read_object(path: Path) -> dict[str, Any]:
    """The object in a model's config file, or in the header of exported weights."""
    content = exported_config(path) if path.suffix == ".safetensors" else read_json(path)
    if not isinstance(content, dict):
        raise bad_config(path, "it is not an object")
    return content


def exported_config(path: Path) -> Any:
    """What `leanclip export` writes into the header of a file; None in the weights of others."""
    try:
        header = header_of(path, HEADER_KEY)
        return None if header is None else parse_json(header)
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"cannot read {path} ({first_line(error)})", code="weights.damaged") from error


def header_of(path: Path, key: str) -> str | None:
    """An entry in the header of a .safetensors file."""
    with safe_open(path, "pt") as file:
        return (file.metadata() or {}).get(key)


def bad_config(path: Path, reason: str) -> UserError:
    return UserError(f"{path} is not an open_clip model config: {reason}", code="model.bad_config")


def timm_layers(trunk: Any) -> list[list[str]]:
    """The parameter names of each layer of a timm model, first to last."""
    groups = timm_model.timm.models.group_parameters(trunk, trunk.group_matcher())
    return [groups[number] for number in sorted(groups)]


def timm_settings(name: str) -> dict[str, Any]:
    """What timm records of the weights of a model: input size, mean and deviation, where they are."""
    timm = timm_model.timm
    settings = timm.get_pretrained_cfg(name) if timm.is_model(name) else None
    if settings is None:
        near = difflib.get_close_matches(name, timm.list_models(), n=3, cutoff=0)
        raise UserError(f"timm has no model {name!r}; nearest: {', '.join(near)}", code="model.unknown")
    return settings.to_dict(remove_source=False, remove_null=True)


def is_model_name(name: str) -> bool:
    return name in open_clip.list_models()


def is_resnet(model: str) -> bool:
    """Whether the image tower is one of CLIP's ResNets, which were trained with other optimizer settings."""
    return isinstance(model_config_of(model)[1]["vision_cfg"].get("layers"), list)


def architecture_name(config: dict[str, Any]) -> str | None:
    """The name under which an unmodified open_clip has this architecture, or None."""
    config = json.loads(json.dumps(config))
    paths = sorted((Path(open_clip.__file__).parent / "model_configs").glob("*.json"))
    return next((path.stem for path in paths if json.loads(path.read_text()) == config), None)


def named_architecture(path: Path, candidates: Sequence[str]) -> str:
    """A model name for the architecture of a config file: a candidate, else open_clip's name, else the path."""
    config = model_config_of(str(path))[1]
    for name in candidates:
        with suppress(UserError):  # a config file that has been moved
            if model_config_of(name)[1] == config:
                return name
    return architecture_name(config) or str(path)


@contextmanager
def registered(config: dict[str, Any]) -> Iterator[str]:
    """A name of this config inside the block: open_clip builds registered architectures only."""
    check_architecture(config, "the model's config")
    if {"hf_model_name", "hf_tokenizer_name"} & set(config["text_cfg"]):
        never_run_code()
        if not Path(config["text_cfg"].get("hf_tokenizer_name") or "-").is_dir():
            reach_hub()
    name = "leanclip-current"
    open_clip.factory._MODEL_CONFIGS[name] = config
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)  # open_clip reports its progress on the root logger
    try:
        yield name
    finally:
        root.setLevel(level)
        del open_clip.factory._MODEL_CONFIGS[name]

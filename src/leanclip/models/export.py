"""A trained model as files for other libraries, each read back and compared before it counts as written."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from leanclip.errors import UserError
from leanclip.filesystem import atomic_path, put_back, remove, replace_directory
from leanclip.models import transformers_clip
from leanclip.models.build import build_model
from leanclip.models.open_clip_api import PreprocessCfg, architecture_name
from leanclip.models.two_tower import TwoTower

TOLERANCE = 1e-5  # of every entry of a unit vector
SUFFIXES = (".safetensors", ".pt")
SAMPLES = ["a photo of a cat", "two dogs, running!", "", "It's 3.14 café 日本語 🙂", "word " * 100]


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written, and how far its embeddings are from ours."""

    files: list[Path]
    load: str  # Python that loads it
    difference: float


def export_open_clip(model: TwoTower, out: Path, *, overwrite: bool = False) -> Exported:
    """One file of weights that open_clip loads; beside it the architecture, where open_clip does not know that.

    A file that says the same of the architecture stays; another one is replaced with `overwrite` only.
    """
    if out.suffix not in SUFFIXES:
        raise UserError(f"{out}: an open_clip file ends in {' or '.join(SUFFIXES)}")
    name, files, before = architecture_name(model.config), [out], ""
    architecture = out.with_suffix(".json")
    described = name is None and _holds(architecture, model.config)
    if name is None and architecture.exists() and not described and not overwrite:
        raise UserError(f"{architecture} exists and is not this model's config; give another name, or --overwrite")
    weights = {name: value.detach().cpu().contiguous() for name, value in model.clip.state_dict().items()}
    _make(out.parent)
    with atomic_path(out, suffix=out.suffix) as temporary:
        if out.suffix == ".pt":
            torch.save({"state_dict": weights}, temporary)
        else:
            save_file(weights, temporary, metadata={"format": "pt"})
        again = build_model(out.name, model.config, temporary, model.open_clip_config()["preprocess_cfg"]).eval()
        difference = _difference(
            model, again.encode_image, lambda texts: again.encode_text(again.tokenizer(texts)), str(out)
        )
    if name is None:
        if not described:
            architecture.write_text(json.dumps(model.config, indent=1) + "\n")
            files.append(architecture)
        name, before = out.stem, f"open_clip.add_model_config({str(architecture)!r})\n"
    options = {"pretrained": str(out)} | _loading_options(model.preprocess)
    arguments = ", ".join([repr(name), *(f"{key}={value!r}" for key, value in options.items())])
    load = f"{before}model, _, preprocess = open_clip.create_model_and_transforms({arguments})"
    return Exported(files=files, load=f"import open_clip\n{load}", difference=difference)


def export_transformers(model: TwoTower, out: Path, card: Callable[[], str]) -> Exported:
    """A directory for `CLIPModel.from_pretrained` and `CLIPProcessor.from_pretrained`, with a model card.

    A directory of that name stays until the new one is complete and compared.
    """
    temporary = out.with_name(f".{out.name}.tmp")
    remove(temporary)  # of a process that was killed
    _make(temporary)
    try:
        config = model.open_clip_config()
        transformers_clip.save(
            temporary, model.clip.state_dict(), config["model_cfg"], config["preprocess_cfg"], model.tokenizer
        )
        again = transformers_clip.Loaded(temporary)
        difference = _difference(model, again.images, again.texts, str(out))
        (temporary / "README.md").write_text(card())
        replace_directory(temporary, out)
    finally:
        put_back(out)
        remove(temporary)
    load = (
        "from transformers import CLIPModel, CLIPProcessor\n"
        f"model, processor = CLIPModel.from_pretrained({str(out)!r}), CLIPProcessor.from_pretrained({str(out)!r})"
    )
    return Exported(files=sorted(out.iterdir()), load=load, difference=difference)


@torch.no_grad()
def _difference(
    model: TwoTower,
    images: Callable[[Tensor], Tensor],
    texts: Callable[[list[str]], Tensor],
    out: str,
) -> float:
    """The largest difference between our embeddings and the exported model's on a few inputs."""
    size: Any = model.preprocess.size
    height, width = (size, size) if isinstance(size, int) else size
    pixels = torch.randn(3, 3, height, width, generator=torch.Generator().manual_seed(0))
    model = model.eval()
    found = max(
        float((model.encode_image(pixels) - images(pixels)).abs().max()),
        float((model.encode_text(model.tokenizer(SAMPLES)) - texts(SAMPLES)).abs().max()),
    )
    if not found <= TOLERANCE:
        raise UserError(
            f"{out} was not written: its embeddings differ from ours by {found:.2g}, more than {TOLERANCE}"
        )
    return found


def _loading_options(preprocess: PreprocessCfg) -> dict[str, Any]:
    """The preprocessing arguments that open_clip needs: they are not saved with the weights."""
    options = {}
    for name in ("mean", "std", "interpolation", "resize_mode"):
        value, default = getattr(preprocess, name), getattr(PreprocessCfg(), name)
        if tuple(value) != tuple(default):
            options[f"image_{name}"] = value
    return options


def _holds(path: Path, config: dict[str, Any]) -> bool:
    try:
        return json.loads(path.read_text()) == json.loads(json.dumps(config))
    except (OSError, ValueError):
        return False


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make {directory} ({error.strerror})") from error

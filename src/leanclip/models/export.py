"""Export of a trained model for other libraries: each file is loaded again and compared before it gets its name."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from leanclip.errors import UserError, first_line
from leanclip.filesystem import atomic_path, put_back, remove, replace_directory, write_atomically
from leanclip.models import transformers_clip
from leanclip.models.build import build_model, is_resized
from leanclip.models.formats import onnx_towers, siglip
from leanclip.models.open_clip_api import HEADER_KEY, PreprocessCfg, architecture_name
from leanclip.models.saved import CONFIG_FILE
from leanclip.models.two_tower import TwoTower

TOLERANCE, ONNX_TOLERANCE = 1e-5, 1e-4  # of every entry of a unit vector
SUFFIXES = (".safetensors", ".pt")
SAMPLES = ["a photo of a cat", "two dogs, running!", "", "It's 3.14 café 日本語 🙂", "word " * 100]


@dataclass(frozen=True, kw_only=True)
class Exported:
    files: list[Path]
    load: str  # Python code that loads the export
    difference: float  # the largest between its embeddings and the model's
    tolerance: float = TOLERANCE


def export_open_clip(model: TwoTower, out: Path, *, overwrite: bool = False) -> Exported:
    """One weights file that open_clip loads, and a config beside it if open_clip does not have the architecture.

    An existing config is kept if it is equal, and replaced by a different one only with `overwrite`.
    """
    if out.suffix not in SUFFIXES:
        raise UserError(f"{out}: the name must end in {' or '.join(SUFFIXES)}", code="export.bad_suffix")
    name, config_file = architecture_name(model.config), out.with_suffix(".json")
    text_folder = out.with_suffix(".text")  # what a text tower of transformers needs
    text_files = model.config_files(text_folder)
    header = text_files.pop(CONFIG_FILE).decode()
    config = json.loads(header)["model_cfg"]
    write_config = name is None and not _holds(config_file, config)
    for path, written in ((config_file, write_config), (text_folder, bool(text_files))):
        if written and path.exists() and not overwrite:
            raise UserError(
                f"{path} exists and is not this model's; give another name, or --overwrite", code="export.exists"
            )
    weights = {name: value.detach().cpu().contiguous() for name, value in model.clip.state_dict().items()}
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(out, suffix=out.suffix) as temporary:
        _save(weights, temporary, header)
        again = build_model(out.name, model.config, temporary, model.open_clip_config()["preprocess_cfg"]).eval()
        difference = _difference(
            model, again.encode_image, lambda texts: again.encode_text(again.tokenizer(texts)), str(out)
        )
    if write_config:
        write_atomically(config_file, json.dumps(config, indent=1) + "\n")
    for file, content in text_files.items():
        text_folder.mkdir(exist_ok=True)
        write_atomically(text_folder / file, content)
    load = ["import open_clip"] + ([] if name else [f"open_clip.add_model_config({str(config_file)!r})"])
    load += _loading_lines(model, name or out.stem, out)
    files = [out, *([config_file] if write_config else []), *([text_folder] if text_files else [])]
    return Exported(files=files, load="\n".join(load), difference=difference)


def export_transformers(model: TwoTower, out: Path, card: Callable[[], str]) -> Exported:
    """A directory for `from_pretrained` of transformers' CLIPModel or SiglipModel, with a model card.

    An existing directory of that name is kept until the new one is complete and compared.
    """
    library: Any = siglip if siglip.has_attention_pooling(model) else transformers_clip

    def write(directory: Path) -> float:
        library.save(directory, model)
        encode_image, encode_text = library.load(directory)
        return _difference(model, encode_image, encode_text, str(out))

    difference = _write_directory(out, write, card)
    load = (
        "from transformers import CLIPModel, CLIPProcessor\n"
        f"model, processor = CLIPModel.from_pretrained({str(out)!r}), CLIPProcessor.from_pretrained({str(out)!r})"
    )
    if library is siglip:
        length = model.config["text_cfg"].get("context_length", 77)
        load = (
            "from transformers import AutoImageProcessor, AutoTokenizer, SiglipModel\n"
            f"model, tokenizer = SiglipModel.from_pretrained({str(out)!r}),"
            f" AutoTokenizer.from_pretrained({str(out)!r})\n"
            f'tokens = tokenizer(["a cat"], padding="max_length", max_length={length}, truncation=True,'
            ' return_tensors="pt")["input_ids"]'
        )
    return Exported(files=sorted(out.iterdir()), load=load, difference=difference)


def export_onnx(model: TwoTower, out: Path, card: Callable[[], str]) -> Exported:
    """A directory with both towers as ONNX, the tokenizer, the preprocessing and a model card."""
    pixels = onnx_towers.pixels_of(model, 3)

    def write(directory: Path) -> float:
        onnx_towers.save(directory, model)
        encoders = onnx_towers.load(directory, model)
        return _difference(model, *encoders, str(out), pixels=pixels, tolerance=ONNX_TOLERANCE)

    difference = _write_directory(out, write, card)
    load = (
        "import onnxruntime\n"
        f"image = onnxruntime.InferenceSession({str(out / onnx_towers.IMAGE)!r})  # pixels: uint8 (N, 3, H, W)\n"
        f"text = onnxruntime.InferenceSession({str(out / onnx_towers.TEXT)!r})  # tokens: int64 (N, L)"
    )
    return Exported(files=sorted(out.iterdir()), load=load, difference=difference, tolerance=ONNX_TOLERANCE)


def _write_directory(out: Path, write: Callable[[Path], float], card: Callable[[], str]) -> float:
    """Fill a directory, which gets its name when `write` has compared it. Returns the largest difference."""
    temporary = out.with_name(f".{out.name}.tmp")
    remove(temporary)  # of a process that was killed
    temporary.mkdir(parents=True)
    try:
        difference = write(temporary)
        (temporary / "README.md").write_text(card())
        replace_directory(temporary, out)
    finally:
        put_back(out)
        remove(temporary)
    return difference


@torch.no_grad()
def _difference(
    model: TwoTower,
    encode_image: Callable[[Tensor], Tensor],
    encode_text: Callable[[list[str]], Tensor],
    out: str,
    *,
    pixels: Tensor | None = None,
    tolerance: float = TOLERANCE,
) -> float:
    """The largest difference between the embeddings of the model and of its export, on a few inputs."""
    if pixels is None:
        pixels = torch.randn(3, 3, *model.image_size, generator=torch.Generator().manual_seed(0))
    model = model.eval()
    difference = max(
        float((model.encode_image(pixels) - encode_image(pixels)).abs().max()),
        float((model.encode_text(model.tokenizer(SAMPLES)) - encode_text(SAMPLES)).abs().max()),
    )
    if not difference <= tolerance:
        raise UserError(
            f"{out} was not written: its embeddings are off by {difference:.2g}, more than {tolerance}",
            code="export.different",
        )
    return difference


def _loading_lines(model: TwoTower, name: str, out: Path) -> list[str]:
    if is_resized(model.clip.visual):  # open_clip would load weights of one size into a tower of another
        return [
            f"model = open_clip.create_model({name!r})",
            f"model.visual.set_input_size({tuple(model.clip.visual.image_size)})",
            f"open_clip.load_checkpoint(model, {str(out)!r})",
        ]
    options = {"pretrained": str(out)} | _loading_options(model.preprocess)
    arguments = ", ".join([repr(name), *(f"{key}={value!r}" for key, value in options.items())])
    return [f"model, _, preprocess = open_clip.create_model_and_transforms({arguments})"]


def _loading_options(preprocess: PreprocessCfg) -> dict[str, Any]:
    """The preprocessing arguments that open_clip needs, because a weights file does not record them."""
    options = {name: getattr(preprocess, name) for name in ("mean", "std", "interpolation", "resize_mode")}
    default = PreprocessCfg()
    return {
        f"image_{name}": value for name, value in options.items() if tuple(value) != tuple(getattr(default, name))
    }


def _holds(path: Path, config: dict[str, Any]) -> bool:
    try:
        return json.loads(path.read_text()) == json.loads(json.dumps(config))
    except (OSError, ValueError):
        return False


def _save(weights: dict[str, Tensor], path: Path, config: str) -> None:
    if path.suffix == ".safetensors":
        save_file(weights, path, metadata={"format": "pt", HEADER_KEY: config})
        return
    try:
        torch.save({"state_dict": weights}, path)
    except RuntimeError as error:
        raise OSError(f"is the disk full? {first_line(error)}") from error

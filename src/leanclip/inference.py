"""Trained models: one lookup for `leanclip.load`, `evaluate` and `export`."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from leanclip.checkpointing.storage import verify
from leanclip.device import device_of
from leanclip.errors import UserError
from leanclip.models import (
    CONFIG_FILE,
    HUB,
    WEIGHTS_FILE,
    ModelConfig,
    TwoTower,
    config_of_file,
    create_model,
    find_weights,
    is_model_name,
    load_model,
    named_architecture,
)
from leanclip.models.saved import START
from leanclip.models.weights import interpolate
from leanclip.runs import RunDirectory


class SavedModel(NamedTuple):
    """A trained model, not loaded yet."""

    label: str
    load: Callable[[], TwoTower]
    directory: Path | None  # of the checkpoint
    model: str  # as open_clip takes it
    pretrained: str


def load(model: str | Path, *, device: str = "cpu") -> tuple[TwoTower, Callable[..., Tensor], Callable[..., Tensor]]:
    """A trained model for inference, its image preprocessing and its tokenizer.

    Args:
        model: a run, a checkpoint directory, a file that `leanclip export` wrote, an open_clip MODEL:TAG or
            MODEL:FILE, or a model of Hugging Face's hub (`hf-hub:ORG/NAME`): what `leanclip evaluate` takes.
        device: cpu or cuda.

    ```python
    model, preprocess, tokenizer = leanclip.load("logs/demo")
    image = model.encode_image(preprocess(picture)[None])
    captions = model.encode_text(tokenizer(["a cat", "a dog"]))
    similarity = image @ captions.T
    ```
    """
    trained = find_model(str(model)).load().to(device_of(device)).eval()
    return trained, trained.transform(), trained.tokenizer


def find_model(name: str) -> SavedModel:
    """A run, a checkpoint directory, an exported file, or an open_clip model with its tag or weights file."""
    path, (model, colon, weights) = Path(name), name.partition(":")
    if name.startswith(HUB):
        return SavedModel(name, lambda: create_model(ModelConfig(model=name, pretrained=name)), None, name, "")
    if path.is_file():
        config = config_of_file(path)
        if config is None:
            message = f"{path} holds weights only; give their architecture: MODEL:{path}"
            raise UserError(message, code="checkpoint.no_architecture")
        return SavedModel(name, lambda: load_model(path), None, named_architecture(config, ()), str(path.resolve()))
    if path.exists() or not colon:
        if is_model_name(name) and not path.exists():
            message = f"no such run or checkpoint: {name}; for the model give {name}:TAG or {name}:FILE"
            raise UserError(message, code="checkpoint.not_found")
        directory = find_weights_directory(path)
        return SavedModel(
            str(directory), lambda: load_model(directory), directory, f"local-dir:{directory.resolve()}", ""
        )
    full = str(Path(weights).resolve()) if Path(weights).exists() else weights
    config = ModelConfig(model=model, pretrained=weights)
    return SavedModel(name, lambda: create_model(config), None, model, full)


def start_of(candidate: SavedModel) -> SavedModel | None:
    """The weights that the run of a model started from, if it kept them and they are not the model itself."""
    run = None if candidate.directory is None else RunDirectory.containing(candidate.directory)
    if run is None or candidate.directory is None or not (start := run.checkpoints / START).is_dir():
        return None
    return None if candidate.directory.resolve() == start.resolve() else find_model(str(start))


def interpolated(start: SavedModel, end: SavedModel, weight: float) -> SavedModel:
    """The model between two, whose weights are (1 - weight) start + weight end."""

    def load_both() -> TwoTower:
        if start.directory is not None and start.directory.name == START:
            verify(start.directory)
        first, last = start.load(), end.load()
        inputs = [(bool(m.config.get("quick_gelu")), *m.preprocess.mean, *m.preprocess.std) for m in (first, last)]
        if inputs[0] != inputs[1]:
            raise UserError(
                f"{start.label} and {end.label} differ in activation or in the normalisation of images, so that their"
                " weights cannot be interpolated",
                code="interpolate.other_model",
            )
        last.clip.load_state_dict(interpolate(first.clip.state_dict(), last.clip.state_dict(), weight))
        return last

    return SavedModel(f"{weight:g} of the way from {start.label} to {end.label}", load_both, None, end.model, "")


def find_start(name: str | None, end: SavedModel) -> SavedModel:
    """Where an interpolation begins: a model, or by default the weights that the run of the end started from."""
    start = start_of(end) if name is None else find_model(name)
    if start is None:
        raise UserError(
            f"{end.label} has no start weights beside it: it was trained from scratch, with --discard-start, or by an"
            " earlier version; name them with --start",
            code="interpolate.no_start",
        )
    return start


def find_weights_directory(path: Path) -> Path:
    """The directory with the weights of a run or checkpoint and their architecture."""
    if not path.exists():
        raise UserError(f"no such run or checkpoint: {path}", code="checkpoint.not_found")
    directory = find_weights(path)
    if directory is None or not (directory / CONFIG_FILE).is_file():
        raise UserError(
            f"no checkpoint in {path}: expected {WEIGHTS_FILE} and {CONFIG_FILE} there or in its checkpoints/last",
            code="checkpoint.not_found",
        )
    return directory

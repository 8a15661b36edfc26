"""A trained model, ready to use."""

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from leanclip.errors import UserError
from leanclip.models import CONFIG_FILE, WEIGHTS_FILE, TwoTower, find_weights, load_model

__all__ = ["find_model", "load", "load_model"]


def load(run_or_checkpoint: str | Path) -> tuple[TwoTower, Callable[..., Tensor], Callable[..., Tensor]]:
    """The model of a run or checkpoint for inference, its image preprocessing and its tokenizer.

    ```python
    model, preprocess, tokenizer = leanclip.load("logs/demo")
    image = model.encode_image(preprocess(picture)[None])
    captions = model.encode_text(tokenizer(["a cat", "a dog"]))
    similarity = image @ captions.T
    ```
    """
    model = load_model(find_model(Path(run_or_checkpoint))).eval()
    return model, model.transform(), model.tokenizer


def find_model(path: Path) -> Path:
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

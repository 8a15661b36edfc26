"""A trained model, ready to use."""

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from leanclip.errors import UserError
from leanclip.models import CONFIG_FILE, WEIGHTS_FILE, TwoTower, load_model

__all__ = ["find_model", "load", "load_model"]


def load(run_or_checkpoint: str | Path) -> tuple[TwoTower, Callable[..., Tensor], Callable[..., Tensor]]:
    """See `leanclip.load`."""
    model = load_model(find_model(Path(run_or_checkpoint))).eval()
    return model, model.transform(train=False), model.tokenizer


def find_model(given: Path) -> Path:
    """The directory with the weights: the given one, or the last checkpoint of a run."""
    if not given.exists():
        raise UserError(f"no such run or checkpoint: {given}")
    newest = sorted(given.glob("checkpoints/step_*"), reverse=True)[:1]  # where the link is gone
    for candidate in (given, given / "checkpoints" / "last", *newest):
        if (candidate / WEIGHTS_FILE).is_file() and (candidate / CONFIG_FILE).is_file():
            return candidate
    raise UserError(f"{given} holds no checkpoint: expected {WEIGHTS_FILE} there or in its checkpoints/last")

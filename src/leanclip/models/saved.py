"""Finds saved weights: the only lookup in a run directory or a checkpoint directory."""

import re
from pathlib import Path

WEIGHTS_FILE = "open_clip_model.safetensors"  # the two names that open_clip looks for in a `local-dir:`
CONFIG_FILE = "open_clip_config.json"
CHECKPOINTS, LAST = "checkpoints", "last"
START = "start"  # the weights that a fine-tuned run started from, among its checkpoints


def find_weights(path: Path) -> Path | None:
    """The directory with the weights: a checkpoint directory itself, or the last checkpoint of a run directory."""
    newest = sorted(step_directories(path / CHECKPOINTS), reverse=True)[:1]  # if the link is missing
    candidates = (path, path / CHECKPOINTS / LAST, *(directory for _, directory in newest))
    return next((directory for directory in candidates if (directory / WEIGHTS_FILE).is_file()), None)


def step_directories(checkpoints: Path) -> list[tuple[int, Path]]:
    """The checkpoints that a run can resume from, with their steps."""
    paths = [path for path in checkpoints.glob("step_*") if re.fullmatch(r"step_[0-9]+", path.name)]
    return [(int(path.name[5:]), path) for path in paths if path.is_dir()]

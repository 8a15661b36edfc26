"""Saving and going on. A checkpoint directory is also a model directory that open_clip loads by itself."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.optim import Optimizer

from leanclip.errors import UserError
from leanclip.losses import ContrastiveLoss
from leanclip.models import CONFIG_FILE, WEIGHTS_FILE, TwoTower

STATE_FILE = "training.pt"
POSITION_FILE = "position.json"


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a run stands: the next step is `step`, the `epoch_step`-th of `epoch`."""

    step: int
    epoch: int
    epoch_step: int
    samples: int
    global_batch: int
    seconds: float
    best: float | None


def save_model(directory: Path, model: TwoTower, loss: ContrastiveLoss) -> None:
    """The weights and the architecture, with the loss's temperature as the model's logit_scale."""
    directory.mkdir(parents=True, exist_ok=True)
    bias = getattr(loss, "bias", None)
    weights = {name: value.cpu() for name, value in model.weights(loss.temperature(), bias).items()}
    save_file(weights, directory / WEIGHTS_FILE)
    (directory / CONFIG_FILE).write_text(json.dumps(model.open_clip_config(), indent=1))


def save_best(checkpoints: Path, model: TwoTower, loss: ContrastiveLoss) -> None:
    """Replace checkpoints/best."""
    temporary = checkpoints / ".best.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    save_model(temporary, model, loss)
    shutil.rmtree(checkpoints / "best", ignore_errors=True)
    temporary.rename(checkpoints / "best")


def save_checkpoint(
    checkpoints: Path, model: TwoTower, loss: ContrastiveLoss, optimizer: Optimizer, position: Position
) -> Path:
    """Everything a resumed run needs, complete under its name or not there at all."""
    final = checkpoints / f"step_{position.step:08d}"
    temporary = checkpoints / f".{final.name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    save_model(temporary, model, loss)
    random_state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        random_state["cuda"] = torch.cuda.get_rng_state()
    state = {"optimizer": optimizer.state_dict(), "loss": loss.state_dict(), "random": random_state}
    torch.save(state, temporary / STATE_FILE)
    (temporary / POSITION_FILE).write_text(json.dumps(vars(position)))
    shutil.rmtree(final, ignore_errors=True)
    temporary.rename(final)
    link = checkpoints / ".last.tmp"
    link.unlink(missing_ok=True)
    link.symlink_to(final.name)
    link.replace(checkpoints / "last")
    return final


def find_checkpoint(resume: str, run: Path) -> Path:
    """The checkpoint directory that --resume means."""
    given = run if resume == "latest" else Path(resume)
    if not given.exists():
        raise UserError(f"--resume {resume}: no such run or checkpoint: {given}")
    for candidate in (given, given / "checkpoints" / "last"):
        if (candidate / STATE_FILE).is_file():
            return candidate.resolve()
    raise UserError(f"--resume {resume}: there is no checkpoint in {given}; start without --resume")


def load_checkpoint(directory: Path, loss: ContrastiveLoss, optimizer: Optimizer, device: torch.device) -> Position:
    """Restore everything. The weights were loaded with the model; here come optimizer, loss and random state."""
    state: dict[str, Any] = torch.load(directory / STATE_FILE, map_location="cpu", weights_only=True)
    try:
        loss.load_state_dict(state["loss"])
        optimizer.load_state_dict(state["optimizer"])
    except (RuntimeError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[-1].strip()
        raise UserError(
            f"{directory} is of another run ({reason}); resume with its own model, loss and data"
        ) from error
    torch.set_rng_state(state["random"]["cpu"])
    if device.type == "cuda" and "cuda" in state["random"]:
        torch.cuda.set_rng_state(state["random"]["cuda"], device)
    return Position(**json.loads((directory / POSITION_FILE).read_text()))

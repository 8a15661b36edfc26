"""Saving and going on. A checkpoint directory is also a model directory that open_clip loads by itself."""

import contextlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim import Optimizer

from leanclip.distributed import Ranks, split_like, whole
from leanclip.errors import UserError
from leanclip.losses import ContrastiveLoss
from leanclip.models import CONFIG_FILE, WEIGHTS_FILE, TwoTower, read_torch_file
from leanclip.training.ema import WeightEMA
from leanclip.training.loss_scale import LossScale

STATE_FILE = "training.pt"
POSITION_FILE = "position.json"
TRAINED_FILE = "trained.safetensors"  # with an EMA, whose weights are the model's: those that train


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
    skipped: int = 0  # steps whose numbers were not finite


class SavedModel(NamedTuple):
    """The weights on the host, and the architecture, with the loss's temperature as the model's logit_scale."""

    weights: dict[str, Tensor]
    config: dict[str, Any]
    beside: Mapping[str, str]  # texts by file name, such as the model card

    @classmethod
    def of(cls, model: TwoTower, loss: ContrastiveLoss, beside: Mapping[str, str]) -> "SavedModel":
        """All ranks call it together: each may have only a part."""
        weights = model.weights(loss.temperature(), getattr(loss, "bias", None))
        return cls(weights, model.open_clip_config(), beside)

    def write(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        save_file(self.weights, directory / WEIGHTS_FILE)
        (directory / CONFIG_FILE).write_text(json.dumps(self.config, indent=1))
        for name, text in self.beside.items():
            (directory / name).write_text(text, encoding="utf-8")


def save_best(checkpoints: Path, model: TwoTower, loss: ContrastiveLoss, beside: Mapping[str, str]) -> None:
    """Replace checkpoints/best. All ranks call it together, the first one writes."""
    saved = SavedModel.of(model, loss, beside)
    if not Ranks.current().first:
        return
    temporary = checkpoints / ".best.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    saved.write(temporary)
    shutil.rmtree(checkpoints / "best", ignore_errors=True)
    temporary.rename(checkpoints / "best")


def save_checkpoint(
    checkpoints: Path,
    model: TwoTower,
    loss: ContrastiveLoss,
    optimizer: Optimizer,
    scale: LossScale,
    position: Position,
    beside: Mapping[str, str],
    ema: WeightEMA | None = None,
) -> Path:
    """Everything a resumed run needs, complete under its name or not there at all.

    All ranks call it together, the first one writes. Nothing in it depends on how many they are. With an EMA the
    averaged weights are the model's, and those that train lie beside them.
    """
    final = checkpoints / f"step_{position.step:08d}"
    temporary, first = checkpoints / f".{final.name}.tmp", Ranks.current().first
    if first:
        shutil.rmtree(temporary, ignore_errors=True)
    # Each is written before the next is looked at: on a CPU they are the model's own memory, not copies.
    with ema.applied() if ema is not None else contextlib.nullcontext():
        saved = SavedModel.of(model, loss, beside)
        if first:
            saved.write(temporary)
    if ema is not None:
        trained = SavedModel.of(model, loss, beside)
        if first:
            save_file(trained.weights, temporary / TRAINED_FILE)
    state = {
        "optimizer": _whole_on_host(optimizer.state_dict()),
        "loss": _whole_on_host(loss.state_dict()),
        "ema": None if ema is None else _whole_on_host(ema.state_dict()),
        "random": _random_states(next(model.parameters()).device),
        "scale": {"value": scale.value, "good_steps": scale.good_steps},
    }
    if not first:
        return final
    torch.save(state, temporary / STATE_FILE)
    (temporary / POSITION_FILE).write_text(json.dumps(vars(position)))
    shutil.rmtree(final, ignore_errors=True)
    temporary.rename(final)
    link = checkpoints / ".last.tmp"
    link.unlink(missing_ok=True)
    link.symlink_to(final.name)
    link.replace(checkpoints / "last")
    return final


def _whole_on_host(state: Any) -> Any:
    """The same state with every tensor complete, on the host of the first rank; the others keep none."""
    if isinstance(state, Tensor):
        complete = whole(state)
        return complete.cpu() if Ranks.current().first else None
    if isinstance(state, dict):
        return {key: _whole_on_host(value) for key, value in state.items()}
    return [_whole_on_host(value) for value in state] if isinstance(state, list) else state


def _random_states(device: torch.device) -> dict[str, Tensor]:
    """Of all ranks, a row each."""
    ranks = Ranks.current()
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return {name: ranks.gather(state[None], ranks.size, purpose="random states") for name, state in states.items()}


def find_checkpoint(resume: str, run: Path) -> Path:
    """What --resume means: a checkpoint directory, or a file of OpenCLIP's."""
    given = run if resume == "latest" else Path(resume)
    if not given.exists():
        raise UserError(f"--resume {resume}: no such run or checkpoint: {given}")
    if given.is_file():  # of OpenCLIP's
        return given.resolve()
    for candidate in (given, given / "checkpoints" / "last"):
        if (candidate / STATE_FILE).is_file():
            return candidate.resolve()
    raise UserError(f"--resume {resume}: there is no checkpoint in {given}; start without --resume")


def trained_weights(directory: Path) -> Path:
    """The file of a checkpoint's weights that train."""
    file = directory / TRAINED_FILE
    return file if file.is_file() else directory / WEIGHTS_FILE


@torch.no_grad()
def load_trained(directory: Path, model: TwoTower) -> None:
    """The weights that train, into a model that is there already and may be split over the ranks."""
    saved = load_file(trained_weights(directory))
    for name, value in model.clip.state_dict().items():
        if name not in ("logit_scale", "logit_bias"):  # the loss has them
            value.copy_(split_like(saved[name], value))


def load_checkpoint(
    directory: Path,
    loss: ContrastiveLoss,
    optimizer: Optimizer,
    scale: LossScale,
    device: torch.device,
    ema: WeightEMA | None = None,
) -> Position:
    """Restore everything but the weights, which were loaded with the model: optimizer, loss, EMA and random state."""
    state: dict[str, Any] = read_torch_file(directory / STATE_FILE)
    try:
        loss.load_state_dict(state["loss"])
        optimizer.load_state_dict(split_over_ranks(state["optimizer"], optimizer))
    except (RuntimeError, ValueError, KeyError, IndexError) as error:
        reason = str(error).strip().splitlines()[-1].strip()
        raise UserError(
            f"{directory} is of another run ({reason}); resume with its own model, loss and data"
        ) from error
    if ema is not None:
        if (averaged := state.get("ema")) is not None:
            ema.load_state_dict(averaged)
        else:
            ema.restart()
    if scale.grows:
        scale.value, scale.good_steps = state["scale"]["value"], state["scale"]["good_steps"]
    rank, random = Ranks.current().rank, state["random"]
    if rank < len(random["cpu"]):  # a rank that the saved run did not have keeps the state it was seeded with
        torch.set_rng_state(random["cpu"][rank].clone())
        if device.type == "cuda" and "cuda" in random:
            torch.cuda.set_rng_state(random["cuda"][rank].clone(), device)
    return Position(**json.loads((directory / POSITION_FILE).read_text()))


def split_over_ranks(state: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """An optimizer's complete state, each tensor split as its parameter is."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    split = {
        number: {
            name: split_like(value, parameters[number]) if isinstance(value, Tensor) else value
            for name, value in values.items()
        }
        for number, values in state["state"].items()
    }
    return state | {"state": split}

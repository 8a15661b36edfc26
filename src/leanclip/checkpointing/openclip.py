"""Resumes an OpenCLIP run: its epoch_N.pt holds weights, epoch, optimizer and loss scale in one file."""

import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from leanclip.distributed import shard_like
from leanclip.errors import UserError
from leanclip.losses import ContrastiveLoss
from leanclip.losses.registry import spec_of
from leanclip.models import TwoTower, read_torch_file
from leanclip.optim.loss_scale import LossScale

MOST_EPOCHS = 2**31
SAME_GRADIENT = ("infonce", "siglip")  # the losses whose temperature gradient equals OpenCLIP's


@dataclass(frozen=True)
class OpenClipCheckpoint:
    """The content of the file except the weights, which open_clip reads itself."""

    path: Path
    epoch: int  # finished ones
    optimizer: Any
    scaler: Any

    @classmethod
    def read(cls, path: Path) -> "OpenClipCheckpoint":
        try:
            content: Any = read_torch_file(path, mapped=True)
        except UserError as error:
            raise UserError(
                f"--resume {path}: not an OpenCLIP checkpoint: {error}", code="resume.not_openclip"
            ) from error
        epoch = content.get("epoch") if isinstance(content, dict) and "state_dict" in content else None
        if type(epoch) is not int or not 0 <= epoch < MOST_EPOCHS:
            raise UserError(
                f"--resume {path}: the file has weights but no epoch to resume from; start from them: --pretrained",
                code="resume.weights_only",
            )
        return cls(path, epoch, content.get("optimizer"), content.get("scaler"))

    def restore(self, model: TwoTower, loss: ContrastiveLoss, optimizer: Optimizer, scale: LossScale) -> str:
        """Load the state of optimizer and loss scale where it fits. Returns a sentence that lists what was loaded."""
        loaded, skipped = [f"the weights after epoch {self.epoch}", "the temperature"], ""
        moments = None
        with suppress(KeyError, TypeError, AttributeError, ValueError):  # of another program's file
            moments = self._moments(model, loss)
        parameters = dict(model.clip.named_parameters()) | {
            name.rpartition(".")[2]: parameter for name, parameter in loss.named_parameters()
        }
        optimized = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        indices = {id(parameter): index for index, parameter in enumerate(optimized)}
        if moments is None or not isinstance(optimizer, AdamW):
            skipped = "; not the optimizer's state, which does not fit"
        else:
            state = {
                indices[id(parameters[name])]: {
                    key: shard_like(value, parameters[name]) for key, value in values.items()
                }
                for name, values in moments.items()
            }
            optimizer.load_state_dict(optimizer.state_dict() | {"state": state})
            loaded.append(f"AdamW's state of {len(state)} of {len(indices)} parameters")
        saved_scale = self.scaler if isinstance(self.scaler, dict) else {}
        value, steps = saved_scale.get("scale"), saved_scale.get("_growth_tracker")
        if scale.grows and type(value) is float and math.isfinite(value) and value >= 1 and type(steps) is int:
            scale.value, scale.good_steps = value, steps
            loaded.append("the loss scale")
        fresh = f"; {loss.name} starts with new per-sample state" if spec_of(loss.name).running else ""
        return f"from {self.path}: {', '.join(loaded)}{skipped}{fresh}"

    def _moments(self, model: TwoTower, loss: ContrastiveLoss) -> dict[str, dict[str, Tensor]] | None:
        """AdamW's state by our parameter names; None if the file's does not fit these parameters.

        OpenCLIP numbers its parameters: first those without weight decay, then the others, each in the model's order.
        """
        if self.optimizer is None or len(self.optimizer["param_groups"]) != 2:
            return None
        trained = {
            name: parameter
            for name, parameter in model.clip.named_parameters()
            if parameter.requires_grad or name.startswith(("logit_scale", "logit_bias", "text_decoder."))
        }
        groups = [[name for name in trained if _decays(name, trained[name]) == decays] for decays in (False, True)]
        if [len(group["params"]) for group in self.optimizer["param_groups"]] != [len(names) for names in groups]:
            return None
        learned = {name.rpartition(".")[2] for name, _ in loss.named_parameters()}
        same = {"logit_scale": "log_inv_tau", "logit_bias": "bias"} if loss.name in SAME_GRADIENT else {}
        loss_names = {name: ours for name, ours in same.items() if ours in learned}
        moments: dict[str, dict[str, Tensor]] = {}
        for index, name in enumerate(groups[0] + groups[1]):
            values = self.optimizer["state"].get(index)
            if values is None:
                continue
            shapes = {key: value.shape for key, value in values.items()}
            if shapes != dict.fromkeys(("exp_avg", "exp_avg_sq"), trained[name].shape) | {"step": torch.Size()}:
                return None
            values = {key: value.clone() for key, value in values.items()}  # independent of the mapped file
            if trained[name].requires_grad:
                moments[name] = values
            elif name in loss_names:
                moments[loss_names[name]] = {key: value.reshape(()) for key, value in values.items()}
        return moments


def _decays(name: str, parameter: Tensor) -> bool:
    """Whether OpenCLIP applies weight decay to a parameter."""
    return parameter.ndim >= 2 and not any(part in name for part in ("bn", "ln", "bias", "logit_scale"))

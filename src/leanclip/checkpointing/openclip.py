"""Going on with a run of OpenCLIP's: its epoch_N.pt holds weights, epoch, optimizer and loss scale in one file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from leanclip.distributed import shard_like
from leanclip.errors import UserError
from leanclip.losses import ContrastiveLoss
from leanclip.models import TwoTower, read_torch_file
from leanclip.optim.loss_scale import LossScale

SAME_GRADIENT = ("infonce", "siglip")  # the losses that move the temperature as OpenCLIP's do


@dataclass(frozen=True)
class OpenClipCheckpoint:
    """What is in the file beside the weights, which open_clip reads itself."""

    path: Path
    epoch: int  # how many are done
    optimizer: dict[str, Any] | None
    scaler: dict[str, Any] | None

    @classmethod
    def read(cls, path: Path) -> "OpenClipCheckpoint":
        try:
            content: Any = read_torch_file(path, mapped=True)
        except UserError as error:
            raise UserError(f"--resume {path}: no checkpoint of OpenCLIP's: {error}") from error
        if not isinstance(content, dict) or not isinstance(content.get("epoch"), int) or "state_dict" not in content:
            raise UserError(
                f"--resume {path}: the file does not say where its run stood; start from it: --pretrained"
            )
        return cls(path, content["epoch"], content.get("optimizer"), content.get("scaler"))

    def restore(self, model: TwoTower, loss: ContrastiveLoss, optimizer: Optimizer, scale: LossScale) -> str:
        """Give the optimizer and the loss scale their state where it fits. Returns what was taken, as a sentence."""
        taken, left = [f"the weights after epoch {self.epoch}", "the temperature"], []
        state = self._moments(model, loss)
        parameters = _named(model, loss)
        numbers = {id(p): n for n, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
        if state is None or not isinstance(optimizer, AdamW):
            left.append("the optimizer's state, which does not fit")
        else:
            found = {numbers[id(parameters[name])]: values for name, values in state.items()}
            optimizer.load_state_dict(_split_over_ranks(optimizer.state_dict() | {"state": found}, optimizer))
            taken.append(f"AdamW's state of {len(found)} of {len(numbers)} parameters")
        if scale.grows and self.scaler:
            scale.value, scale.good_steps = float(self.scaler["scale"]), int(self.scaler["_growth_tracker"])
            taken.append("the loss scale")
        begins = "" if loss.name in SAME_GRADIENT else f"; {loss.name} begins with its own state"
        return f"from {self.path}: {', '.join(taken)}" + (f"; not {', '.join(left)}" if left else "") + begins

    def _moments(self, model: TwoTower, loss: ContrastiveLoss) -> dict[str, dict[str, Tensor]] | None:
        """AdamW's state by our parameters' names; None where the file's does not belong to these parameters.

        OpenCLIP numbers its parameters: first those without weight decay, then the others, each in the model's order.
        """
        if self.optimizer is None or len(self.optimizer["param_groups"]) != 2:
            return None
        trained = {
            name: parameter
            for name, parameter in model.clip.named_parameters()
            if parameter.requires_grad or name in ("logit_scale", "logit_bias")
        }
        names = sorted(trained, key=lambda name: not _spared(name, trained[name]))  # stable: the order stays
        sizes = [len(group["params"]) for group in self.optimizer["param_groups"]]
        spared = sum(_spared(name, parameter) for name, parameter in trained.items())
        if sizes != [spared, len(trained) - spared]:
            return None
        ours = {"logit_scale": "log_inv_tau", "logit_bias": "bias"} if loss.name in SAME_GRADIENT else {}
        found: dict[str, dict[str, Tensor]] = {}
        for number, name in enumerate(names):
            values = self.optimizer["state"].get(number)
            if values is None:
                continue
            if set(values) != {"step", "exp_avg", "exp_avg_sq"} or values["exp_avg"].shape != trained[name].shape:
                return None
            values = {key: value.clone() for key, value in values.items()}  # no part of the file any more
            if trained[name].requires_grad:
                found[name] = values
            elif name in ours:
                found[ours[name]] = {key: value.reshape(()) for key, value in values.items()}
        return found


def _named(model: TwoTower, loss: ContrastiveLoss) -> dict[str, nn.Parameter]:
    """The parameters that the optimizer has: open_clip's names, and the last part of the loss's."""
    return dict(model.clip.named_parameters()) | {
        name.rpartition(".")[2]: parameter for name, parameter in loss.named_parameters()
    }


def _split_over_ranks(state: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """An optimizer's complete state, each tensor split as its parameter is."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    split = {
        number: {
            name: shard_like(value, parameters[number]) if isinstance(value, Tensor) else value
            for name, value in values.items()
        }
        for number, values in state["state"].items()
    }
    return state | {"state": split}


def _spared(name: str, parameter: Tensor) -> bool:
    """Whether OpenCLIP leaves a parameter out of the weight decay."""
    return parameter.ndim < 2 or any(part in name for part in ("bn", "ln", "bias", "logit_scale"))

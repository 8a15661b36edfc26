"""Everything that changes while a run trains, as tensors by name and as values for JSON."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from leanclip.checkpointing.storage import StoredTensors
from leanclip.distributed import Ranks
from leanclip.errors import UserError
from leanclip.losses import ContrastiveLoss
from leanclip.models import TwoTower
from leanclip.optim.loss_scale import LossScale

MODEL, EMA, LOSS, OPTIMIZER = "model.", "ema.", "loss.", "optimizer."
RANDOM, EXPORT = "random.", "export."


class AveragedWeights(Protocol):
    """What a checkpoint keeps of a running average of the weights."""

    averages: dict[str, Tensor]
    updates: int

    def restart(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Of this process; where weights or tables are split over several, its part of them."""

    model: TwoTower
    loss: ContrastiveLoss
    optimizer: Optimizer
    scale: LossScale
    device: torch.device
    ema: AveragedWeights | None = None

    def tensors(self) -> dict[str, Tensor]:
        """By names that say nothing of how many processes there are."""
        return self._modules() | self.model_tensors() | self._moments() | self._random()

    def model_tensors(self) -> dict[str, Tensor]:
        """What the weights for other tools are made of. Several processes ask for it together."""
        found = _prefixed(MODEL, self.model.state_dict()) | self._averages()
        found[f"{EXPORT}temperature"] = self.loss.temperature().detach()
        if (bias := getattr(self.loss, "bias", None)) is not None:
            found[f"{EXPORT}bias"] = bias.detach()
        return found

    def values(self) -> dict[str, Any]:
        """What is no tensor. The optimizer's settings are not here: they come from the configuration."""
        state = {
            name: {key: value for key, value in self.optimizer.state[parameter].items() if not _is_tensor(value)}
            for name, parameter in self._parameters().items()
        }
        return {
            "optimizer": {
                "kind": type(self.optimizer).__name__,
                "state": {name: values for name, values in state.items() if values},
                "groups": [self._counted(group) for group in self.optimizer.param_groups],
            },
            "scale": {
                "value": self.scale.value,
                "good_steps": self.scale.good_steps,
                "grows": self.scale.grows,
            },
            "ema": {"updates": 0 if self.ema is None else self.ema.updates},
        }

    def load(
        self,
        stored: StoredTensors,
        values: Mapping[str, Any],
        group: dist.ProcessGroup | None,
        *,
        reset_loss: bool = False,
    ) -> None:
        """Everything as it was saved. With `reset_loss` the tables begin anew; a temperature of all samples stays."""
        if values["optimizer"]["kind"] != type(self.optimizer).__name__:
            raise UserError(
                f"the run has the optimizer {values['optimizer']['kind']}, not {type(self.optimizer).__name__}"
            )
        modules = self._modules()
        if reset_loss:
            modules = {name: tensor for name, tensor in modules.items() if _stays(name, tensor, stored)}
        _check(modules, stored, (MODEL,) if reset_loss else (MODEL, LOSS))
        moments = self._stored_moments(stored, reset_loss=reset_loss)
        random = self._stored_random(stored)
        averages = self._averages() if any(name.startswith(EMA) for name in stored.shapes) else {}
        _check(averages, stored, (EMA,) if averages else ())
        stored.read_into(modules | averages | moments | random, group)
        if self.ema is not None and averages:
            self.ema.updates = values["ema"]["updates"]
        elif self.ema is not None:
            self.ema.restart()
        self._load_optimizer(moments, values["optimizer"])
        if self.scale.grows and values["scale"].get("grows", values["scale"]["value"] > 1):
            self.scale.value, self.scale.good_steps = values["scale"]["value"], values["scale"]["good_steps"]
        rank = Ranks.current().rank
        if (cpu := random.get(f"{RANDOM}cpu.{rank}")) is not None:
            torch.set_rng_state(cpu)
        if (cuda := random.get(f"{RANDOM}cuda.{rank}")) is not None:
            torch.cuda.set_rng_state(cuda, self.device)

    def _modules(self) -> dict[str, Tensor]:
        return _prefixed(MODEL, self.model.state_dict()) | _prefixed(LOSS, self.loss.state_dict())

    def _averages(self) -> dict[str, Tensor]:
        return {} if self.ema is None else _prefixed(EMA, self.ema.averages)

    def _parameters(self) -> dict[str, nn.Parameter]:
        """The optimizer's, under the names that they have in the model or the loss."""
        names = {id(parameter): MODEL + name for name, parameter in self.model.named_parameters()}
        names |= {id(parameter): LOSS + name for name, parameter in self.loss.named_parameters()}
        return {
            names[id(parameter)]: parameter for group in self.optimizer.param_groups for parameter in group["params"]
        }

    def _moments(self) -> dict[str, Tensor]:
        return {
            f"{OPTIMIZER}{name}.{key}": value
            for name, parameter in self._parameters().items()
            for key, value in self.optimizer.state[parameter].items()
            if _is_tensor(value)
        }

    def _stored_moments(self, stored: StoredTensors, *, reset_loss: bool) -> dict[str, Tensor]:
        """Empty tensors for the stored ones, split as their parameters are."""
        found: dict[str, Tensor] = {}
        parameters = self._parameters()
        for key in (key for key in stored.shapes if key.startswith(OPTIMIZER)):
            name = key.removeprefix(OPTIMIZER).rpartition(".")[0]
            if name not in parameters:
                if reset_loss and name.startswith(LOSS):
                    continue
                raise UserError(f"the run trains {name}, which is frozen or missing here")
            parameter = parameters[name].detach()
            if stored.shapes[key] == parameter.shape and parameter.ndim:
                found[key] = torch.empty_like(parameter, dtype=stored.dtypes[key])
            else:  # a count of steps, which the optimizer puts where it wants it
                found[key] = torch.empty(stored.shapes[key], dtype=stored.dtypes[key])
        return found

    def _load_optimizer(self, moments: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        parameters = self._parameters()
        numbers = {name: number for number, name in enumerate(parameters)}
        state: dict[int, dict[str, Any]] = {
            numbers[name]: dict(found) for name, found in values["state"].items() if name in numbers
        }
        for key, value in moments.items():
            name, _, field = key.removeprefix(OPTIMIZER).rpartition(".")
            state.setdefault(numbers[name], {})[field] = value
        groups = self.optimizer.state_dict()["param_groups"]
        for group, counted in zip(groups, values["groups"], strict=False):
            group.update({key: value for key, value in counted.items() if key not in self._settings()})
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _counted(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """What an optimizer keeps in a group beside its settings, such as a count of steps."""
        found = {key: value for key, value in group.items() if key not in self._settings()}
        numbers = {key: value.item() if _is_tensor(value) else value for key, value in found.items()}
        return {key: value for key, value in numbers.items() if isinstance(value, int | float)}

    def _settings(self) -> set[str]:
        """What of a group the configuration decides."""
        ours = {"params", "lr", "initial_lr", "peak_lr", "follows_schedule", "weight_decay", "name"}
        return ours | set(self.optimizer.defaults)

    def _random(self) -> dict[str, Tensor]:
        rank = Ranks.current().rank
        found = {f"{RANDOM}cpu.{rank}": torch.get_rng_state()}
        if self.device.type == "cuda":
            found[f"{RANDOM}cuda.{rank}"] = torch.cuda.get_rng_state(self.device)
        return found

    def _stored_random(self, stored: StoredTensors) -> dict[str, Tensor]:
        """A process that the saved run did not have keeps the state that it was seeded with."""
        return {
            key: torch.empty(stored.shapes[key], dtype=torch.uint8) for key in self._random() if key in stored.shapes
        }


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in tensors.items()}


def _stays(name: str, tensor: Tensor, stored: StoredTensors) -> bool:
    """Whether a tensor survives new data: weights, and what the loss has one of for all samples."""
    if name.startswith(MODEL):
        return True
    return tensor.ndim == 0 and not name.endswith(".visited") and stored.shapes.get(name) == tensor.shape


def _check(wanted: Mapping[str, Tensor], stored: StoredTensors, prefixes: tuple[str, ...]) -> None:
    """The same names and shapes on both sides, or a complaint that names one."""
    there = {name for name in stored.shapes if name.startswith(prefixes)}
    wanted = {name: tensor for name, tensor in wanted.items() if name.startswith(prefixes)}
    if missing := sorted(set(wanted) - there):
        raise UserError(f"the run has no {missing[0]}")
    if more := sorted(there - set(wanted)):
        raise UserError(f"the run has {more[0]}, which is missing here")
    for name, tensor in wanted.items():
        if stored.shapes[name] != tensor.shape:
            raise UserError(f"{name} is {tuple(stored.shapes[name])} in the run and {tuple(tensor.shape)} here")

"""The state of a training run, as tensors by name and as values for JSON."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
from leanclip.optim.weight_average import WeightEMA

MODEL, EMA, LOSS, OPTIMIZER = "model.", "ema.", "loss.", "optimizer."
RANDOM, EXPORT = "random.", "export."


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The state on this process; of weights and tables that are split over the ranks, its part."""

    model: TwoTower
    loss: ContrastiveLoss
    optimizer: Optimizer
    scale: LossScale
    device: torch.device
    ema: WeightEMA | None = None

    def tensors(self) -> dict[str, Tensor]:
        """By names that do not depend on the number of processes."""
        return self._modules() | self.model_tensors() | self._moments() | self._random()

    def model_tensors(self) -> dict[str, Tensor]:
        """The tensors from which the exported weights are made. A collective call."""
        tensors = _prefixed(MODEL, self.model.state_dict()) | self._averages()
        tensors[f"{EXPORT}temperature"] = self.loss.temperature().detach()
        if (bias := getattr(self.loss, "bias", None)) is not None:
            tensors[f"{EXPORT}bias"] = bias.detach()
        return tensors

    def values(self) -> dict[str, Any]:
        """Values that are no tensors, except the optimizer's settings, which come from the configuration."""
        state = {
            name: {
                key: value for key, value in self.optimizer.state[parameter].items() if not isinstance(value, Tensor)
            }
            for name, parameter in self._parameters().items()
        }
        return {
            "optimizer": {
                "kind": type(self.optimizer).__name__,
                "state": {name: values for name, values in state.items() if values},
                "groups": [self._counters(group) for group in self.optimizer.param_groups],
            },
            "scale": {"value": self.scale.value, "good_steps": self.scale.good_steps, "grows": self.scale.grows},
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
        """Load everything. With `reset_loss` the per-sample tables start empty; a shared temperature is loaded."""
        if values["optimizer"]["kind"] != type(self.optimizer).__name__:
            raise _mismatch(
                f"the run has the optimizer {values['optimizer']['kind']}, not {type(self.optimizer).__name__}"
            )
        modules = self._modules()
        if reset_loss:
            modules = {name: tensor for name, tensor in modules.items() if _survives_reset(name, tensor, stored)}
        _check(modules, stored, (MODEL,) if reset_loss else (MODEL, LOSS))
        moments = self._stored_moments(stored, reset_loss=reset_loss)
        # A rank that the saved run did not have keeps the state that it was seeded with.
        random = {
            key: torch.empty_like(state)
            for key, state in self._random().items()
            if stored.shapes.get(key) == state.shape
        }
        averages = self._averages() if any(name.startswith(EMA) for name in stored.shapes) else {}
        _check(averages, stored, (EMA,) if averages else ())
        stored.read_into(modules | averages | moments | random, group)
        if self.loss.pair_weights is not None:
            self.loss.pair_weights.loaded()
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
        """The optimizer's parameters, by their names in the model or the loss."""
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
            if isinstance(value, Tensor)
        }

    def _stored_moments(self, stored: StoredTensors, *, reset_loss: bool) -> dict[str, Tensor]:
        moments: dict[str, Tensor] = {}
        parameters = self._parameters()
        for key in (key for key in stored.shapes if key.startswith(OPTIMIZER)):
            name = key.removeprefix(OPTIMIZER).rpartition(".")[0]
            if name not in parameters:
                if reset_loss and name.startswith(LOSS):
                    continue
                raise _mismatch(f"the run trains {name}, which is frozen or missing in this model")
            parameter = parameters[name].detach()
            if stored.shapes[key] == parameter.shape and parameter.ndim:
                moments[key] = torch.empty_like(parameter, dtype=stored.dtypes[key])
            elif stored.shapes[key].numel() > max(1, parameter.numel()):
                raise _mismatch(f"{key} is larger in the checkpoint than {name}")
            else:  # a step count, which the optimizer moves to its device
                moments[key] = torch.empty(stored.shapes[key], dtype=stored.dtypes[key])
        return moments

    def _load_optimizer(self, moments: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        indices = {name: index for index, name in enumerate(self._parameters())}
        state: dict[int, dict[str, Any]] = {
            indices[name]: dict(entries) for name, entries in values["state"].items() if name in indices
        }
        for key, value in moments.items():
            name, _, field = key.removeprefix(OPTIMIZER).rpartition(".")
            state.setdefault(indices[name], {})[field] = value
        groups = self.optimizer.state_dict()["param_groups"]
        for group, counters in zip(groups, values["groups"], strict=False):
            group.update({key: value for key, value in counters.items() if key not in self._settings()})
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _counters(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Numbers that an optimizer keeps in a group besides its settings, such as a step count."""
        entries = {key: value for key, value in group.items() if key not in self._settings()}
        numbers = {key: value.item() if isinstance(value, Tensor) else value for key, value in entries.items()}
        return {key: value for key, value in numbers.items() if isinstance(value, int | float)}

    def _settings(self) -> set[str]:
        names = {"params", "lr", "initial_lr", "peak_lr", "follows_schedule", "weight_decay", "name"}
        return names | set(self.optimizer.defaults)

    def _random(self) -> dict[str, Tensor]:
        rank = Ranks.current().rank
        states = {f"{RANDOM}cpu.{rank}": torch.get_rng_state()}
        if self.device.type == "cuda":
            states[f"{RANDOM}cuda.{rank}"] = torch.cuda.get_rng_state(self.device)
        return states


def _prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in tensors.items()}


def _survives_reset(name: str, tensor: Tensor, stored: StoredTensors) -> bool:
    """Weights, and the scalars of the loss that all samples share."""
    if name.startswith(MODEL):
        return True
    return tensor.ndim == 0 and not name.endswith(".visited") and stored.shapes.get(name) == tensor.shape


def _check(tensors: Mapping[str, Tensor], stored: StoredTensors, prefixes: tuple[str, ...]) -> None:
    """Raise unless names and shapes are the same in the run and in the checkpoint."""
    saved = {name: tuple(shape) for name, shape in stored.shapes.items() if name.startswith(prefixes)}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if name.startswith(prefixes)}
    for name in sorted(shapes.keys() | saved.keys()):
        if shapes.get(name) != saved.get(name):
            raise _mismatch(
                f"{name} is {saved.get(name, 'absent')} in the checkpoint, {shapes.get(name, 'absent')} now"
            )


def _mismatch(message: str) -> UserError:
    return UserError(message, code="resume.mismatch")

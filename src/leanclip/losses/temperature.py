"""The temperature rules: one constant, one learnable, or one learnable per sample and direction."""

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from leanclip.losses.device_scalars import DeviceScalars
from leanclip.losses.objective import Anchors
from leanclip.losses.sample_state import SIDES, SampleState
from leanclip.ops import StoredTemperature

GRADIENT_CLAMP = 5.0  # of the per-sample temperature gradient, as published
# At low tau fastclip-v3's learning rate drops to a third, as published.
DROP_FROM, DROP_TO = math.log(1 / 0.03) - 1e-6, 1 / 3  # log(1/tau), with its rounding in float32


class ConstantTemperature(nn.Module):
    """One temperature that never changes."""

    tau: Tensor

    def __init__(self, tau: float) -> None:
        super().__init__()
        self.register_buffer("tau", torch.tensor(tau))

    def mean(self) -> Tensor:
        return self.tau

    def stored(self) -> StoredTemperature:
        return StoredTemperature(self.tau, learned=False)


class GlobalTemperature(nn.Module):
    """One learnable temperature, stored as log(1/tau), the module's one parameter.

    The clamp and the drop of the learning rate at low tau are applied when the temperature is next read, so that any
    optimizer and any training loop works: the drop reduces the optimizer's last step to a third.
    """

    previous: Tensor

    def __init__(self, tau: float, tau_min: float, tau_max: float, drops: bool) -> None:
        super().__init__()
        self.log_inv_tau = nn.Parameter(torch.tensor(math.log(1 / tau)))
        self.low, self.high = math.log(1 / tau_max), math.log(1 / tau_min)
        self.drops = drops
        if drops:
            self.register_buffer("previous", self.log_inv_tau.detach().clone())
        self.register_state_dict_pre_hook(_settle_first)

    @torch.no_grad()
    def settle(self) -> None:
        """Finish the last optimizer step. Calling it again changes nothing."""
        if not self.drops:
            self.log_inv_tau.clamp_(self.low, self.high)
            return
        step = self.log_inv_tau - self.previous
        dropped = self.previous >= DROP_FROM
        settled = self.previous + torch.where(dropped, step * DROP_TO, step)
        self.previous.copy_(settled.clamp_(self.low, self.high))
        self.log_inv_tau.copy_(self.previous)

    def mean(self) -> Tensor:
        self.settle()
        return (-self.log_inv_tau.detach()).exp()

    def stored(self) -> StoredTemperature:
        """What a kernel needs to settle it."""
        previous = self.previous if self.drops else None
        bounds = self.low, self.high
        return StoredTemperature(self.log_inv_tau.detach(), True, bounds, previous, DROP_FROM, DROP_TO)


def _settle_first(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Before the state is read. A plain function, so that the loss can be pickled."""
    assert isinstance(module, GlobalTemperature)
    module.settle()


class IndividualTemperature(nn.Module):
    """One learnable temperature per sample and direction, each with its own Adam moments, in the sample state."""

    def __init__(
        self,
        *,
        rho: float,
        lr_tau: float,
        tau_min: float,
        tau_max: float,
        adam: Literal["published", "visits"],
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        super().__init__()
        self.rho, self.lr_tau = rho, lr_tau
        self.tau_min, self.tau_max = tau_min, tau_max
        self.adam, self.betas, self.eps = adam, betas, eps
        self.in_epoch = DeviceScalars(*self._in_epoch(0))  # `published`: this epoch's betas and bias corrections

    def tables(self, tau: float) -> dict[str, float]:
        """The initial values of the tables of both sides."""
        initial = {"tau": tau, "tau_m": 0.0, "tau_v": 0.0}
        if self.adam == "visits":
            initial["visits"] = 0.0
        return {f"{name}_{side}": value for side in SIDES for name, value in initial.items()}

    def set_epoch(self, epoch: int) -> None:
        self.in_epoch.set(*self._in_epoch(epoch))

    def _in_epoch(self, epoch: int) -> list[float]:
        first, second = self.betas if epoch else (0.0, 0.0)
        return [first, second, 1 - first ** (epoch + 1), 1 - second ** (epoch + 1)]

    def update(self, state: SampleState, ids: tuple[Tensor, Tensor], anchors: Anchors) -> Mapping[str, Tensor]:
        """The batch's new values, (2, B) each; only those of this rank's samples are valid."""
        names = ("tau_m", "tau_v", "visits") if self.adam == "visits" else ("tau_m", "tau_v")
        old = {name: value.to(anchors.tau.dtype) for name, value in state.read_local(names, ids).items()}
        gradient = anchors.log_norm - anchors.slope() + self.rho
        gradient = gradient.clamp(-GRADIENT_CLAMP, GRADIENT_CLAMP)
        values: dict[str, Tensor] = {}
        if self.adam == "visits":
            values["visits"] = exponent = old["visits"] + 1
            first, second = self.betas
            first_correction, second_correction = 1 - first**exponent, 1 - second**exponent
        else:
            first, second, first_correction, second_correction = self.in_epoch.value.to(gradient.dtype).unbind()
        m = torch.lerp(gradient, old["tau_m"], first)
        v = torch.lerp(gradient * gradient, old["tau_v"], second)
        step = (m / first_correction) / ((v / second_correction).sqrt() + self.eps)
        tau = (anchors.tau - self.lr_tau * step).clamp(self.tau_min, self.tau_max)
        values |= {"tau": tau, "tau_m": m, "tau_v": v}
        if anchors.weight is None:
            return values
        old["tau"] = anchors.tau
        return {name: torch.where(anchors.weight > 0, value, old[name]) for name, value in values.items()}

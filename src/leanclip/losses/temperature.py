"""The temperature rules. Each gives the batch its temperatures and says what the step teaches them.

A rule sees one `Anchors` per direction: the statistics of the batch after the estimator update.
"""

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from leanclip.losses.sample_state import SampleState

GRADIENT_CLAMP = 5.0  # of the per-sample temperature gradient, as published
DROP_BELOW, DROP_TO = 0.03, 1 / 3  # at low tau fastclip-v3's learning rate drops to a third, as published


class Anchors(NamedTuple):
    """One direction's anchors: what the batch and the estimator say of each."""

    tau: Tensor  # () or (B,)
    log_g: Tensor  # (B,) log mean over the negatives of exp(l), l_ij = (s_ij - s_ii) / tau_i
    mean_l: Tensor  # (B,) mean of l under the softmax over the negatives
    log_norm: Tensor  # (B,) log of what g is divided by: log(eps + u), or the batch's own
    log_u: Tensor  # (B,) the running estimate after the update

    def slope(self) -> Tensor:
        """d/dtau of g / norm, norm held constant."""
        return -(self.log_g - self.log_norm).exp() * self.mean_l / self.tau


class ConstantTemperature(nn.Module):
    """One temperature that stays."""

    tau: Tensor

    def __init__(self, tau: float) -> None:
        super().__init__()
        self.register_buffer("tau", torch.tensor(tau))

    def mean(self) -> Tensor:
        return self.tau


class GlobalTemperature(nn.Module):
    """One learnable temperature, stored as log(1/tau), the module's one parameter.

    The clamp and the drop of the learning rate at low tau are applied when the temperature is next looked at, so that
    any optimizer and any training loop will do: the drop scales the optimizer's own step back to a third.
    """

    previous: Tensor

    def __init__(self, tau: float, tau_min: float, tau_max: float, drops: bool) -> None:
        super().__init__()
        self.log_inv_tau = nn.Parameter(torch.tensor(math.log(1 / tau)))
        self.register_buffer("previous", self.log_inv_tau.detach().clone())
        self.low, self.high = math.log(1 / tau_max), math.log(1 / tau_min)
        self.drops = drops
        self.register_state_dict_pre_hook(lambda module, *_: module.settle())

    @torch.no_grad()
    def settle(self) -> None:
        """Finish the last optimizer step. Calling it again changes nothing."""
        if self.drops:
            step = self.log_inv_tau - self.previous
            dropped = self.previous >= math.log(1 / DROP_BELOW) - 1e-6  # float32 rounding of the threshold
            self.log_inv_tau.copy_(self.previous + torch.where(dropped, step * DROP_TO, step))
        self.log_inv_tau.clamp_(self.low, self.high)
        self.previous.copy_(self.log_inv_tau)

    def mean(self) -> Tensor:
        self.settle()
        return (-self.log_inv_tau.detach()).exp()


def plain_gradient(factor: float, image: Anchors, text: Anchors) -> Tensor:
    """d/dlog(1/tau) of factor * mean[g1/norm1 + g2/norm2], norms constant: InfoNCE (1/2) and fastclip-v0 (1)."""
    return -image.tau * factor * (image.slope() + text.slope()).mean()


def robust_gradient(rho: float, form: Literal["published", "exact"], image: Anchors, text: Anchors) -> Tensor:
    """fastclip-v3: d/dlog(1/tau) of half the RGCL-g objective. `published` counts the first term twice."""
    tau = image.tau
    slope = tau * (image.slope() + text.slope()).mean()
    if form == "exact":
        gradient = 0.5 * slope + rho + 0.5 * (image.log_norm + text.log_norm).mean()
    else:
        gradient = slope + rho + 0.5 * (image.log_u + text.log_u).mean()
    return -tau * gradient


class IndividualTemperature(nn.Module):
    """One learnable temperature per sample and direction, each with an Adam of its own, in the sample state."""

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

    def tables(self, side: str, tau: float) -> dict[str, float]:
        names = {f"tau_{side}": tau, f"tau_m_{side}": 0.0, f"tau_v_{side}": 0.0}
        return names | ({f"visits_{side}": 0.0} if self.adam == "visits" else {})

    def update(
        self, state: SampleState, side: str, ids: Tensor, anchors: Anchors, epoch: int
    ) -> Mapping[str, Tensor]:
        """The new values of this side's tables for the batch."""
        ratio = (anchors.log_g - anchors.log_norm).exp()
        gradient = (-ratio * anchors.mean_l + anchors.log_norm + self.rho).clamp(-GRADIENT_CLAMP, GRADIENT_CLAMP)
        first, second = self.betas
        values: dict[str, Tensor] = {}
        if self.adam == "visits":
            exponent = state.read(f"visits_{side}", ids) + 1
            values[f"visits_{side}"] = exponent
        else:
            first, second = (0.0, 0.0) if epoch == 0 else (first, second)
            exponent = torch.full_like(gradient, epoch + 1)
        m = torch.lerp(gradient, state.read(f"tau_m_{side}", ids).to(gradient.dtype), first)
        v = torch.lerp(gradient * gradient, state.read(f"tau_v_{side}", ids).to(gradient.dtype), second)
        step = (m / (1 - first**exponent)) / ((v / (1 - second**exponent)).sqrt() + self.eps)
        tau = (anchors.tau - self.lr_tau * step).clamp(self.tau_min, self.tau_max)
        return values | {f"tau_{side}": tau, f"tau_m_{side}": m, f"tau_v_{side}": v}

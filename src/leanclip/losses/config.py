"""The hyper-parameters of the losses: one typed set, of which each loss takes a part."""

import difflib
from dataclasses import asdict, dataclass, replace
from typing import Literal

from leanclip.errors import ArgumentError
from leanclip.settings import setting

RANGES = (
    (("tau", "tau_min", "tau_max", "eps", "tau_adam_eps"), lambda value: value > 0, "must be positive"),
    (("lr_tau", "rho"), lambda value: value >= 0, "must not be negative"),
    (("gamma_min",), lambda value: 0 < value <= 1, "must lie in (0, 1]"),
    (("gamma_decay_epochs",), lambda value: value >= 1, "must be at least 1"),
    (("tau_betas",), lambda value: all(0 <= beta < 1 for beta in value), "must lie in [0, 1)"),
)


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """A value that is not given is the default of the loss."""

    tau: float | None = setting(None, resume="free")
    """Initial temperature (0.07, or that of the checkpoint that is fine-tuned)."""
    tau_min: float | None = None
    """Lower clamp of the temperature (0.01)."""
    tau_max: float | None = None
    """Upper clamp of the temperature (1)."""
    learn_tau: bool | None = setting(None, resume="fixed_unless_reset")
    """infonce, dcl: False keeps the temperature constant."""
    lr_tau: float | None = None
    """Learning rate of the temperature."""
    rho: float | None = None
    """How sharp the softmax over the negatives may become: a larger rho gives a smaller tau (isogclr, v2, v3)."""
    eps: float | None = None
    """Added to the running estimate before it divides (1e-14)."""
    eps_form: Literal["plain", "published"] | None = None
    """isogclr, fastclip-v2: add eps to u (plain), or eps times the largest term of the sample so far, as the
    published code does: that reduces the weight of samples that once were very wrong, and costs a third more time."""
    gamma_min: float | None = None
    """Inner learning rate after its schedule: the weight of a sample's newest batch in its running estimate."""
    gamma_schedule: Literal["constant", "cosine", "auto"] | None = None
    """How gamma falls from 1."""
    gamma_decay_epochs: int | None = None
    """Epochs over which the cosine schedule falls (half of the run)."""
    gamma_per_step: bool | None = None
    """Move gamma at every step instead of every epoch."""
    tau_gradient: Literal["published", "exact"] | None = None
    """fastclip-v3: the temperature gradient of the published code, or the exact one of the objective."""
    tau_weight: Literal["published", "exact"] | None = None
    """isogclr, fastclip-v2: exact weighs each anchor's embedding gradient by its tau, as the objective does; the
    published code leaves the factor out."""
    tau_adam: Literal["published", "visits"] | None = None
    """isogclr, fastclip-v2: bias correction of the per-sample Adam by epoch (published) or by visits."""
    tau_betas: tuple[float, float] | None = None
    """isogclr, fastclip-v2: betas of the per-sample Adam (the model optimizer's)."""
    tau_adam_eps: float | None = None
    """isogclr, fastclip-v2: epsilon of the per-sample Adam (the model optimizer's)."""
    bias: float | None = setting(None, resume="free")
    """siglip: initial bias (-10)."""

    def __post_init__(self) -> None:
        for names, valid, rule in RANGES:
            for name in names:
                value = getattr(self, name)
                if value is not None and not valid(value):
                    raise ArgumentError(f"{name} is {value}; it {rule}", code="loss.bad_value")
        if self.tau_min is not None and self.tau_max is not None and self.tau_min > self.tau_max:
            raise ArgumentError(
                f"tau_min {self.tau_min} is larger than tau_max {self.tau_max}", code="loss.bad_value"
            )

    def over(self, defaults: "LossConfig") -> "LossConfig":
        """This configuration, completed from `defaults`."""
        return replace(defaults, **{name: value for name, value in asdict(self).items() if value is not None})


def check_names(loss: str, names: set[str], valid: tuple[str, ...]) -> None:
    """An unknown name is an error that lists the valid ones."""
    for name in sorted(names - set(valid)):
        near = difflib.get_close_matches(name, valid, n=1)
        hint = f"; did you mean {near[0]}?" if near else "."
        raise ArgumentError(
            f"{loss} has no hyper-parameter {name!r}{hint} It takes: {', '.join(valid)}",
            code="loss.unknown_hyper_parameter",
        )

"""The losses by name: the hyper-parameters of each, its defaults, and its assembly."""

import difflib
import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

from torch import Tensor

from leanclip.errors import ArgumentError
from leanclip.losses import objective
from leanclip.losses.base import ContrastiveLoss
from leanclip.losses.config import LossConfig, check_names
from leanclip.losses.global_contrastive import GlobalContrastiveLoss
from leanclip.losses.normalizer import Normalizer, batch_mean, batch_sum, inner_rate, running_estimate
from leanclip.losses.pair_weights import TABLES, Mode, PairWeights
from leanclip.losses.sample_state import SIDES, SampleState
from leanclip.losses.sigmoid import SigmoidLoss
from leanclip.losses.temperature import ConstantTemperature, GlobalTemperature, IndividualTemperature
from leanclip.ops import AnchorForm

Rule = ConstantTemperature | GlobalTemperature | IndividualTemperature
Slope = Callable[[objective.Anchors], Tensor]  # of the objective for log(1/tau)

LEARNED = ("tau", "tau_min", "tau_max", "lr_tau")
RUNNING = ("eps", "gamma_min", "gamma_schedule", "gamma_decay_epochs", "gamma_per_step")
INDIVIDUAL = (*LEARNED, "rho", "tau_adam", "tau_betas", "tau_adam_eps", "eps_form", "tau_weight")


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One loss of the family: its temperature rule, whether it keeps running estimates, its hyper-parameters."""

    temperature: Literal["constant", "global", "robust", "individual"]
    running: bool
    decoupled: bool = False  # without the positive in the denominator
    takes: tuple[str, ...]
    defaults: LossConfig

    def __post_init__(self) -> None:
        """Drop the shared defaults that this loss does not take."""
        defaults = {name: value for name, value in asdict(self.defaults).items() if name in self.takes}
        object.__setattr__(self, "defaults", LossConfig(**defaults))


COMMON = LossConfig(tau=0.07, tau_min=0.01, tau_max=1.0)
ESTIMATE = replace(COMMON, eps=1e-14, gamma_min=0.2, gamma_schedule="cosine", gamma_per_step=False)
# The constant inner rate of sogclr and isogclr is not published: 0.6 is our choice.
CONSTANT_GAMMA = replace(ESTIMATE, gamma_schedule="constant", gamma_min=0.6)
PER_SAMPLE = LossConfig(
    tau=0.03,
    lr_tau=0.0133,
    rho=7.0,
    tau_adam="published",
    tau_betas=(0.9, 0.999),
    tau_adam_eps=1e-8,
    eps_form="plain",
    tau_weight="published",
)

SPECS = {
    "infonce": Spec(temperature="global", running=False, takes=(*LEARNED, "learn_tau"), defaults=COMMON),
    "dcl": Spec(temperature="global", running=False, decoupled=True, takes=(*LEARNED, "learn_tau"), defaults=COMMON),
    "siglip": Spec(
        temperature="global", running=False, takes=(*LEARNED, "bias"), defaults=replace(COMMON, tau=0.1, bias=-10.0)
    ),
    "sogclr": Spec(temperature="constant", running=True, takes=("tau", *RUNNING), defaults=CONSTANT_GAMMA),
    "isogclr": Spec(
        temperature="individual",
        running=True,
        takes=(*INDIVIDUAL, *RUNNING),
        defaults=PER_SAMPLE.over(CONSTANT_GAMMA),
    ),
    "fastclip-v0": Spec(temperature="global", running=True, takes=(*LEARNED, *RUNNING), defaults=ESTIMATE),
    "fastclip-v1": Spec(temperature="constant", running=True, takes=("tau", *RUNNING), defaults=ESTIMATE),
    "fastclip-v2": Spec(
        temperature="individual", running=True, takes=(*INDIVIDUAL, *RUNNING), defaults=PER_SAMPLE.over(ESTIMATE)
    ),
    "fastclip-v3": Spec(
        temperature="robust",
        running=True,
        takes=(*LEARNED, "rho", "tau_gradient", *RUNNING),
        defaults=replace(ESTIMATE, rho=6.5, lr_tau=2e-4, tau_gradient="published"),
    ),
}
LOSSES = tuple(SPECS)
OTHER_NAMES = {
    "clip": "infonce", "openclip": "infonce", "discoclip": "infonce", "softmax": "infonce", "contrastive": "infonce",
    "decoupled": "dcl", "sigmoid": "siglip", "fastclip": "fastclip-v3",
} | {name.replace("-", ""): name for name in SPECS}  # fmt: skip


def create_loss(
    name: str,
    *,
    num_samples: int | None = None,
    implementation: str = "auto",
    pair_weights: Mode = "off",
    captions_per_sample: int = 1,
    **hyper: Any,
) -> ContrastiveLoss:
    """A loss by name, for anyone's training loop.

    `num_samples` is the size of the training set, required by the losses that keep a state per sample and by
    `pair_weights`: "learned" lowers the weights of pairs that look wrong, "auto" does so only if more than 1% look
    wrong; with `captions_per_sample` so many captions of a sample are each judged by themselves. The hyper-parameters
    are those of `LossConfig` that the loss takes.
    """
    check_names(name, set(hyper), spec_of(name).takes)
    return loss_from_config(
        name,
        LossConfig(**hyper),
        num_samples=num_samples,
        implementation=implementation,
        pair_weights=pair_weights,
        captions_per_sample=captions_per_sample,
    )


def spec_of(name: str) -> Spec:
    if name not in SPECS:
        known = OTHER_NAMES.get(re.sub("[-_ ]|loss$", "", name.lower()))
        near = [known] if known else difflib.get_close_matches(name, LOSSES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ";"
        raise ArgumentError(f"unknown loss {name!r}{hint} The losses are {', '.join(LOSSES)}", code="loss.unknown")
    return SPECS[name]


def loss_from_config(
    name: str,
    config: LossConfig,
    *,
    num_samples: int | None = None,
    implementation: str = "auto",
    pair_weights: Mode = "off",
    captions_per_sample: int = 1,
) -> ContrastiveLoss:
    spec = spec_of(name)
    check_names(name, {key for key, value in asdict(config).items() if value is not None}, spec.takes)
    hyper = config.over(spec.defaults)
    assert hyper.tau is not None
    if not (hyper.tau_min or 0.0) <= hyper.tau <= (hyper.tau_max or math.inf):
        raise ArgumentError(
            f"tau is {hyper.tau}; it must lie between tau_min {hyper.tau_min} and tau_max {hyper.tau_max}",
            code="loss.bad_value",
        )
    if pair_weights not in get_args(Mode):
        raise ArgumentError(
            f"pair_weights is {pair_weights!r}; give one of {', '.join(get_args(Mode))}", code="loss.bad_value"
        )
    if captions_per_sample < 1:
        raise ArgumentError(
            f"captions_per_sample is {captions_per_sample}; it must be at least 1", code="loss.bad_value"
        )
    learns = pair_weights != "off"
    keeps_state = spec.running or learns
    if keeps_state and num_samples is None:
        raise ArgumentError(
            f"{name} keeps a state per sample: give num_samples, the size of the training set",
            code="loss.bad_num_samples",
        )
    if hyper.learn_tau is False and hyper.lr_tau is not None:
        raise ArgumentError("learn_tau is False: leave lr_tau out", code="loss.bad_value")
    rule = _temperature(spec, hyper, hyper.tau)
    state = None
    if keeps_state and num_samples is not None:
        widths = dict.fromkeys(TABLES, captions_per_sample) if captions_per_sample > 1 else {}
        state = SampleState(num_samples, _tables(spec, hyper, rule, learns), widths)
    weights = PairWeights(state, pair_weights, captions_per_sample) if learns and state is not None else None
    if name == "siglip":
        assert isinstance(rule, GlobalTemperature) and hyper.bias is not None
        return SigmoidLoss(
            implementation=implementation,
            temperature=rule,
            bias=hyper.bias,
            lr_tau=hyper.lr_tau,
            state=state,
            pair_weights=weights,
        )
    return GlobalContrastiveLoss(
        name=name,
        implementation=implementation,
        temperature=rule,
        normalizer=_normalizer(spec, hyper),
        value=_value(spec, hyper),
        temperature_gradient=_slope(spec, hyper) if isinstance(rule, GlobalTemperature) else None,
        inner_rate=partial(inner_rate, hyper) if spec.running else None,
        weight_by_tau=spec.temperature == "robust" or hyper.tau_weight == "exact",
        form=None if spec.temperature == "individual" else _form(spec, hyper),
        state=state,
        pair_weights=weights,
        lr_tau=hyper.lr_tau,
        follows_schedule=spec.temperature != "robust",
    )


def _tables(spec: Spec, hyper: LossConfig, rule: Rule, learns: bool) -> dict[str, float]:
    """What is kept for each sample, with its value before the first visit."""
    tables = {f"log_u_{side}": -math.inf for side in SIDES} if spec.running else {}
    if learns:
        tables |= TABLES
    if isinstance(rule, IndividualTemperature):
        assert hyper.tau is not None
        tables |= rule.tables(hyper.tau)
    if hyper.eps_form == "published":
        tables |= {f"shift_{side}": 0.0 for side in SIDES}
    return tables


def _temperature(spec: Spec, hyper: LossConfig, tau: float) -> Rule:
    if spec.temperature == "constant" or hyper.learn_tau is False:
        return ConstantTemperature(tau)
    assert hyper.tau_min is not None and hyper.tau_max is not None
    if spec.temperature != "individual":
        return GlobalTemperature(tau, hyper.tau_min, hyper.tau_max, drops=spec.temperature == "robust")
    assert hyper.rho is not None and hyper.lr_tau is not None and hyper.tau_adam is not None
    assert hyper.tau_betas is not None and hyper.tau_adam_eps is not None
    return IndividualTemperature(
        rho=hyper.rho,
        lr_tau=hyper.lr_tau,
        tau_min=hyper.tau_min,
        tau_max=hyper.tau_max,
        adam=hyper.tau_adam,
        betas=hyper.tau_betas,
        eps=hyper.tau_adam_eps,
    )


def _normalizer(spec: Spec, hyper: LossConfig) -> Normalizer:
    if spec.running:
        return partial(running_estimate, hyper.eps or 0.0)
    return batch_mean if spec.decoupled else batch_sum


def _slope(spec: Spec, hyper: LossConfig) -> Slope:
    if spec.temperature == "robust":
        assert hyper.rho is not None and hyper.tau_gradient is not None
        return partial(objective.robust_gradient, hyper.rho, hyper.tau_gradient)
    return partial(objective.plain_gradient, 1.0 if spec.running else 0.5)


def _form(spec: Spec, hyper: LossConfig) -> AnchorForm:
    """`_normalizer`, `_slope` and `_value` as the kernel of the scalar stage takes them."""
    robust = spec.temperature == "robust"
    learned = spec.temperature != "constant" and hyper.learn_tau is not False
    return AnchorForm(
        decoupled=spec.decoupled,
        times_tau=spec.running,
        weight_by_tau=robust,
        slope=None if not learned else hyper.tau_gradient if robust else "plain",
        slope_factor=2.0 if spec.running else 1.0,
        log_eps=math.log(hyper.eps) if hyper.eps else -math.inf,
        rho=hyper.rho or 0.0,
    )


def _value(spec: Spec, hyper: LossConfig) -> Callable[[objective.Anchors], Tensor]:
    if not spec.running:
        return objective.cross_entropy
    return objective.gcl if hyper.rho is None else partial(objective.rgcl, hyper.rho)

"""Warnings about a run's metrics, each with its likely remedy."""

import math
from collections.abc import Iterator, Mapping

from leanclip.losses.registry import spec_of
from leanclip.runs.config import TrainConfig

STEPS_BEFORE_WARNING = 20  # logged steps in a row


class HealthCheck:
    """Called at each logged step. Gives every warning once."""

    def __init__(self, config: TrainConfig, *, batch: int) -> None:
        self.config, self.log_batch = config, math.log(max(batch, 2))
        self._streaks: dict[str, int] = {}

    def __call__(self, step: int, metrics: Mapping[str, float | str]) -> Iterator[str]:
        for name, (unhealthy, advice) in self._symptoms(step, metrics).items():
            streak = self._streaks.get(name, 0)
            if streak < 0:
                continue
            self._streaks[name] = streak + 1 if unhealthy else 0
            if self._streaks[name] >= STEPS_BEFORE_WARNING:
                self._streaks[name] = -1
                yield advice

    def _symptoms(self, step: int, metrics: Mapping[str, float | str]) -> dict[str, tuple[bool, str]]:
        def value(name: str, default: float) -> float:
            metric = metrics.get(name, default)
            return default if isinstance(metric, str) else metric

        loss, hyper, run = value("loss", 0.0), self.config.loss, self.config.run.loss
        warm = step > 2 * (self.config.optim.warmup or 0)
        tau = value("tau", 0.07)
        learned = run not in ("sogclr", "fastclip-v1") and hyper.learn_tau is not False
        stuck = (
            abs(loss / self.log_batch - 1) < 0.01
            if run in ("infonce", "dcl")
            else abs(value("log_u_mean", 9.0)) < 0.02
        )
        low, high = hyper.tau_min or 0.01, hyper.tau_max or 1.0
        too_low = "rho" in spec_of(run).takes and tau < 0.1
        remedy = "lower --rho or --lr-tau" if too_low else "change --lr-tau or the clamp"
        gap, gamma = value("estimate_gap", 0.0), value("gamma", 1.0)
        return {
            "stuck": (
                warm and stuck,
                f"the model does not distinguish pairs yet (loss {loss:.3f}, ln batch {self.log_batch:.3f}): check"
                " with --dry-run that captions belong to their images, lower --lr, or raise --warmup",
            ),
            "clamped": (
                warm and learned and (tau <= low * 1.001 or tau >= high * 0.999),
                f"tau {tau:.4f} is at its clamp [{low}, {high}]: {remedy}",
            ),
            "stale": (
                warm and gap > 2.0 and gamma < 1.0,
                f"the running estimates lag {gap:.1f} nats behind the model: raise --gamma-min (now {gamma:.2f}) or"
                " lower --lr",
            ),
        }  # fmt: skip

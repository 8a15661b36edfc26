"""The exponential losses: InfoNCE, SogCLR, iSogCLR and FastCLIP v0 to v3, on the engine's two operations.

They share one step (docs/algorithm.md teaches it), with l_ij = (s_ij - s_ii) / tau_i over the B - 1 negatives j:

    1. statistics   log g_i, g_i = mean_j exp(l_ij), and the mean of l under that softmax, in both directions
    2. normaliser   norm_i: eps + running estimate of g_i (InfoNCE: the batch's own sum)
    3. temperature  what the step teaches tau
    4. gradients    of 1/2 mean_i c [g1_i / norm1_i + g2_i / norm2_i] with the norms constant, in the backward pass

and differ in the normaliser (`normalizer.py`), the temperature rule (`temperature.py`) and c.
"""

import math
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from leanclip import ops
from leanclip.losses.attach import AttachGradients
from leanclip.losses.base import ContrastiveLoss, work_dtype
from leanclip.losses.gamma import InnerRate
from leanclip.losses.normalizer import Normalizer
from leanclip.losses.output import LossOutput, Metric, Metrics
from leanclip.losses.sample_state import SampleState
from leanclip.losses.temperature import Anchors, ConstantTemperature, GlobalTemperature, IndividualTemperature

SIDES = ("image", "text")


class GlobalContrastiveLoss(ContrastiveLoss):
    """One objective for the whole family; `create_loss` puts the pieces of each member together."""

    def __init__(
        self,
        *,
        name: str,
        implementation: str,
        temperature: ConstantTemperature | GlobalTemperature | IndividualTemperature,
        normalizer: Normalizer,
        value: Callable[[Anchors, Anchors], Tensor],
        temperature_gradient: Callable[[Anchors, Anchors], Tensor] | None = None,
        inner_rate: InnerRate | None = None,
        weight_by_tau: bool = False,
        state: SampleState | None = None,
        lr_tau: float | None = None,
        follows_schedule: bool = True,
    ) -> None:
        super().__init__(name=name, implementation=implementation, lr_tau=lr_tau, follows_schedule=follows_schedule)
        self.temperature_rule, self.state = temperature, state
        self.normalizer, self.value, self.temperature_gradient = normalizer, value, temperature_gradient
        self.inner_rate, self.weight_by_tau = inner_rate, weight_by_tau
        self.gamma, self.epoch, self.epoch_was_set = 1.0, 0, False

    def set_epoch(self, epoch: float, epochs: int) -> None:
        """Tell the loss where the run is: moves gamma. With `gamma_per_step` give the epoch with its fraction."""
        self.epoch, self.epoch_was_set = math.floor(epoch), True
        if self.inner_rate is not None:
            self.gamma = self.inner_rate(epoch, epochs)

    def temperature(self) -> Tensor:
        """The current tau: a scalar, or the mean of the per-sample ones."""
        if isinstance(self.temperature_rule, IndividualTemperature):
            assert self.state is not None
            return 0.5 * (self.state.get_buffer("tau_image").mean() + self.state.get_buffer("tau_text").mean())
        return self.temperature_rule.mean()

    def compute(
        self,
        image: Tensor,
        text: Tensor,
        sample_ids: Tensor | None,
        text_ids: Tensor | None,
        groups: Tensor | None,
    ) -> LossOutput:
        ids = self._ids(sample_ids, text_ids, image)
        pairs = ops.Pairs(mask_positives=True, row_groups=groups, col_groups=groups)
        chosen, engine = ops.implementation(self.implementation, image)

        with torch.no_grad():
            dtype = work_dtype(image)
            taus = self._taus(ids, dtype)
            positive = (image.to(dtype) * text.to(dtype)).sum(1)
            statistics = engine.statistics(image, text, 1 / taus["image"], 1 / taus["text"], pairs=pairs)
            shifts = self._shifts(image, text, positive, taus, ids)
            anchors = [
                self._anchors(taus[side], found, positive, self._estimate(side, ids), shifts.get(side))
                for side, found in zip(SIDES, statistics, strict=True)
            ]
            slopes = self._learn(anchors, shifts, ids)
            (by_image, image_diagonal), (by_text, text_diagonal) = (self._weights(a, positive) for a in anchors)
            value = self.value(*anchors)

        def pull(i: Tensor, t: Tensor, *saved: Tensor, needs: tuple[bool, bool]) -> ops.Gradients:
            by_image, by_text, diagonal = ops.Terms(*saved[:2]), ops.Terms(*saved[2:4]), saved[4]
            return engine.gradients(i, t, by_image, by_text, diagonal, pairs=pairs, needs=needs)

        loss = AttachGradients.apply(
            image,
            text,
            self._parameter(image),
            value,
            slopes,
            pull,
            *by_image,
            *by_text,
            image_diagonal + text_diagonal,
        )
        return LossOutput(loss=loss, metrics=self._metrics(anchors, chosen))

    def rollback(self) -> None:
        if self.state is not None:
            self.state.rollback()

    def resize(self, num_samples: int) -> None:
        """Grow the per-sample tables for samples added to the data."""
        if self.state is not None:
            self.state.resize(num_samples)

    def _ids(self, sample_ids: Tensor | None, text_ids: Tensor | None, like: Tensor) -> dict[str, Tensor]:
        if self.state is None:
            return {}
        if sample_ids is None:
            raise ValueError(f"{self.name} keeps a state per sample: call loss(image, text, sample_ids)")
        if self.training and not self.epoch_was_set:
            self.epoch_was_set = True
            warnings.warn(
                f"{self.name}: set_epoch(epoch, epochs) was never called, so gamma stays 1 and the running estimates"
                " forget everything; call it at the start of every epoch",
                stacklevel=6,
            )
        ids = {}
        for side, given in (("image", sample_ids), ("text", text_ids)):
            if given is None:
                ids[side] = ids["image"]
                continue
            if len(given) != len(like):
                raise ValueError(f"{len(given)} ids for {len(like)} embeddings")
            self.state.check(given)
            ids[side] = given.to(like.device, non_blocking=True)
        return ids

    def _taus(self, ids: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        if isinstance(self.temperature_rule, IndividualTemperature):
            assert self.state is not None
            return {side: self.state.read(f"tau_{side}", ids[side]).to(dtype) for side in SIDES}
        return dict.fromkeys(SIDES, self.temperature_rule.mean().to(dtype))

    def _estimate(self, side: str, ids: dict[str, Tensor]) -> Tensor | None:
        return None if self.state is None else self.state.read(f"log_u_{side}", ids[side])

    def _shifts(
        self, image: Tensor, text: Tensor, positive: Tensor, taus: dict[str, Tensor], ids: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """The largest exponent that each sample ever met, where `eps_form` asks for it."""
        if self.state is None or "shift_image" not in self.state.initial:
            return {}
        largest = {"image": ops.row_maxima(image, text), "text": ops.row_maxima(text, image)}
        return {
            side: torch.maximum(
                self.state.read(f"shift_{side}", ids[side]).to(positive.dtype),
                (largest[side] - positive) / taus[side],
            )
            for side in SIDES
        }

    def _anchors(
        self,
        tau: Tensor,
        statistics: ops.Statistics | None,
        positive: Tensor,
        log_u: Tensor | None,
        shift: Tensor | None,
    ) -> Anchors:
        assert statistics is not None
        negatives = max(len(positive) - 1, 1)
        log_g = statistics.log_sum - positive / tau - math.log(negatives)
        log_norm, log_u = self.normalizer(log_g, log_u, negatives=negatives, gamma=self.gamma, shift=shift)
        return Anchors(tau, log_g, (statistics.mean - positive) / tau, log_norm, log_u)

    def _learn(self, anchors: list[Anchors], shifts: dict[str, Tensor], ids: dict[str, Tensor]) -> Tensor:
        """Store what the step taught in the per-sample state; return the gradient of the global temperature."""
        if self.state is not None and self.training:
            values: dict[str, Tensor] = {}
            where: dict[str, Tensor] = {}
            for side, anchor in zip(SIDES, anchors, strict=True):
                found = {f"log_u_{side}": anchor.log_u}
                if side in shifts:
                    found[f"shift_{side}"] = shifts[side]
                if isinstance(self.temperature_rule, IndividualTemperature):
                    found |= self.temperature_rule.update(self.state, side, ids[side], anchor, self.epoch)
                values |= found
                where |= dict.fromkeys(found, ids[side])
            self.state.write(where, values)
        if self.temperature_gradient is None:
            return anchors[0].log_g.new_zeros(0)
        return self.temperature_gradient(*anchors).reshape(1)

    def _weights(self, anchor: Anchors, positive: Tensor) -> tuple[ops.Terms, Tensor]:
        """How these anchors weigh their negatives, and (the negative of its sum) their positive."""
        batch, negatives = len(positive), max(len(positive) - 1, 1)
        log_c = anchor.tau.log() if self.weight_by_tau else 0.0
        log_scale = log_c - anchor.tau.log() - math.log(2 * batch)
        log_weight = log_scale - math.log(negatives) - positive / anchor.tau - anchor.log_norm
        return ops.Terms(1 / anchor.tau, log_weight), -(log_scale + anchor.log_g - anchor.log_norm).exp()

    def _parameter(self, like: Tensor) -> Tensor:
        if isinstance(self.temperature_rule, GlobalTemperature):
            return self.temperature_rule.log_inv_tau.reshape(1)
        return like.new_zeros(0)

    def _metrics(self, anchors: list[Anchors], implementation: str) -> Metrics:
        def both(name: str) -> Tensor:
            return torch.cat([getattr(anchor, name) for anchor in anchors])

        log_negatives = math.log(max(len(anchors[0].log_g) - 1, 1))
        metrics: dict[str, Metric] = {
            "tau": lambda: 0.5 * (anchors[0].tau.mean() + anchors[1].tau.mean()),
            "effective_negatives": lambda: (both("log_g") + log_negatives - both("mean_l")).mean().exp(),
            "implementation": implementation,
        }
        state, gamma = self.state, self.gamma
        if state is not None:
            metrics |= {
                "gamma": gamma,
                "log_u_mean": lambda: both("log_u").mean(),
                "log_u_spread": lambda: both("log_u").std(correction=0),
                "estimate_gap": lambda: (both("log_g") - both("log_u")).abs().mean(),
                "never_visited": lambda: 1 - state.visited / state.num_samples,
            }
        return Metrics(metrics)

"""The exponential losses: InfoNCE, DCL, SogCLR, iSogCLR and FastCLIP v0 to v3, on the engine's two operations.

They share one step (docs/algorithm.md derives it), with l_ij = (s_ij - s_ii) / tau_i over the negatives j:

    1. statistics   log g_i, g_i = mean_j exp(l_ij), and the mean of l under that softmax, in both directions
    2. normaliser   norm_i: eps + running estimate of g_i (InfoNCE, DCL: the batch's own)
    3. temperature  the gradient of tau, or its update
    4. gradients    of 1/2 mean_i c [g1_i / norm1_i + g2_i / norm2_i] with the norms constant, in the backward pass

and differ in the normaliser (`normalizer.py`), the temperature rule (`temperature.py`) and c.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from leanclip import ops
from leanclip.losses.base import ContrastiveLoss, Local, LossOutput, Metric, Metrics, attach_gradients
from leanclip.losses.device_scalars import DeviceScalars
from leanclip.losses.normalizer import Normalizer
from leanclip.losses.objective import Anchors
from leanclip.losses.pair_weights import TABLES, PairWeights, Visits, never_scored
from leanclip.losses.sample_state import SIDES, SampleState
from leanclip.losses.similarities import Similarities
from leanclip.losses.temperature import ConstantTemperature, GlobalTemperature, IndividualTemperature


class GlobalContrastiveLoss(ContrastiveLoss):
    """The common step of the whole family; `create_loss` assembles the parts of each member."""

    def __init__(
        self,
        *,
        name: str,
        implementation: str,
        temperature: ConstantTemperature | GlobalTemperature | IndividualTemperature,
        normalizer: Normalizer,
        value: Callable[[Anchors], Tensor],
        temperature_gradient: Callable[[Anchors], Tensor] | None = None,
        inner_rate: Callable[[float, int], float] | None = None,
        weight_by_tau: bool = False,
        form: ops.AnchorForm | None = None,
        state: SampleState | None = None,
        pair_weights: PairWeights | None = None,
        lr_tau: float | None = None,
        follows_schedule: bool = True,
    ) -> None:
        super().__init__(
            name=name,
            implementation=implementation,
            lr_tau=lr_tau,
            follows_schedule=follows_schedule,
            state=state,
            pair_weights=pair_weights,
        )
        self.temperature_rule = temperature
        self.normalizer, self.value, self.temperature_gradient = normalizer, value, temperature_gradient
        self.inner_rate, self.weight_by_tau, self.form = inner_rate, weight_by_tau, form
        self.epoch = 0
        self.shares = DeviceScalars(0.0, 1.0)  # 1 - gamma and gamma: weights of the old estimate and the batch

    @property
    def gamma(self) -> float:
        """The inner learning rate."""
        return self.shares.on_host[1]

    def set_epoch(self, epoch: float, epochs: int) -> None:
        """Set gamma to its value in this epoch. With `gamma_per_step` give the epoch with its fraction."""
        super().set_epoch(epoch, epochs)
        self.epoch = math.floor(epoch)
        if self.inner_rate is not None:
            gamma = self.inner_rate(epoch, epochs)
            self.shares.set(1 - gamma, gamma)
        if isinstance(self.temperature_rule, IndividualTemperature):
            self.temperature_rule.set_epoch(self.epoch)

    def temperature(self) -> Tensor:
        """The current tau: a scalar, or the mean of the per-sample ones, for which all ranks call this together."""
        if isinstance(self.temperature_rule, IndividualTemperature):
            assert self.state is not None
            return self.state.mean("tau")
        return self.temperature_rule.mean()

    def compute(self, local: Local, sample_ids: Tensor | None, text_ids: Tensor | None) -> LossOutput:
        image, text = local.image, local.text
        implementation, engine = ops.implementation(self.implementation, image)
        if (kernels := self._kernels(engine, local, text_ids)) is not None:
            return self._compute_by_kernels(implementation, engine, kernels, local, sample_ids)
        ids = self.gather_ids(sample_ids, text_ids, local)

        with torch.no_grad():
            stored = self._read_state(ids, ops.accumulator_dtype(image.dtype))
            tau = stored["tau"]
            inverse = tau.reciprocal()
            if self.pair_weights is not None:
                local = local.weighted_by(self.pair_weights.weights(stored, local.columns))
            # 1. statistics
            matrix = Similarities(engine, local, inverse)
            log_sum, mean, positive = matrix.statistics()
            logit, log_negatives = positive * inverse, matrix.log_negatives()
            log_g = log_sum - (logit + log_negatives)
            mean_l = (mean - positive) * inverse
            # 2. normaliser
            shift = self._shift(matrix, logit, inverse, stored)
            old = stored.get("log_u")
            log_norm, log_u = self.normalizer(log_g, log_negatives, old, self.shares.value, shift)
            ratio, weight = (log_g - log_norm).exp(), matrix.weights()
            anchors = Anchors(tau, log_g, mean_l, log_norm, log_u, ratio, log_negatives, weight)
            # 3. temperature and state
            if self.training and self.pair_weights is not None and ids is not None:
                comparison = matrix.comparison(tau, log_sum, log_g)
                visits = self.pair_weights.visit(comparison, stored, ids, local.columns)
            else:
                visits = Visits({}, {})
            slopes = self._update(anchors, shift, stored, ids, visits)
            # 4. gradients: the weights now, the products in the backward pass
            log_weight, diagonal = self._weights(anchors, logit, inverse)
            value = self.value(anchors)

        saved = (*matrix.saved(), log_weight, diagonal)
        loss = attach_gradients(value, image, text, matrix.pull, saved, slopes)
        gamma = None if self.inner_rate is None else self.shares.value[1].clone()
        return LossOutput(loss=loss, metrics=self._metrics(lambda: anchors, gamma, implementation))

    def _kernels(self, engine: ops.Implementation, local: Local, text_ids: Tensor | None) -> Any:
        """Those for a loss with one temperature, and one id for each pair."""
        rule = self.temperature_rule
        if self.form is None or (self.state is not None and text_ids is not None):
            return None
        assert not isinstance(rule, IndividualTemperature)
        tensors = [rule.log_inv_tau if isinstance(rule, GlobalTemperature) else rule.tau]
        if self.state is not None and "log_u_image" in self.state.initial:
            tensors.append(self.state.get_buffer("log_u_image"))
        return self.scalar_kernels(engine, local, tensors)

    def _compute_by_kernels(
        self, implementation: str, engine: ops.Implementation, kernels: Any, local: Local, sample_ids: Tensor | None
    ) -> LossOutput:
        """The same steps, with one kernel before the statistics and one after them."""
        rule, state, batch_ids, estimates = self.temperature_rule, self.state, None, None
        assert self.form is not None and not isinstance(rule, IndividualTemperature)
        with torch.no_grad():
            if state is not None:
                (batch_ids,) = self.check_ids(sample_ids, None, local)
                image_table, text_table = (state.get_buffer(f"log_u_{side}") for side in SIDES)
                estimates = ops.Estimates(self.shares.value, image_table, text_table, state.visited, self.training)
            ids = None if batch_ids is None else batch_ids.to(local.image.device, non_blocking=True)
            prepared = kernels.prepare(local.image, local.text, rule.stored(), ids=ids)
            matrix = Similarities(engine, local, prepared.inverse)
            value = kernels.anchors(prepared, *matrix.both_sides(), self.form, estimates)
            if state is not None and batch_ids is not None:
                state.assert_inside(batch_ids, prepared.valid)
                if self.training:
                    state.remember(prepared.visited, prepared.positions, prepared.pair("old"))
        slopes = [(rule.log_inv_tau, prepared.slope)] if isinstance(rule, GlobalTemperature) else []
        saved = (*matrix.saved(), prepared.pair("log_weight"), prepared.diagonal)
        loss = attach_gradients(value, local.image, local.text, matrix.pull, saved, slopes)
        log_negatives = matrix.log_negatives()

        def anchors() -> Anchors:
            vectors = {name: prepared.pair(name) for name in ("log_g", "mean_l", "log_norm", "log_u", "ratio")}
            return Anchors(tau=prepared.tau, **vectors, log_negatives=log_negatives, weight=None)

        gamma = prepared.gamma if self.inner_rate is not None else None
        return LossOutput(loss=loss, metrics=self._metrics(anchors, gamma, implementation))

    def _read_state(self, ids: tuple[Tensor, Tensor] | None, dtype: torch.dtype) -> dict[str, Tensor]:
        """tau before this step, and the samples' log u and shift where the loss keeps them, by one collective."""
        stored: dict[str, Tensor] = {}
        if self.state is not None and ids is not None:
            names = [name for name in ("log_u", "tau", "shift") if f"{name}_image" in self.state.initial]
            names += [name for name in TABLES if name in self.state.initial]
            stored |= self.state.read(names, ids)
        if not isinstance(self.temperature_rule, IndividualTemperature):
            stored["tau"] = self.temperature_rule.mean()
        return {name: value.to(dtype) for name, value in stored.items()}

    def _shift(
        self, matrix: Similarities, logit: Tensor, inverse: Tensor, stored: dict[str, Tensor]
    ) -> Tensor | None:
        """eps_form="published": the largest exponent of an anchor so far, by which its estimate is shifted."""
        if "shift" not in stored:
            return None
        (images, texts), groups = matrix.gathered, matrix.local.groups
        largest = torch.stack([ops.row_maxima(images, texts, groups), ops.row_maxima(texts, images, groups)])
        return torch.maximum(stored["shift"], largest * inverse - logit)

    def _update(
        self,
        anchors: Anchors,
        shift: Tensor | None,
        stored: dict[str, Tensor],
        ids: tuple[Tensor, Tensor] | None,
        visits: Visits,
    ) -> list[tuple[Tensor, Tensor]]:
        """Store the new per-sample state; return the global temperature with its gradient."""
        if self.state is not None and ids is not None and self.training:
            values = {"log_u": anchors.log_u} if "log_u" in stored else {}
            if shift is not None:
                values["shift"] = shift
            if isinstance(self.temperature_rule, IndividualTemperature):
                values |= self.temperature_rule.update(self.state, ids, anchors)
            never = stored["log_u"][0].isneginf() if "log_u" in stored else never_scored(stored)
            first_visits = never & ~anchors.log_u[0].isneginf()
            self.state.write(ids, values | visits.values, first_visits=first_visits, sums=visits.sums)
        if self.temperature_gradient is None:
            return []
        assert isinstance(self.temperature_rule, GlobalTemperature)
        return [(self.temperature_rule.log_inv_tau, self.temperature_gradient(anchors))]

    def _weights(self, anchors: Anchors, logit: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
        """The log weight of each anchor's negatives beside exp(s_ij / tau_i), and the weight of its positive.

        The positive's is minus the sum over the negatives of both directions.
        """
        batch = logit.shape[-1]
        log_share = -(anchors.log_negatives + math.log(2 * batch))
        if self.weight_by_tau:
            log_weight, total = log_share - (anchors.log_norm + logit), anchors.ratio.sum(0)
        else:
            log_weight = (inverse.log() + log_share) - (anchors.log_norm + logit)
            total = (anchors.ratio * inverse).sum(0)
        if anchors.weight is not None:
            log_weight, total = log_weight + anchors.weight.log(), total * anchors.weight
        return log_weight, total / (-2 * batch)

    def _metrics(self, anchors: Callable[[], Anchors], gamma: Tensor | None, implementation: str) -> Metrics:
        metrics: dict[str, Metric] = {
            "tau": lambda: anchors().tau.mean(),
            "effective_negatives": lambda: anchors().effective_negatives().mean(),
            "implementation": implementation,
        }
        if self.pair_weights is not None:
            metrics |= self.pair_weights.metrics()
        state = self.state
        if state is not None and gamma is not None and self.inner_rate is not None:
            metrics |= {
                "gamma": gamma,
                "log_u_mean": lambda: anchors().finite_log_u().mean(),
                "log_u_spread": lambda: anchors().finite_log_u().std(correction=0),
                "estimate_gap": lambda: anchors().estimate_gap().mean(),
                "never_visited": lambda: 1 - state.visited / state.num_samples,
            }
        return Metrics(metrics)

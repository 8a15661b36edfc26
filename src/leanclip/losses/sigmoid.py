"""SigLIP: a binary classification of every pair of a batch, with a learnable temperature and bias."""

from typing import Any

import torch
from torch import Tensor, nn

from leanclip import ops
from leanclip.losses.base import ContrastiveLoss, Local, LossOutput, Metric, Metrics, attach_gradients
from leanclip.losses.pair_weights import TABLES, PairWeights, never_scored
from leanclip.losses.sample_state import Ids, SampleState
from leanclip.losses.similarities import Similarities
from leanclip.losses.temperature import GlobalTemperature

# The value, the embeddings' gradients, the slopes of log(1/tau) and of the bias, and metrics.
_Result = tuple[Tensor, ops.Gradients, tuple[Tensor, Tensor], dict[str, Metric]]


class SigmoidLoss(ContrastiveLoss):
    """-1/B sum_ij log sigmoid(+-z_ij), z_ij = s_ij / tau + bias, plus for the positives and minus for the negatives.

    As softplus(-z) = softplus(z) - z, this is 1/B [sum_ij softplus(z_ij) - sum_i z_ii]: all pairs share one
    form, and the positives add a linear term. The gradients need no normaliser and come with the value in one pass.
    A pair's weight multiplies its positive; a negative belongs to two anchors and has the mean of their weights.
    """

    def __init__(
        self,
        *,
        implementation: str,
        temperature: GlobalTemperature,
        bias: float,
        lr_tau: float | None,
        state: SampleState | None = None,
        pair_weights: PairWeights | None = None,
    ) -> None:
        super().__init__(
            name="siglip",
            implementation=implementation,
            lr_tau=lr_tau,
            follows_schedule=True,
            state=state,
            pair_weights=pair_weights,
        )
        self.temperature_rule = temperature
        self.bias = nn.Parameter(torch.tensor(bias))

    def temperature(self) -> Tensor:
        return self.temperature_rule.mean()

    def compute(self, local: Local, sample_ids: Tensor | None, text_ids: Tensor | None) -> LossOutput:
        image, text = local.image, local.text
        implementation, engine = ops.implementation(self.implementation, image)
        ids = self.gather_ids(sample_ids, text_ids, local)
        needs = (image.requires_grad and torch.is_grad_enabled(), text.requires_grad and torch.is_grad_enabled())
        with torch.no_grad():
            kernels = self.scalar_kernels(engine, local, (self.temperature_rule.log_inv_tau, self.bias))
            if kernels is None:
                value, gradients, slopes, metrics = self._compute_in_steps(engine, local, ids, needs)
            else:
                value, gradients, slopes, metrics = self._compute_by_kernels(engine, kernels, local, needs)

        saved = [gradient for gradient in gradients if gradient is not None]

        def pull(i: Tensor, t: Tensor, *saved: Tensor, needs: tuple[bool, bool]) -> ops.Gradients:
            kept = iter(saved)
            return ops.Gradients(*(next(kept) if need else None for need in needs))

        parameters = self.temperature_rule.log_inv_tau, self.bias
        loss = attach_gradients(value, image, text, pull, saved, list(zip(parameters, slopes, strict=True)))
        metrics["implementation"] = implementation
        if self.pair_weights is not None:
            metrics |= self.pair_weights.metrics()
        return LossOutput(loss=loss, metrics=Metrics(metrics))

    def _compute_by_kernels(
        self, engine: ops.Implementation, kernels: Any, local: Local, needs: ops.Needs
    ) -> _Result:
        """As `_compute_in_steps`, with one kernel before the pairs and one after them."""
        prepared = kernels.prepare(local.image, local.text, self.temperature_rule.stored(), bias=self.bias.detach())
        sigmoid = ops.Sigmoid(prepared.inverse, prepared.bias, prepared.weight)
        pairs = local.pairs(local.image, local.text)
        by_image = engine.pairwise(pairs, sigmoid, prepared.diagonal, needs=needs)
        value = kernels.sigmoid_sums(prepared, by_image)
        metrics: dict[str, Metric] = {"tau": lambda: prepared.tau, "bias": lambda: prepared.bias}
        return value, by_image.gradients, (prepared.slope, prepared.bias_slope), metrics

    def _compute_in_steps(
        self, engine: ops.Implementation, local: Local, ids: Ids | None, needs: ops.Needs
    ) -> _Result:
        image, text, ranks, batch = local.image, local.text, local.ranks, local.batch
        dtype = ops.accumulator_dtype(image.dtype)
        scale, bias = self.temperature().to(dtype).reciprocal(), self.bias.to(dtype)
        if ids is None:
            all_images, all_texts = local.gathered()
        else:
            local, (all_images, all_texts) = self._score(engine, local, scale, ids)
        positive = (image.to(dtype) * text).sum(1)
        weight = scale / batch
        sigmoid, diagonal = ops.Sigmoid(scale, bias, weight), -weight.expand(len(image))
        linear, mean_weight = scale * positive + bias, 1.0
        if local.weights is not None:
            anchor, mean_weight = local.weights[local.share], local.weights.mean()
            sigmoid = sigmoid._replace(sides=(anchor / 2, local.weights / 2))
            diagonal, positive, linear = diagonal * anchor, positive * anchor, linear * anchor
        by_image = engine.pairwise(
            local.pairs(image, all_texts),
            sigmoid,
            diagonal,
            needs=(needs[0], needs[1] and ranks.size == 1),
        )
        gradients = by_image.gradients
        if ranks.size > 1:
            pairs = local.pairs(text, all_images)
            by_text = engine.pairwise(pairs, sigmoid, diagonal, needs=(needs[1], False))
            both = (gradients.rows, by_text.gradients.rows)
            gradients = ops.Gradients(*(None if g is None else g * ranks.size for g in both))
        sums = torch.stack([
            (by_image.softplus - linear).sum(),
            (by_image.similarity - positive).sum(),
            by_image.weight.sum(),
        ])  # fmt: skip
        metrics: dict[str, Metric] = {"tau": scale.reciprocal, "bias": self.bias.detach().clone()}
        value, similarity, probability = (ranks.sum(sums, purpose="sums") / batch).unbind()
        return value, gradients, (scale * similarity, probability - mean_weight), metrics

    def _score(
        self, engine: ops.Implementation, local: Local, scale: Tensor, ids: Ids
    ) -> tuple[Local, tuple[Tensor, Tensor]]:
        """The batch with its learned weights, and the gathered embeddings.

        A visit's score is that of the other losses. SigLIP has no log g: this is one more pass over the matrix.
        """
        assert self.state is not None and self.pair_weights is not None
        stored = {name: value.to(scale.dtype) for name, value in self.state.read(list(TABLES), ids).items()}
        matrix = Similarities(engine, local, scale)
        if self.training:
            log_sum, _, positive = matrix.statistics()
            log_g = log_sum - (positive * scale + matrix.log_negatives())
            comparison = matrix.comparison(scale.reciprocal(), log_sum, log_g)
            visits = self.pair_weights.visit(comparison, stored, ids, local.columns)
            first = never_scored(stored) & ~log_g[0].isneginf()
            self.state.write(ids, visits.values, first_visits=first, sums=visits.sums)
        return local.weighted_by(self.pair_weights.weights(stored, local.columns)), matrix.gathered

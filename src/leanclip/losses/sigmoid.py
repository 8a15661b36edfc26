"""SigLIP: every pair of a batch is a yes-or-no question of its own, with a learnable temperature and bias."""

import torch
from torch import Tensor, nn

from leanclip import ops
from leanclip.losses.attach import attach_gradients
from leanclip.losses.base import ContrastiveLoss, work_dtype
from leanclip.losses.output import LossOutput
from leanclip.losses.temperature import GlobalTemperature


class SigmoidLoss(ContrastiveLoss):
    """-1/B sum_ij log sigmoid(+-z_ij), z_ij = s_ij / tau + bias, plus for the positives and minus for all others.

    As softplus(-z) = softplus(z) - z, this is 1/B [sum_ij softplus(z_ij) - sum_i z_ii]: no pair is special but for a
    linear term. The gradients need no normaliser and come with the value in one pass.
    """

    def __init__(
        self, *, implementation: str, temperature: GlobalTemperature, bias: float, lr_tau: float | None
    ) -> None:
        super().__init__(name="siglip", implementation=implementation, lr_tau=lr_tau, follows_schedule=True)
        self.temperature_rule = temperature
        self.bias = nn.Parameter(torch.tensor(bias))

    def temperature(self) -> Tensor:
        return self.temperature_rule.mean()

    def compute(
        self,
        image: Tensor,
        text: Tensor,
        sample_ids: Tensor | None,
        text_ids: Tensor | None,
        groups: Tensor | None,
    ) -> LossOutput:
        pairs = ops.Pairs(row_groups=groups, col_groups=groups)
        chosen, engine = ops.implementation(self.implementation, image)
        needs = (image.requires_grad and torch.is_grad_enabled(), text.requires_grad and torch.is_grad_enabled())

        with torch.no_grad():
            dtype, batch = work_dtype(image), len(image)
            scale, bias = 1 / self.temperature().to(dtype), self.bias.to(dtype)
            positive = (image.to(dtype) * text.to(dtype)).sum(1)
            weight = scale / batch
            found = engine.pairwise(image, text, scale, bias, weight, -weight.expand(batch), pairs=pairs, needs=needs)
            value = (found.softplus - (scale * positive + bias)).sum() / batch
            slopes = [
                (self.temperature_rule.log_inv_tau, weight * (found.similarity - positive).sum()),
                (self.bias, found.weight.sum() / batch - 1),
            ]

        saved = [gradient for gradient in found.gradients if gradient is not None]

        def pull(i: Tensor, t: Tensor, *saved: Tensor, needs: tuple[bool, bool]) -> ops.Gradients:
            kept = iter(saved)
            return ops.Gradients(*(next(kept) if need else None for need in needs))

        loss = attach_gradients(value, image, text, pull, saved, slopes)
        return LossOutput(loss=loss, metrics={"tau": 1 / scale, "bias": self.bias.detach(), "implementation": chosen})

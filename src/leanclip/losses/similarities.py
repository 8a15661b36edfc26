"""The similarities of a global batch, of which each rank computes its own rows: where the engine meets the ranks.

With groups, the negatives of an anchor are counted: all its means are over those that remain.

One process computes each similarity once for both directions. Of several, each compares its own images with all texts
and its own texts with all images; they exchange the embeddings and five numbers per sample, never a gradient.
"""

import math

import torch
from torch import Tensor

from leanclip import ops
from leanclip.losses.base import Local
from leanclip.losses.pair_weights import Comparison


class Similarities:
    """Both directions of a batch's similarity matrix, at scales (1/tau) of () or (2, B)."""

    def __init__(self, engine: ops.Implementation, local: Local, scale: Tensor) -> None:
        self.engine = engine
        self.local = local._replace(image=local.image.detach(), text=local.text.detach())
        self.gathered = local.gathered()  # all image and all text embeddings
        self.scales = (scale, scale) if scale.ndim == 0 else scale.unbind()
        # (B,) how many negatives an anchor has, in both directions alike; None where all have B - 1.
        self.negatives = None if local.groups is None and local.batch > 1 else self._count_negatives()

    def _count_negatives(self) -> Tensor:
        groups = self.local.groups
        if groups is None:
            return torch.zeros(1, dtype=torch.int64, device=self.local.image.device)
        ordered = groups.sort().values
        first, end = (torch.searchsorted(ordered, groups, right=right) for right in (False, True))
        return self.local.batch - (end - first)

    def log_negatives(self) -> Tensor | float:
        """0 for an anchor without negatives."""
        if self.negatives is None:
            return math.log(self.local.batch - 1)
        return self.negatives.clamp_min(1).to(ops.accumulator_dtype(self.local.image.dtype)).log()

    def weights(self) -> Tensor | None:
        """(B,) what the pairs are weighted by: 0 without negatives. None where all have weight 1."""
        pair_weights = self.local.weights
        if self.negatives is None:
            return pair_weights
        counted = (self.negatives > 0).to(ops.accumulator_dtype(self.local.image.dtype))
        return counted if pair_weights is None else pair_weights * counted

    def statistics(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of all anchors: log-sum-exp and mean similarity over the negatives, (2, B), and the positives', (B,)."""
        image, text, ranks = self.local.image, self.local.text, self.local.ranks
        positive = (image.to(ops.accumulator_dtype(image.dtype)) * text).sum(1)
        if ranks.size == 1:
            log_sum, mean = (torch.stack(both) for both in zip(*self.both_sides(), strict=True))
            return log_sum, mean, positive
        sides = zip((image, text), self.gathered[::-1], self.scales, strict=True)
        local = [
            self.engine.statistics(self._pairs(rows, cols), self._local(scale), None)[0]
            for rows, cols, scale in sides
        ]
        scalars = torch.stack([*(side.log_sum for side in local), *(side.mean for side in local), positive], 1)
        gathered = ranks.gather(scalars, self.local.batch, purpose="scalars").T
        return gathered[0:2], gathered[2:4], gathered[4]

    def both_sides(self) -> tuple[ops.Statistics, ops.Statistics]:
        """Of one process."""
        by_image, by_text = self.engine.statistics(self._pairs(self.local.image, self.local.text), *self.scales)
        assert by_text is not None
        return by_image, by_text

    def comparison(self, tau: Tensor, log_sum: Tensor, log_g: Tensor) -> Comparison:
        return Comparison(*self.gathered, tau, log_sum, log_g, self.local.groups, self.negatives)

    def saved(self) -> tuple[Tensor, ...]:
        """The tensors that `pull` needs beside the weights."""
        return (*self.gathered, *self.scales) if self.local.ranks.size > 1 else self.scales

    def pull(self, image: Tensor, text: Tensor, *saved: Tensor, needs: ops.Needs) -> ops.Gradients:
        """The complete gradients of the local embeddings, for (2, B) log weights and the positives' weights."""
        *gathered, image_scale, text_scale, log_weight, diagonal = saved
        by_image, by_text = ops.Terms(image_scale, log_weight[0]), ops.Terms(text_scale, log_weight[1])
        ranks, share = self.local.ranks, self.local.share
        if ranks.size == 1:
            return self.engine.gradients(self._pairs(image, text), by_image, by_text, diagonal, needs=needs)
        all_images, all_texts = gathered
        sides = ((image, all_texts, by_image, by_text), (text, all_images, by_text, by_image))
        results: list[Tensor | None] = []
        for need, (rows, cols, row_terms, col_terms) in zip(needs, sides, strict=True):
            local_terms = ops.Terms(self._local(row_terms.scale), row_terms.log_weight[share])
            gradient = self.engine.gradients(
                self._pairs(rows, cols), local_terms, col_terms, diagonal[share], needs=(need, False)
            ).rows
            results.append(None if gradient is None else gradient * ranks.size)
        return ops.Gradients(*results)

    def _pairs(self, rows: Tensor, cols: Tensor) -> ops.Pairs:
        return self.local.pairs(rows, cols, mask_positives=True)

    def _local(self, scale: Tensor) -> Tensor:
        return scale if scale.ndim == 0 else scale[self.local.share]

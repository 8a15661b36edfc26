"""The similarities of a global batch, of which each rank computes its own rows: where the engine meets the ranks.

One process forms each similarity once for both directions. Of several, each compares its own images with all texts
and its own texts with all images; what travels is the embeddings and five numbers per sample, never a gradient.
"""

import torch
from torch import Tensor

from leanclip import ops
from leanclip.losses.base import Local, work_dtype


class Similarities:
    """Both directions of a batch's similarity matrix, at scales (1/tau) of () or (2, B)."""

    def __init__(self, engine: ops.Implementation, local: Local, scale: Tensor, groups: Tensor | None) -> None:
        self.engine, self.ranks, self.mine = engine, local.ranks, local.mine
        self.local = (local.image.detach(), local.text.detach())
        self.batch = local.batch
        self.everyone = local.gathered()
        self.scales = (scale, scale) if scale.ndim == 0 else scale.unbind()
        self.pairs = ops.Pairs(
            offset=self.mine.start,
            mask_positives=True,
            row_groups=None if groups is None else groups[self.mine],
            col_groups=groups,
        )

    def statistics(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of all anchors: log-sum-exp and mean similarity over the negatives, (2, B), and the positives', (B,)."""
        image, text = self.local
        positive = (image.to(work_dtype(image)) * text).sum(1)
        if self.ranks.size == 1:
            by_image, by_text = self.engine.statistics(image, text, *self.scales, pairs=self.pairs)
            assert by_text is not None
            log_sum, mean = (torch.stack(both) for both in zip(by_image, by_text, strict=True))
            return log_sum, mean, positive
        sides = zip(self.local, self.everyone[::-1], self.scales, strict=True)
        found = [
            self.engine.statistics(own, others, self._own(s), None, pairs=self.pairs)[0] for own, others, s in sides
        ]
        numbers = torch.stack([*(side.log_sum for side in found), *(side.mean for side in found), positive], 1)
        everyones = self.ranks.gather(numbers, self.batch, purpose="scalars").T
        return everyones[0:2], everyones[2:4], everyones[4]

    def saved(self) -> tuple[Tensor, ...]:
        """What `pull` needs beside the weights."""
        return (*self.everyone, *self.scales) if self.ranks.size > 1 else self.scales

    def pull(self, image: Tensor, text: Tensor, *saved: Tensor, needs: tuple[bool, bool]) -> ops.Gradients:
        """The complete gradients of the local embeddings, for (2, B) log weights and the positives' weights."""
        *others, image_scale, text_scale, log_weight, diagonal = saved
        terms = ops.Terms(image_scale, log_weight[0]), ops.Terms(text_scale, log_weight[1])
        if self.ranks.size == 1:
            return self.engine.gradients(image, text, *terms, diagonal, pairs=self.pairs, needs=needs)
        all_images, all_texts = others
        found = []
        for side, (own, opposite) in enumerate(((image, all_texts), (text, all_images))):
            anchors, opposed = terms[side], terms[1 - side]
            own_terms = ops.Terms(self._own(anchors.scale), anchors.log_weight[self.mine])
            rows = self.engine.gradients(
                own, opposite, own_terms, opposed, diagonal[self.mine], pairs=self.pairs, needs=(needs[side], False)
            ).rows
            found.append(None if rows is None else rows * self.ranks.size)
        return ops.Gradients(*found)

    def _own(self, scale: Tensor) -> Tensor:
        return scale if scale.ndim == 0 else scale[self.mine]

"""DisCo-CLIP's decomposition of InfoNCE (arXiv 2304.08480), to compare with: docs/algorithm.md, section 14."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from leanclip.distributed import Ranks


def disco_clip(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    """L_n, the mean over this rank's anchors. Its mean over the ranks, as DDP takes it, is InfoNCE of the batch.

    The gradients equal those of `infonce`. Every rank has the same number b of rows and holds two b x B matrices.
    """
    ranks = Ranks.current()
    images, texts = (_Gathered.apply(rows, ranks) for rows in (image, text))
    return anchors_loss(image, text, images, texts, scale, first=ranks.rank * len(image))


def anchors_loss(image: Tensor, text: Tensor, images: Tensor, texts: Tensor, scale: Tensor, *, first: int) -> Tensor:
    """InfoNCE of some anchors against all rows, where they stand from `first` on."""
    partners = torch.arange(first, first + len(image), device=image.device)
    return (
        F.cross_entropy(scale * image @ texts.T, partners) + F.cross_entropy(scale * text @ images.T, partners)
    ) / 2


class _Gathered(torch.autograd.Function):
    """The rows of all ranks. Backward gets dL_n of all rows and returns sum_m dL_m of this rank's rows: the term
    m = n belongs to the intra-GPU gradient; the others are the inter-GPU gradient, for which it is all-reduced."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ranks: Ranks) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.ranks = ranks
        return ranks.gather(rows, len(rows) * ranks.size, purpose="embeddings")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        total = ctx.ranks.sum(gradient.contiguous(), purpose="gradients")
        return total[ctx.ranks.share(len(total))], None

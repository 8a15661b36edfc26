"""The losses of others, as plain PyTorch for a trace: what their memory would be in the same step.

    undivided     CLIP, OpenCLIP without --local-loss: every rank forms the whole B x B matrix in both directions
    local         OpenCLIP's --local-loss --gather-with-grad, and DisCo-CLIP: B/N x B, twice

Both are InfoNCE and differ from each other in what they hold and send, not in what they compute.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from leanclip.losses import ContrastiveLoss, LossOutput
from leanclip.losses.base import Local
from leanclip.planning.fake_ranks import pretending
from leanclip.planning.step_trace import tracing


class RivalLoss(ContrastiveLoss):
    """Cross-entropy on similarities that are held, with autograd's own backward pass."""

    def __init__(self, *, divided: bool) -> None:
        super().__init__(name="rival", implementation="auto", lr_tau=None, follows_schedule=True)
        self.divided = divided
        self.scale = torch.nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def compute(
        self, local: Local, sample_ids: Tensor | None, text_ids: Tensor | None, groups: Tensor | None
    ) -> LossOutput:
        images, texts = local.gathered()
        if not self.divided:
            # The own rows stand in the gathered tensors, with their gradients.
            images, texts = (
                torch.cat([own, others[len(own) :]]) for own, others in ((local.image, images), (local.text, texts))
            )
            rows, cols = (images, texts), (texts, images)
        else:
            images, texts = images.requires_grad_(), texts.requires_grad_()  # gradients for all, which then travel
            rows, cols = (local.image, local.text), (texts, images)
        labels, scale = torch.arange(len(rows[0])), self.scale.exp()
        total = torch.zeros(())
        for own, others in zip(rows, cols, strict=True):
            logits = (scale * own).to(own.dtype) @ others.T
            # As autocast does: the logits in 16 bits, their logarithms and what follows in float32.
            total = total + F.nll_loss(F.log_softmax(logits, 1, dtype=torch.float32), labels) / 2
        return LossOutput(loss=total, metrics={})

    def temperature(self) -> Tensor:
        return (-self.scale.detach()).exp()


def loss_memory(
    make: Callable[[], ContrastiveLoss], *, batch: int, ranks: int, dim: int, dtype: torch.dtype = torch.bfloat16
) -> int:
    """Bytes that a loss takes on a rank, forward and backward, beside the rank's embeddings and the tables."""
    with tracing() as trace, pretending(trace, ranks=ranks, processors=132) as first:
        loss = make()
        loss.set_epoch(0, 1)
        share = first.largest_share(batch)
        image, text = (torch.empty(share, dim, dtype=dtype, requires_grad=True) for _ in range(2))
        with unset_fake_temporarily():
            ids = torch.arange(share)
        trace.start_again()
        before = trace.total
        loss(image, text, ids, global_batch=batch).loss.backward()
        return trace.peak - before

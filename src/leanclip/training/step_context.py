"""What a training step works with."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from leanclip.data import Batch
from leanclip.distributed import Ranks
from leanclip.losses import ContrastiveLoss, LossOutput
from leanclip.models.batch_norm import RunningAverages
from leanclip.optim.loss_scale import LossScale


@dataclass(frozen=True, kw_only=True)
class StepContext:
    towers: nn.Module  # images and captions to embeddings: the model, or DDP around it
    loss: ContrastiveLoss
    optimizer: Optimizer
    global_batch: int
    micro_batches: int = 1
    cuda_graphs: Callable[["StepContext", Batch], Any] | None = None  # replays the step where that saves time
    autocast: torch.autocast = field(default_factory=lambda: torch.autocast("cpu", enabled=False))
    grad_clip_norm: float | None = None
    scale: LossScale = field(default_factory=LossScale)
    ranks: Ranks = field(default_factory=Ranks.current)
    phase: Callable[[str], None] = lambda name: None
    """Called where a step enters a phase: image tower, text tower, loss, backward, optimizer. Not by a CUDA graph."""

    def loss_of(self, image: Tensor, text: Tensor, batch: Batch) -> LossOutput:
        """The loss of this rank's share of a global batch, from its embeddings."""
        return self.loss(
            image, text, batch.sample_ids, groups=batch.groups, weights=batch.weights,
            caption_numbers=batch.caption_numbers, global_batch=self.global_batch,
        )  # fmt: skip

    @cached_property
    def parameters(self) -> list[nn.Parameter]:
        """The towers'. Collecting them takes the host longer than a small model's kernels take the GPU."""
        return list(self.towers.parameters())

    @cached_property
    def norms(self) -> RunningAverages:
        return RunningAverages(self.towers)

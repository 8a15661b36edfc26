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
from leanclip.losses import ContrastiveLoss
from leanclip.models.batch_norm import RunningAverages
from leanclip.optim.loss_scale import LossScale


@dataclass(frozen=True, kw_only=True)
class Pieces:
    towers: nn.Module  # images and tokens to embeddings; DDP around the model, or the model itself
    loss: ContrastiveLoss
    optimizer: Optimizer
    batch: int  # the global one
    parts: int = 1  # micro-batches
    texts: Callable[[Tensor, Tensor | None], Any] = lambda tokens, _: tokens  # tokens and lengths to what towers take
    recorder: Callable[["Pieces", Batch], Any] | None = None  # the step as a CUDA graph, where that is worth it
    autocast: torch.autocast = field(default_factory=lambda: torch.autocast("cpu", enabled=False))
    grad_clip_norm: float | None = None
    scale: LossScale = field(default_factory=LossScale)
    ranks: Ranks = field(default_factory=Ranks.current)

    @cached_property
    def parameters(self) -> list[nn.Parameter]:
        """The towers'. Looking for them takes the host longer than a small model's kernels take the GPU."""
        return list(self.towers.parameters())

    @cached_property
    def norms(self) -> RunningAverages:
        return RunningAverages(self.towers)

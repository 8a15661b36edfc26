"""Who takes part in a step, who has which share of the batch, and the collectives between them."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Ranks:
    """This process among those of a group. One process alone sends nothing."""

    rank: int
    size: int
    group: dist.ProcessGroup | None

    @classmethod
    def current(cls) -> "Ranks":
        """All processes, where torch.distributed is initialised; else this one alone."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls(0, 1, None)
        group = dist.group.WORLD
        return cls(dist.get_rank(group), dist.get_world_size(group), group)

    def share(self, batch: int, rank: int | None = None) -> slice:
        """A rank's part of a global batch: contiguous, and one more on the first ranks where it does not divide."""
        rank = self.rank if rank is None else rank
        each, more = divmod(batch, self.size)
        start = rank * each + min(rank, more)
        return slice(start, start + each + (rank < more))

    def gather(self, local: Tensor, batch: int) -> Tensor:
        """All ranks' rows, in the order of the global batch. No sizes travel: they follow from `batch`."""
        if self.size == 1:
            return local
        width = -(-batch // self.size)
        padded = local.new_zeros(width, *local.shape[1:])
        padded[: len(local)] = local
        everyone = padded.new_empty(self.size * width, *local.shape[1:])
        # As bytes, because not every backend knows every dtype.
        dist.all_gather_into_tensor(_bytes(everyone), _bytes(padded), group=self.group)
        if batch == self.size * width:
            return everyone
        parts = everyone.unflatten(0, (self.size, width))
        shares = (self.share(batch, rank) for rank in range(self.size))
        return torch.cat([part[: share.stop - share.start] for part, share in zip(parts, shares, strict=True)])

    def sum(self, local: Tensor) -> Tensor:
        """The sum over all ranks."""
        if self.size > 1:
            dist.all_reduce(local, group=self.group)
        return local


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)

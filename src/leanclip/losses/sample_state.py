"""Per-sample tables by id: what a loss remembers of each training sample.

The tables live on the compute device and are buffers, so part of `state_dict`. Nothing here waits for the device and
nothing allocates more than a batch beside the tables themselves.
"""

import torch
from torch import Tensor, nn

COUNTED = "log_u_image"  # a sample was met once this table holds a number for it instead of -inf


class SampleState(nn.Module):
    """Named tables of one number per sample id, for image anchors and text anchors.

    Reading gives the batch's values; writing replaces them and keeps what was there, so that the last write can be
    undone. An id that stands in a batch twice keeps its last occurrence, whatever the device.
    """

    def __init__(self, num_samples: int, initial: dict[str, float]) -> None:
        super().__init__()
        if num_samples < 1:
            raise ValueError(f"num_samples is {num_samples}; give the number of training samples")
        self.initial = dict(initial)
        for name, value in initial.items():
            self.register_buffer(name, torch.full((num_samples,), value))
        self.register_buffer("visited", torch.zeros((), dtype=torch.int64))
        self._replaced: dict[str, tuple[Tensor, Tensor]] = {}
        self._counted: Tensor | None = None

    visited: Tensor  # how many samples were met at least once

    @property
    def num_samples(self) -> int:
        return len(self.get_buffer(next(iter(self.initial))))

    def check(self, ids: Tensor) -> None:
        """Refuse ids outside the tables. Ids on the host are checked there; on a device without waiting for it."""
        if ids.ndim != 1 or ids.dtype.is_floating_point or ids.dtype == torch.bool:
            raise ValueError(f"sample ids must be a vector of integers, got {ids.dtype} of shape {tuple(ids.shape)}")
        inside = ((ids >= 0) & (ids < self.num_samples)).all()
        if ids.device.type != "cpu":
            torch.ops.aten._assert_async.msg(inside, f"a sample id lies outside [0, {self.num_samples})")
        elif not inside:
            wrong = ids[(ids < 0) | (ids >= self.num_samples)][0].item()
            raise ValueError(
                f"sample id {wrong} lies outside [0, {self.num_samples}); "
                "create the loss with a larger num_samples or call resize()"
            )

    def read(self, name: str, ids: Tensor) -> Tensor:
        return self.get_buffer(name)[ids]

    def write(self, ids: dict[str, Tensor], values: dict[str, Tensor]) -> None:
        """Store `values[name]` at `ids[name]`, all tables of one step in one call."""
        last = {id(index): last_occurrence(index) for index in ids.values()}
        self._replaced, self._counted = {}, self.visited.clone()
        for name, value in values.items():
            table, index = self.get_buffer(name), ids[name]
            keep, old = last[id(index)], table[index]
            if name == COUNTED:
                once = keep == torch.arange(len(keep), device=keep.device)
                self.visited += (old.isneginf() & once).sum()
            self._replaced[name] = index, old
            table[index] = value.to(table.dtype)[keep]

    def rollback(self) -> None:
        """Undo the last write. A second call does nothing."""
        for name, (index, value) in self._replaced.items():
            self.get_buffer(name)[index] = value
        if self._counted is not None:
            self.visited.copy_(self._counted)
        self._replaced, self._counted = {}, None

    def resize(self, num_samples: int) -> None:
        """Grow the tables for new samples; the old ones keep their values."""
        old = self.num_samples
        if num_samples < old:
            raise ValueError(f"resize to {num_samples} would drop samples: the tables hold {old}")
        for name, value in self.initial.items():
            table = self.get_buffer(name)
            grown = table.new_full((num_samples,), value)
            grown[:old] = table
            setattr(self, name, grown)
        self._replaced, self._counted = {}, None


def last_occurrence(ids: Tensor) -> Tensor:
    """For each position the last position that holds the same id, so that duplicates all write one value."""
    ordered, order = ids.sort(stable=True)
    return order[torch.searchsorted(ordered, ids, right=True) - 1]

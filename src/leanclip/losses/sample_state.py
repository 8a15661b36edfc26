"""Per-sample tables by id: what a loss remembers of each training sample.

The tables live on the compute device and are buffers, so part of `state_dict`. Nothing here waits for the device and
nothing allocates more than a batch beside the tables themselves.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

SIDES = ("image", "text")


class SampleState(nn.Module):
    """Tables of one number per sample id, in pairs: `log_u_image` and `log_u_text` and so on.

    Reading gives the batch's values; writing replaces them and keeps what was there, so that the last write can be
    undone. An id that stands in a batch twice keeps its last occurrence, whatever the device.
    """

    visited: Tensor  # how many samples were met at least once: log u holds a number for them instead of -inf

    def __init__(self, num_samples: int, initial: Mapping[str, float]) -> None:
        super().__init__()
        if num_samples < 1:
            raise ValueError(f"num_samples is {num_samples}; give the number of training samples")
        self.initial = dict(initial)
        for name, value in initial.items():
            self.register_buffer(name, torch.full((num_samples,), value))
        self.register_buffer("visited", torch.zeros((), dtype=torch.int64))
        self._replaced: dict[str, tuple[Tensor, Tensor]] = {}
        self._counted: Tensor | None = None

    @property
    def num_samples(self) -> int:
        return len(self.get_buffer(next(iter(self.initial))))

    def check(self, ids: Tensor) -> None:
        """Refuse ids outside the tables. Ids on the host are checked there; on a device without waiting for it."""
        if ids.ndim != 1 or ids.dtype.is_floating_point or ids.dtype == torch.bool:
            raise ValueError(f"sample ids must be a vector of integers, got {ids.dtype} of shape {tuple(ids.shape)}")
        if not len(ids):
            return
        low, high = ids.aminmax()
        if ids.device.type != "cpu":
            inside = (low >= 0) & (high < self.num_samples)
            torch.ops.aten._assert_async.msg(inside, f"a sample id lies outside [0, {self.num_samples})")
        elif low < 0 or high >= self.num_samples:
            raise ValueError(
                f"sample id {int(low if low < 0 else high)} lies outside [0, {self.num_samples}); "
                "create the loss with a larger num_samples or call resize()"
            )

    def read(self, name: str, ids: tuple[Tensor, Tensor]) -> Tensor:
        """(2, B): the image table at the first ids, the text table at the second."""
        return torch.stack([self.get_buffer(f"{name}_{side}")[at] for side, at in zip(SIDES, ids, strict=True)])

    def write(self, ids: tuple[Tensor, Tensor], values: Mapping[str, Tensor]) -> None:
        """Store (2, B) values per table pair, all tables of one step in one call."""
        last = [last_occurrence(ids[0])]
        last.append(last[0] if ids[1] is ids[0] else last_occurrence(ids[1]))
        self._replaced, self._counted = {}, self.visited.clone()
        for name, both in values.items():
            for side, index, keep, value in zip(SIDES, ids, last, both, strict=True):
                table = self.get_buffer(f"{name}_{side}")
                old = table[index]
                if (name, side) == ("log_u", "image"):
                    once = keep == torch.arange(len(keep), device=keep.device)
                    self.visited += (old.isneginf() & once).sum()
                self._replaced[f"{name}_{side}"] = index, old
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

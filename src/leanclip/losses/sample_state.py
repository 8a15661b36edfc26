"""Per-sample tables by id: what a loss remembers of each training sample.

The tables live on the compute device and are part of `state_dict`. Of several ranks each keeps one contiguous block
of ids; reading a batch's values is one all-reduce, and writing needs none, because every rank knows all new values.
Nothing here waits for the device and nothing allocates more than a batch beside the tables themselves.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from leanclip.distributed import Ranks, full_tensor

SIDES = ("image", "text")
Ids = tuple[Tensor, Tensor]  # of a global batch's images and texts; one tensor where they are the same


class Undo(NamedTuple):
    """What a write replaced."""

    visited: Tensor
    replaced: dict[str, tuple[Tensor, Tensor]]  # by table: where, and the values


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
        self.initial, self.num_samples = dict(initial), num_samples
        self.ranks = Ranks.current()
        for name, value in initial.items():
            self.register_buffer(name, torch.full((self._num_rows(),), value), persistent=False)
        self.register_buffer("visited", torch.zeros((), dtype=torch.int64))
        self.undo: Undo | None = None

    @property
    def block(self) -> range:
        """The ids of this rank, split as torch splits a DTensor."""
        width = -(-self.num_samples // self.ranks.size)
        start = min(self.ranks.rank * width, self.num_samples)
        return range(start, min(start + width, self.num_samples))

    @property
    def id_dtype(self) -> torch.dtype:
        """The smallest integers that hold an id: they travel with every batch."""
        return torch.int32 if self.num_samples < 2**31 else torch.int64

    def table(self, name: str) -> Tensor:
        """This rank's block of a table."""
        return self.get_buffer(name)[: len(self.block)]

    def mean(self, name: str) -> Tensor:
        """Over the samples of both sides. On several ranks all of them call it."""
        total = torch.stack([self.table(f"{name}_{side}").sum(dtype=torch.float64) for side in SIDES]).sum()
        return (self.ranks.sum(total, purpose="mean") / (2 * self.num_samples)).to(self.table(f"{name}_image").dtype)

    def check(self, ids: Tensor) -> None:
        """Refuse ids outside the tables. Ids on the host are checked there; on a device without waiting for it."""
        if Ranks.current().size != self.ranks.size:
            raise ValueError(
                f"the loss was made for {self.ranks.size} process(es) and is called on {Ranks.current().size};"
                " initialise torch.distributed before create_loss"
            )
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

    def read(self, names: Sequence[str], ids: Ids) -> dict[str, Tensor]:
        """(2, B) per name: the image table at the first ids, the text table at the second. One all-reduce for all."""
        own = self.own(names, ids)
        if self.ranks.size == 1:
            return own
        mine = torch.stack([self._rows(at) < len(self.block) for at in ids])
        everyones = torch.stack([torch.where(mine, value, 0.0) for value in own.values()])
        return dict(zip(names, self.ranks.sum(everyones, purpose="state"), strict=True))

    def own(self, names: Sequence[str], ids: Ids) -> dict[str, Tensor]:
        """The same without the other ranks: what they own is arbitrary here."""
        rows = self._both_rows(ids)
        return {
            name: torch.stack([self.get_buffer(f"{name}_{side}")[at] for side, at in zip(SIDES, rows, strict=True)])
            for name in names
        }

    def write(self, ids: Ids, values: Mapping[str, Tensor], *, first_visits: Tensor) -> None:
        """Store (2, B) values per table pair, all tables of one step in one call; each rank stores what it owns.

        `first_visits` says for each of the B samples whether it was never met before.
        """
        last = [last_occurrence(ids[0])]
        last.append(last[0] if ids[1] is ids[0] else last_occurrence(ids[1]))
        once = last[0] == torch.arange(len(last[0]), device=last[0].device)
        self.undo = Undo(self.visited.clone(), {})
        self.visited += (first_visits & once).sum()
        rows = self._both_rows(ids)
        for name, both in values.items():
            for side, at, keep, value in zip(SIDES, rows, last, both, strict=True):
                table = self.get_buffer(f"{name}_{side}")
                self.undo.replaced[f"{name}_{side}"] = at, table[at]
                table[at] = value.to(table.dtype)[keep]

    def rollback(self) -> None:
        """Undo the last write. A second call does nothing."""
        if self.undo is not None:
            for name, (at, value) in self.undo.replaced.items():
                self.get_buffer(name)[at] = value
            self.visited.copy_(self.undo.visited)
        self.undo = None

    def resize(self, num_samples: int) -> None:
        """Grow the tables for new samples; the old ones keep their values. On several ranks all of them call it."""
        if num_samples < self.num_samples:
            raise ValueError(f"resize to {num_samples} would drop samples: the tables hold {self.num_samples}")
        old = self.num_samples
        for name, value in self.initial.items():
            kept = full_tensor(self._distributed(name))
            self.num_samples = num_samples
            block = self.block
            grown = kept.new_full((self._num_rows(),), value)
            known = kept[block.start : block.stop]
            grown[: len(known)] = known
            setattr(self, name, grown)
            self.num_samples = old
        self.num_samples = num_samples
        self.undo = None

    def _num_rows(self) -> int:
        """The block, and one row more on several ranks: what the others own is written there."""
        return len(self.block) + (self.ranks.size > 1)

    def _rows(self, ids: Tensor) -> Tensor:
        """Where ids stand in this rank's buffers; those of other ranks in the spare last row."""
        if self.ranks.size == 1:
            return ids
        block = self.block
        return torch.where((ids >= block.start) & (ids < block.stop), ids - block.start, len(block))

    def _both_rows(self, ids: Ids) -> Ids:
        first = self._rows(ids[0])
        return first, first if ids[1] is ids[0] else self._rows(ids[1])

    def _distributed(self, name: str) -> Tensor:
        """A table as torch's checkpointing wants it: by id, with each rank's block in its place."""
        if self.ranks.size == 1:
            return self.table(name)
        table = self.table(name)
        return DTensor.from_local(
            table,
            self.ranks.mesh(table.device.type),
            [Shard(0)],
            run_check=False,
            shape=torch.Size([self.num_samples]),
            stride=(1,),
        )

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self.initial:
            destination[prefix + name] = self._distributed(name)

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: Any,
        unexpected_keys: Any,
        error_msgs: Any,
    ) -> None:
        """A table comes as a whole, or split over the ranks as ours is."""
        given = {name: state_dict[prefix + name] for name in self.initial if prefix + name in state_dict}
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        for name in self.initial:
            if prefix + name in unexpected_keys:
                unexpected_keys.remove(prefix + name)
            if name not in given:
                missing_keys.append(prefix + name)
                continue
            if given[name].shape != (self.num_samples,):
                error_msgs.append(
                    f"{prefix + name} holds {tuple(given[name].shape)} numbers, not ({self.num_samples},)"
                )
                continue
            with torch.no_grad():
                value, block = given[name], self.block
                own = value.to_local() if isinstance(value, DTensor) else value[block.start : block.stop]
                self.table(name).copy_(own)


def last_occurrence(ids: Tensor) -> Tensor:
    """For each position the last position that holds the same id, so that duplicates all write one value."""
    ordered, order = ids.sort(stable=True)
    return order[torch.searchsorted(ordered, ids, right=True) - 1]

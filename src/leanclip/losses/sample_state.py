"""Per-sample tables by id: the state that a loss keeps for each training sample.

The tables live on the compute device and are part of `state_dict`. Of several ranks each keeps one contiguous block
of ids; reading a batch's values is one all-reduce, and writing needs none, because every rank has all new values.
Nothing here waits for the device and nothing allocates more than a batch beside the tables themselves.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from leanclip.distributed import Ranks, full_tensor
from leanclip.errors import ArgumentError

SIDES = ("image", "text")
NO_SUMS: Mapping[str, Tensor] = MappingProxyType({})
Ids = tuple[Tensor, Tensor]  # of a global batch's images and texts; one tensor where they are the same


class Undo(NamedTuple):
    """The values that a write replaced."""

    visited: Tensor
    replaced: dict[str, tuple[Tensor, Tensor]]  # by table: positions and values


class SampleState(nn.Module):
    """Tables of one number per sample id, in pairs: `log_u_image` and `log_u_text` and so on; or one for both sides,
    by the ids of the texts. Those with `widths` have that many numbers per id.

    Writing replaces the batch's values and keeps the old ones, so that the last write can be undone. Of an id that
    occurs twice in a batch the last occurrence is stored, on any device.
    """

    visited: Tensor  # how many samples had a visit: their log u is a number instead of -inf

    def __init__(
        self, num_samples: int, initial: Mapping[str, float], widths: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        super().__init__()
        if num_samples < 1:
            raise ArgumentError(
                f"num_samples is {num_samples}; give the number of training samples", code="loss.bad_num_samples"
            )
        self.initial, self.widths, self.num_samples = dict(initial), dict(widths), num_samples
        self.ranks = Ranks.current()
        for name, value in initial.items():
            shape = self._shape(name, self._buffer_size(self.block))
            self.register_buffer(name, torch.full(shape, value), persistent=False)
        self.register_buffer("visited", torch.zeros((), dtype=torch.int64))
        self.undo: Undo | None = None

    @property
    def block(self) -> range:
        """The ids of this rank."""
        return self._block(self.num_samples)

    @property
    def id_dtype(self) -> torch.dtype:
        """The smallest integers that hold an id: the ids of every batch are sent."""
        return torch.int32 if self.num_samples < 2**31 else torch.int64

    def table(self, name: str) -> Tensor:
        """This rank's block of a table."""
        return self.get_buffer(name)[: len(self.block)]

    def mean(self, name: str) -> Tensor:
        """Over the samples of both sides. On several ranks all of them call it."""
        total = torch.stack([self.table(f"{name}_{side}").sum(dtype=torch.float64) for side in SIDES]).sum()
        return (self.ranks.sum(total, purpose="mean") / (2 * self.num_samples)).to(self.table(f"{name}_image").dtype)

    def check(self, ids: Tensor) -> None:
        """Refuse what are no ids of a batch, and ids on the host that lie outside the tables."""
        if Ranks.current().size != self.ranks.size:
            raise ArgumentError(
                f"the loss was created on {self.ranks.size} process(es) and is called on {Ranks.current().size};"
                " initialise torch.distributed before create_loss",
                code="loss.other_processes",
            )
        if ids.ndim != 1 or ids.dtype.is_floating_point or ids.dtype == torch.bool:
            raise ArgumentError(
                f"the third argument of the loss is a vector of integers, the sample ids, not {ids.dtype} of shape"
                f" {tuple(ids.shape)}; the loss has its own temperature: leave logit_scale out",
                code="loss.bad_ids",
            )
        if not len(ids) or ids.device.type != "cpu":
            return
        low, high = ids.aminmax()
        if low < 0 or high >= self.num_samples:
            raise ArgumentError(
                f"sample id {int(low if low < 0 else high)} lies outside [0, {self.num_samples});"
                " create the loss with a larger num_samples or call resize()",
                code="loss.bad_ids",
            )

    def assert_inside(self, ids: Tensor, valid: Tensor | None = None) -> None:
        """Fail on the device, without waiting for it, if ids there lie outside the tables."""
        if ids.device.type == "cpu" or not len(ids):
            return
        if valid is None:
            low, high = ids.aminmax()
            valid = (low >= 0) & (high < self.num_samples)
        torch.ops.aten._assert_async.msg(valid, f"a sample id lies outside [0, {self.num_samples})")

    def read(self, names: Sequence[str], ids: Ids) -> dict[str, Tensor]:
        """(2, B) per name: the image table at the first ids, the text table at the second; (B,) for one table, or
        (B, width). One all-reduce for all."""
        local = self.read_local(names, ids)
        if self.ranks.size == 1:
            return local
        in_block = torch.stack([at < len(self.block) for at in self._positions(ids)])
        masked = {}
        for name, value in local.items():
            inside = in_block[1] if name in self.initial else in_block
            masked[name] = torch.where(inside[:, None] if name in self.widths else inside, value, 0.0).flatten()
        total = self.ranks.sum(torch.cat(list(masked.values())), purpose="state")
        parts = total.split([len(value) for value in masked.values()])
        return {name: part.view_as(local[name]) for name, part in zip(masked, parts, strict=True)}

    def read_local(self, names: Sequence[str], ids: Ids) -> dict[str, Tensor]:
        """The same without the all-reduce: the values of other ranks' ids are arbitrary."""
        positions = self._positions(ids)
        values = {
            name: torch.stack([self.get_buffer(table)[positions[side]] for table, side in self._tables(name)])
            for name in names
        }
        return {name: value[0] if name in self.initial else value for name, value in values.items()}

    def write(
        self, ids: Ids, values: Mapping[str, Tensor], *, first_visits: Tensor, sums: Mapping[str, Tensor] = NO_SUMS
    ) -> None:
        """Store (2, B) values per table pair, all tables of one step in one call; each rank stores its own block.
        One table takes what `read` gives.

        `first_visits` (B,) is true for samples without an earlier visit. `sums` are added to buffers of those names.
        """
        last = _both_sides(last_occurrence, ids)
        once = last[0] == torch.arange(len(last[0]), device=last[0].device)
        self.undo = Undo(self.visited.clone(), {})
        self.visited += (first_visits & once).sum()
        positions = self._positions(ids)
        for name, value in values.items():
            parts = [value] if name in self.initial else value
            for (table_name, side), part in zip(self._tables(name), parts, strict=True):
                table, at = self.get_buffer(table_name), positions[side]
                self.undo.replaced[table_name] = at, table[at]
                table[at] = part.to(table.dtype)[last[side]]
        for name, added in sums.items():
            buffer = self.get_buffer(name)
            self.undo.replaced[name] = torch.arange(len(buffer), device=buffer.device), buffer.clone()
            buffer += added

    def remember(self, visited: Tensor, positions: Tensor, log_u: Tensor) -> None:
        """What a kernel replaced, which has written the estimates of one process itself."""
        self.undo = Undo(visited, {f"log_u_{side}": (positions, old) for side, old in zip(SIDES, log_u, strict=True)})

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
            raise ArgumentError(
                f"resize to {num_samples} would drop samples: the tables hold {self.num_samples}",
                code="loss.bad_num_samples",
            )
        block = self._block(num_samples)
        for name, value in self.initial.items():
            old = full_tensor(self._distributed(name))[block.start : block.stop]
            grown = old.new_full(self._shape(name, self._buffer_size(block)), value)
            grown[: len(old)] = old
            setattr(self, name, grown)
        self.num_samples, self.undo = num_samples, None

    def _block(self, num_samples: int) -> range:
        """Split as torch splits a DTensor."""
        width = -(-num_samples // self.ranks.size)
        start = min(self.ranks.rank * width, num_samples)
        return range(start, min(start + width, num_samples))

    def _shape(self, name: str, rows: int) -> torch.Size:
        return torch.Size((rows, self.widths[name]) if name in self.widths else (rows,))

    def _buffer_size(self, block: range) -> int:
        """The block, and on several ranks one spare element, to which the values of other ranks' ids are written."""
        return len(block) + (self.ranks.size > 1)

    def _positions(self, ids: Ids) -> Ids:
        """The positions of ids in this rank's buffers; those of other ranks are in the spare last element."""
        block = self.block
        if self.ranks.size == 1:
            return ids
        return _both_sides(
            lambda at: torch.where((at >= block.start) & (at < block.stop), at - block.start, len(block)), ids
        )

    def _tables(self, name: str) -> list[tuple[str, int]]:
        """The tables of a name, each with the side whose ids it has."""
        return [(name, 1)] if name in self.initial else [(f"{name}_{side}", i) for i, side in enumerate(SIDES)]

    def _distributed(self, name: str) -> Tensor:
        """A table in the form of torch's checkpointing: by id, each rank with its block."""
        table = self.table(name)
        if self.ranks.size == 1:
            return table
        mesh, shape = self.ranks.mesh(table.device.type), self._shape(name, self.num_samples)
        return DTensor.from_local(table, mesh, [Shard(0)], run_check=False, shape=shape, stride=table.stride())

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
        """A table is loaded as a whole, or split over the ranks as ours is."""
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        for name in self.initial:
            key = prefix + name
            if key in unexpected_keys:
                unexpected_keys.remove(key)
            if key not in state_dict:
                missing_keys.append(key)
            elif (value := state_dict[key]).shape != (shape := self._shape(name, self.num_samples)):
                error_msgs.append(f"{key} holds {tuple(value.shape)} numbers, not {tuple(shape)}")
            else:
                block = self.block
                local = value.to_local() if isinstance(value, DTensor) else value[block.start : block.stop]
                with torch.no_grad():
                    self.table(name).copy_(local)


def last_occurrence(ids: Tensor) -> Tensor:
    """For each position the last position that holds the same id, so that duplicates all write one value."""
    ordered, order = ids.sort(stable=True)
    return order[torch.searchsorted(ordered, ids, right=True) - 1]


def _both_sides(function: Callable[[Tensor], Tensor], ids: Ids) -> Ids:
    """Of the image ids and of the text ids, computed once where they are one tensor."""
    image = function(ids[0])
    return image, image if ids[1] is ids[0] else function(ids[1])

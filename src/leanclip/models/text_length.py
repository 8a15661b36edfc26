"""Texts at their true length: the tokens up to each end token, packed one text after the other without padding.

Exact for a causal text tower that is pooled at the end token: no later token can affect the embedding.
`padding_reason` gives the reason why another tower runs on padded texts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from leanclip.ops.attention import SHORT_LENGTH, Packing, tile_begins

STEPS, FEWER = 16, 4  # sizes of a packed batch in each doubling: compiled code is specialised on few of them
MOST_BUCKETS = 4  # of texts of similar length, for towers that mask the padding
SAVED_ON_CPU, SAVED_ON_GPU = 256, 8192  # tokens of padding; a bucket costs the launches of the tower's kernels
MANY = 8192  # tokens: above this the total varies so little by chance that STEPS suffice, at 3% of padding


@dataclass(frozen=True)
class EndOfText:
    """The token at which a text tower is pooled. Pickled into the loader's workers."""

    eos: int | None  # the end token; None: the largest token of a text

    def __call__(self, tokens: Tensor) -> Tensor:
        """The lengths of padded texts (B, L), end tokens included."""
        marks = tokens if self.eos is None else (tokens == self.eos).int()
        return marks.argmax(-1) + 1


@dataclass(frozen=True)
class Texts:
    """Packed texts. Not a tuple or a tensor, so that DDP and FSDP pass it on unchanged."""

    tokens: Tensor  # (T,)
    ends: Tensor  # (B,) the position of each end token among all tokens
    packing: Packing

    def __len__(self) -> int:
        return len(self.ends)

    @classmethod
    def pack(cls, tokens: Tensor, lengths: Tensor, *, few_sizes: bool = False) -> "Texts":
        """Padded tokens (B, L) whose lengths are on the host, without a synchronisation with the device."""
        places = layout(lengths, width=tokens.shape[1], few_sizes=few_sizes)
        if tokens.device.type == "cuda":
            places = replace(places, table=places.table.pin_memory().to(tokens.device, non_blocking=True))
        return cls.at(tokens, places)

    @classmethod
    def at(cls, tokens: Tensor, places: "Layout") -> "Texts":
        begins, ends = places.table[0], places.table[1, 1:]
        count = torch.arange(len(tokens), device=tokens.device)
        rows = torch.repeat_interleave(count, begins.diff(), output_size=places.size)
        positions = torch.arange(places.size, device=tokens.device) - begins[rows]
        offsets = begins.int()
        tiles = tile_begins(offsets, tokens=places.size, longest=places.longest)
        packing = Packing(offsets, rows, positions, places.longest, tiles)
        return cls(tokens[rows, positions], ends, packing)


@dataclass(frozen=True)
class Buckets:
    """Padded texts by length, for a tower that masks the padding. Each bucket is as wide as its longest text."""

    parts: tuple[Tensor, ...]  # (b, L) each
    places: Tensor  # (B,) of each text among the rows of all parts

    def __len__(self) -> int:
        return len(self.places)

    @classmethod
    def split(cls, tokens: Tensor, lengths: Tensor, rows: Sequence[Tensor]) -> "Buckets":
        """Padded tokens (B, L), by the rows of each bucket; lengths and rows are on the host."""
        parts = tuple(tokens[bucket.to(tokens.device), : int(lengths[bucket].max())] for bucket in rows)
        return cls(parts, torch.cat(list(rows)).argsort().to(tokens.device, non_blocking=True))

    def embedded(self, tower: Callable[[Tensor], Tensor]) -> Tensor:
        """The embeddings of all texts, in their order."""
        return torch.cat([tower(part) for part in self.parts]).index_select(0, self.places)


def by_length(lengths: Tensor, *, least: int) -> list[Tensor]:
    """The rows of texts by length, in as few buckets as it pays: each further one saves so many tokens of padding."""
    buckets = [lengths.argsort()]
    while len(buckets) < MOST_BUCKETS:
        saved = [(lengths[rows[-1]] - lengths[rows]) * torch.arange(1, len(rows) + 1) for rows in buckets]
        number = max(range(len(buckets)), key=lambda number: int(saved[number].max()))
        if int(saved[number].max()) < least:
            break
        cut = int(saved[number].argmax()) + 1
        buckets[number : number + 1] = buckets[number][:cut], buckets[number][cut:]
    return buckets


@dataclass(frozen=True)
class Layout:
    table: Tensor  # (2, B + 1): the begin of each text and the end of the last; 0 and the position of each end token
    size: int  # tokens in total
    longest: int  # an upper bound of the lengths


def layout(lengths: Tensor, *, width: int, few_sizes: bool) -> Layout:
    """The layout of texts whose lengths are on the host.

    With `few_sizes` the number of tokens is rounded up: texts keep some of their padding, which changes nothing after
    their end, and `longest` is one of two values.
    """
    kept, size = lengths, int(lengths.sum())
    if few_sizes:
        size = min(rounded(size), width * len(lengths))
        while more := size - int(kept.sum()):
            spare = (width - kept).clamp(max=-(-more // len(kept)))
            kept = kept + torch.minimum((more - (spare.cumsum(0) - spare)).clamp(min=0), spare)
    longest = min(-(-int(kept.max()) // 8) * 8, width)
    if few_sizes:
        longest = min(SHORT_LENGTH, width) if longest <= SHORT_LENGTH else width
    table = torch.zeros(2, len(lengths) + 1, dtype=torch.int64)
    table[0, 1:] = kept.cumsum(0)
    table[1, 1:] = table[0, :-1] + lengths - 1
    return Layout(table, size, longest)


def rounded(total: int) -> int:
    """The next larger of a few sizes in each doubling."""
    step = max(1, (1 << (total.bit_length() - 1)) // (STEPS if total >= MANY else FEWER))
    return -(-total // step) * step


def text_tower(clip: Any) -> Any:
    """The module with the text tower's parts: open_clip's CLIP itself, or its `text` in the other model classes."""
    return getattr(clip, "text", clip)


def pooling(clip: Any) -> EndOfText:
    return EndOfText(None if _pool_setting(clip, "pool_type") == "argmax" else _pool_setting(clip, "eos_id"))


def _pool_setting(clip: Any, name: str) -> Any:
    return getattr(text_tower(clip), name if hasattr(clip, "text") else f"text_{name}", None)


def padding_reason(clip: Any) -> str | None:
    """Why a text tower cannot run at true length; None if it can."""
    tower, pool_type = text_tower(clip), _pool_setting(clip, "pool_type")
    has_blocks = hasattr(getattr(tower, "transformer", None), "resblocks") and hasattr(tower, "attn_mask")
    reasons = {
        "is not one of open_clip's own transformers": not has_blocks,
        "has its class token after the padding": getattr(tower, "cls_emb", None) is not None,
        "is not causal: its tokens attend to the padding after them": getattr(tower, "attn_mask", None) is None,
        f"is not pooled at the end token, but by pooling {pool_type!r}": pool_type not in ("argmax", "eos"),
        "returns all its tokens": getattr(tower, "output_tokens", False),
    }
    return next((f"the text tower {reason}" for reason, applies in reasons.items() if applies), None)

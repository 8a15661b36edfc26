"""Texts at their true length: the tokens up to each end token, one text after the other, without padding between.

Exact for a causal text tower that is pooled at the end token: nothing behind that token can reach the embedding.
`padded_because` says why another tower runs on padded texts.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from leanclip.ops.attention import FEW, Packing, tile_begins

STEPS, FEWER = 16, 4  # sizes of a packed batch from one power of two to the next: compiled code meets few of them
MANY = 8192  # tokens: from here on chance moves the total so little that STEPS are few, at 3% of padding


@dataclass(frozen=True)
class EndOfText:
    """Where a tower pools: behind nothing of a text is read. Pickled into the loader's workers."""

    eos: int | None  # the end token's number; without one it is the largest of a text

    def __call__(self, tokens: Tensor) -> Tensor:
        """The lengths of padded texts (B, L), end tokens included."""
        marks = tokens if self.eos is None else (tokens == self.eos).int()
        return marks.argmax(-1) + 1


@dataclass(frozen=True)
class Texts:
    """Texts behind each other. A class of its own, so that DDP and FSDP hand it on as it is."""

    tokens: Tensor  # (T,)
    ends: Tensor  # (B,) where each end token is among all tokens
    packing: Packing

    def __len__(self) -> int:
        return len(self.ends)

    @classmethod
    def pack(cls, tokens: Tensor, lengths: Tensor, *, few_sizes: bool = False) -> "Texts":
        """Padded tokens (B, L) whose lengths are known on the host, so that nothing waits for the device."""
        places = layout(lengths, width=tokens.shape[1], few_sizes=few_sizes)
        if tokens.device.type == "cuda":
            places = replace(places, table=places.table.pin_memory().to(tokens.device, non_blocking=True))
        return cls.at(tokens, places)

    @classmethod
    def at(cls, tokens: Tensor, places: "Layout") -> "Texts":
        """The texts at the places that `layout` gave them."""
        begins, ends = places.table[0], places.table[1, 1:]
        count = torch.arange(len(tokens), device=tokens.device)
        rows = torch.repeat_interleave(count, begins.diff(), output_size=places.size)
        positions = torch.arange(places.size, device=tokens.device) - begins[rows]
        offsets = begins.int()
        tiles = tile_begins(offsets, tokens=places.size, longest=places.longest)
        packing = Packing(offsets, rows, positions, places.longest, tiles)
        return cls(tokens[rows, positions], ends, packing)


@dataclass(frozen=True)
class Layout:
    """Where texts lie behind each other."""

    table: Tensor  # (2, B + 1): where each begins, with the end of the last; behind a zero, each end token
    size: int  # tokens in all
    longest: int  # at least the length of the longest


def layout(lengths: Tensor, *, width: int, few_sizes: bool) -> Layout:
    """The places of texts whose lengths are known on the host.

    With `few_sizes` the number of tokens is rounded up: texts keep some of their padding, which, behind their end,
    changes nothing. And they count as short or as long as the context, nothing between.
    """
    kept, size = lengths, int(lengths.sum())
    if few_sizes:
        size = min(rounded(size), width * len(lengths))
        while more := size - int(kept.sum()):
            spare = (width - kept).clamp(max=-(-more // len(kept)))
            kept = kept + torch.minimum((more - (spare.cumsum(0) - spare)).clamp(min=0), spare)
    longest = min(-(-int(kept.max()) // 8) * 8, width)
    if few_sizes:
        longest = min(FEW, width) if longest <= FEW else width
    table = torch.zeros(2, len(lengths) + 1, dtype=torch.int64)
    table[0, 1:] = kept.cumsum(0)
    table[1, 1:] = table[0, :-1] + lengths - 1
    return Layout(table, size, longest)


def rounded(total: int) -> int:
    """Up to the next of a few sizes in each doubling."""
    step = max(1, (1 << (total.bit_length() - 1)) // (STEPS if total >= MANY else FEWER))
    return -(-total // step) * step


def text_tower(clip: Any) -> Any:
    """open_clip's CLIP holds its text tower's parts itself; its other models have a tower of their own."""
    return getattr(clip, "text", clip)


def pooling(clip: Any) -> EndOfText:
    tower = text_tower(clip)
    own = tower is not clip
    kind = tower.pool_type if own else tower.text_pool_type
    return EndOfText(None if kind == "argmax" else tower.eos_id if own else tower.text_eos_id)


def padded_because(clip: Any) -> str | None:
    """Why a text tower cannot run at true length; None if it can."""
    tower = text_tower(clip)
    if not hasattr(getattr(tower, "transformer", None), "resblocks") or not hasattr(tower, "attn_mask"):
        return "the text tower is not one of open_clip's own transformers"
    if getattr(tower, "cls_emb", None) is not None:
        return "the text tower reads its class token behind the padding"
    if tower.attn_mask is None:
        return "the text tower is not causal: its tokens see the padding behind them"
    kind = tower.pool_type if tower is not clip else tower.text_pool_type
    if kind not in ("argmax", "eos"):
        return f"the text tower is not read at the end token, but by pooling {kind!r}"
    if getattr(tower, "output_tokens", False):
        return "the text tower gives all its tokens"
    return None

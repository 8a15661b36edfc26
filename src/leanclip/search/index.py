"""Nearest vectors. Exact: products in float16 choose the candidates, products in float32 decide."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch

from leanclip.search.approximate import ApproximateIndex, load_or_build
from leanclip.search.store import EmbeddingStore

# A product in float16 is off by less: both factors and the result are rounded by 2^-11 at most.
ROUNDING = 2e-3
LARGEST_EXACT = 1_000_000  # vectors; above it a query would take more than some tenths of a second
ROWS_AT_ONCE = 1 << 18


class Nearest(NamedTuple):
    ids: np.ndarray  # (k,) int64, the nearest first
    scores: np.ndarray  # (k,) float32


class Index(Protocol):
    approximate: bool

    def nearest(self, query: np.ndarray, count: int, span: tuple[int, int] | None = None) -> Nearest:
        """The vectors with the largest products with the query, of all or of a range of ids."""
        ...


class ExactIndex:
    """Every vector is compared, in memory. `usable` marks those that exist."""

    approximate = False

    def __init__(self, features: np.ndarray, usable: np.ndarray) -> None:
        self.features = torch.from_numpy(np.array(features))  # a copy: a mapped file may be on a slow disk
        self.unusable = None if usable.all() else torch.from_numpy(~usable)

    def nearest(self, query: np.ndarray, count: int, span: tuple[int, int] | None = None) -> Nearest:
        start, stop = span or (0, len(self.features))
        features = self.features[start:stop]
        exact = torch.from_numpy(np.asarray(query, np.float32))
        scores = (features @ exact.half()).float()
        if self.unusable is not None:
            scores[self.unusable[start:stop]] = -torch.inf
        count = min(count, int((scores > -torch.inf).sum()))
        if not count:
            return Nearest(np.empty(0, np.int64), np.empty(0, np.float32))
        least = scores.topk(count).values[-1]
        candidates = torch.nonzero(scores >= least - 2 * ROUNDING)[:, 0]
        parts = [features[part].float() @ exact for part in candidates.split(ROWS_AT_ONCE)]
        return best(candidates.numpy() + start, torch.cat(parts).numpy(), count)


class LargeIndex:
    """An approximate index for all vectors; a range of ids is compared exactly, from the mapped file."""

    approximate = True

    def __init__(self, features: np.ndarray, usable: np.ndarray, whole: ApproximateIndex) -> None:
        self.features, self.usable, self.whole = features, usable, whole

    def nearest(self, query: np.ndarray, count: int, span: tuple[int, int] | None = None) -> Nearest:
        if span is None:
            ids = self.whole.candidates(query, count)
            return best(ids, self.features[ids].astype(np.float32) @ np.asarray(query, np.float32), count)
        found = [Nearest(np.empty(0, np.int64), np.empty(0, np.float32))]
        for start in range(*span, ROWS_AT_ONCE):
            stop = min(start + ROWS_AT_ONCE, span[1])
            part = ExactIndex(self.features[start:stop], self.usable[start:stop]).nearest(query, count)
            found.append(Nearest(part.ids + start, part.scores))
        return best(np.concatenate([f.ids for f in found]), np.concatenate([f.scores for f in found]), count)


def best(ids: np.ndarray, scores: np.ndarray, count: int) -> Nearest:
    """The largest scores; of equal ones the first id."""
    order = np.lexsort((ids, -scores))[:count]
    return Nearest(ids[order].astype(np.int64), scores[order])


def open_index(
    store: EmbeddingStore, *, largest_exact: int = LARGEST_EXACT, notify: Callable[[str], object] = print
) -> ExactIndex | LargeIndex:
    """The index of the images of a store. An approximate one is built once and kept beside them."""
    table, usable = store.tables["images"], store.usable("images")
    if store.samples <= largest_exact:
        return ExactIndex(table.features, usable)
    identity = {"samples": store.samples, "usable": int(usable.sum()), "model": store.facts["model"]["digest"]}
    whole = load_or_build(Path(table.directory), table.features, usable, identity, notify)
    return LargeIndex(table.features, usable, whole)

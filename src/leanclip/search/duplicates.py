"""Pairs of images whose vectors are almost equal, found in a thread while the page shows the progress."""

import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch

from leanclip.errors import UserError, first_line
from leanclip.search.index import ExactIndex, LargeIndex

LARGEST_COMPARED = 50_000  # images of which all pairs are compared; more need the approximate index
ROWS_AT_ONCE = 1024
NEIGHBOURS = 8  # of each image that are looked at in an approximate index
MOST_PAIRS = 20_000


@dataclass
class PairSearch:
    """Pairs with a score of at least `threshold`, the best first. `done` is a share; `error` says why it ended."""

    threshold: float
    done: float = 0.0
    finished: bool = False
    error: str | None = None
    pairs: np.ndarray = field(default_factory=lambda: np.empty((0, 2), np.int64))
    scores: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))
    stop: threading.Event = field(default_factory=threading.Event)
    asking: AbstractContextManager[object] = field(default_factory=nullcontext)  # the lock of an approximate index

    def run(self, index: ExactIndex | LargeIndex, usable: np.ndarray) -> None:
        try:
            if isinstance(index, ExactIndex):
                self._compare_all(index, np.flatnonzero(usable))
            else:
                self._ask_index(index, np.flatnonzero(usable))
        except UserError as error:
            self.error = str(error)
        except Exception as error:  # the page would wait for a thread that has ended
            self.error = f"the images could not be compared ({first_line(error)})"
        finally:
            self.finished = not self.stop.is_set()

    def count(self, threshold: float) -> int:
        """How many of the pairs so far have this score, which may be larger than `self.threshold`."""
        return int(np.count_nonzero(self.scores >= np.float32(threshold)))

    def _compare_all(self, index: ExactIndex, ids: np.ndarray) -> None:
        if len(ids) > LARGEST_COMPARED:
            raise UserError(
                f"{len(ids):,} images have too many pairs to compare all; open the embeddings with"
                f" --exact-up-to {LARGEST_COMPARED}, which uses the approximate index",
                code="search.too_many_pairs",
            )
        features = index.features[torch.from_numpy(ids)].float()
        for start in range(0, len(ids), ROWS_AT_ONCE):
            if self.stop.is_set():
                return
            scores = features[start : start + ROWS_AT_ONCE] @ features[start:].T
            rows, columns = torch.nonzero((scores >= self.threshold).triu(1), as_tuple=True)
            pairs = np.stack([ids[start + rows.numpy()], ids[start + columns.numpy()]], axis=1)
            self._add(pairs, scores[rows, columns].numpy())
            self.done = min(1.0, (start + ROWS_AT_ONCE) / len(ids))

    def _ask_index(self, index: LargeIndex, ids: np.ndarray) -> None:
        for start in range(0, len(ids), ROWS_AT_ONCE):
            if self.stop.is_set():
                return
            part = ids[start : start + ROWS_AT_ONCE]
            queries = np.asarray(index.features[part], np.float32)
            with self.asking:
                found = index.whole.neighbours(queries, NEIGHBOURS)
            scores = np.einsum("qd,qkd->qk", queries, np.asarray(index.features[found], np.float32))
            pairs = np.stack([np.repeat(part, found.shape[1]), found.ravel()], axis=1)
            kept = (scores.ravel() >= self.threshold) & (pairs[:, 0] != pairs[:, 1]) & (pairs[:, 1] >= 0)
            self._add(np.sort(pairs[kept], axis=1), scores.ravel()[kept])
            self.done = (start + len(part)) / len(ids)

    def _add(self, pairs: np.ndarray, scores: np.ndarray) -> None:
        """Each pair once, the best ones; the lists are replaced, because another thread reads them."""
        pairs, first = np.unique(np.concatenate([self.pairs, pairs]), axis=0, return_index=True)
        scores = np.concatenate([self.scores, scores])[first]
        order = np.lexsort((pairs[:, 1], pairs[:, 0], -scores))[:MOST_PAIRS]
        self.pairs, self.scores = pairs[order], scores[order]

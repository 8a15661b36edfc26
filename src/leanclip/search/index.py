"""Nearest vectors. Exact: products in float16 choose the candidates, products in float32 decide.

Of many vectors a graph chooses the candidates, which is built once and mapped. Only this module imports usearch.
"""

import json
import os
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from leanclip.errors import UserError, first_line
from leanclip.filesystem import atomic_path, parse_json, write_atomically
from leanclip.progress import progress_bar
from leanclip.search.store import EmbeddingStore

GRAPH, FACTS = "index.usearch", "index.json"
CONNECTIVITY, EXPANSION_ADD, EXPANSION_SEARCH = 16, 64, 512  # of the graph; the last two trade time for recall
# A graph of 8-bit vectors takes half the memory and is built in less than half the time. It finds candidates, more
# than are asked for; the caller compares these exactly.
DTYPE, CANDIDATES, FEWEST = "i8", 4, 64
GRAPH_BYTES = 160  # of memory for each vector, beside its D bytes
ADDED_AT_ONCE = 10_000
READ_AT_ONCE = 16 << 20  # bytes


class ApproximateIndex:
    def __init__(self, graph: Any) -> None:
        self.graph = graph

    def candidates(self, query: np.ndarray, count: int) -> np.ndarray:
        """The ids of vectors near a query, several times as many as `count`; some of the nearest may be missing."""
        wanted = max(CANDIDATES * count, FEWEST)
        return np.asarray(self.graph.search(np.asarray(query, np.float16), wanted).keys, np.int64)

    def neighbours(self, queries: np.ndarray, count: int) -> np.ndarray:
        """Ids near many queries at once, (q, count); -1 where there are fewer."""
        found = self.graph.search(np.asarray(queries, np.float16), count, threads=os.cpu_count() or 1)
        ids = np.asarray(found.keys).astype(np.int64)
        ids[np.arange(ids.shape[1]) >= np.asarray(found.counts)[:, None]] = -1
        return ids


def load_or_build(
    directory: Path,
    features: np.ndarray,
    usable: np.ndarray,
    identity: dict[str, Any],
    notify: Callable[[str], object] = print,
) -> ApproximateIndex:
    """The index in a directory if it was built from the same vectors, else a new one, whose cost `notify` gets."""
    path, facts = directory / GRAPH, directory / FACTS
    dim, identity = features.shape[1], identity | {"graph": [DTYPE, CONNECTIVITY, EXPANSION_ADD]}
    try:
        if parse_json(facts.read_bytes()) == identity | {"checksum": _checksum(path)}:
            return _mapped(path, dim)
    except (OSError, ValueError, RuntimeError):
        pass  # there is none, or it is damaged
    graph, count, began = _graph(dim), int(usable.sum()), time.perf_counter()
    memory = count * (dim + GRAPH_BYTES) / 2**30
    notify(f"building an index of {count:,} vectors once, with about {memory:.3g} GiB of memory")
    facts.unlink(missing_ok=True)
    with progress_bar("building the index", len(features)) as advance:
        for start in range(0, len(features), ADDED_AT_ONCE):
            ids = start + np.flatnonzero(usable[start : start + ADDED_AT_ONCE])
            graph.add(ids, np.asarray(features[ids]), threads=os.cpu_count() or 1)
            advance(min(ADDED_AT_ONCE, len(features) - start))
    try:
        with atomic_path(path) as temporary:
            graph.save(str(temporary))
        write_atomically(facts, json.dumps(identity | {"checksum": _checksum(path)}))
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"cannot write {path} ({first_line(error)}); make room, or copy the embeddings elsewhere",
            code="search.not_writable",
        ) from error
    minutes, used, size = (time.perf_counter() - began) / 60, graph.memory_usage / 2**30, path.stat().st_size / 2**30
    notify(f"built in {minutes:.1f} min with {used:.3g} GiB of memory; {path} has {size:.3g} GiB")
    return _mapped(path, dim)


def _checksum(path: Path) -> int:
    """A damaged graph ends the process: usearch follows every number in it."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(READ_AT_ONCE):
            value = zlib.crc32(block, value)
    return value


def _mapped(path: Path, dim: int) -> ApproximateIndex:
    graph = _graph(dim)
    graph.view(str(path))  # pages are read as they are needed
    return ApproximateIndex(graph)


def _graph(dim: int) -> Any:
    try:
        from usearch.index import Index
    except ImportError as error:
        raise UserError(
            "so many vectors need an approximate index: pip install 'leanclip[search]'", code="install.search"
        ) from error
    return Index(
        ndim=dim,
        metric="ip",
        dtype=DTYPE,
        connectivity=CONNECTIVITY,
        expansion_add=EXPANSION_ADD,
        expansion_search=EXPANSION_SEARCH,
    )


# A product in float16 is off by less: both factors and the result are rounded by 2^-11 at most.
ROUNDING = 2e-3
LARGEST_EXACT = 1_000_000  # vectors; above it a query would take more than some tenths of a second
ROWS_AT_ONCE = 1 << 18


class Nearest(NamedTuple):
    ids: np.ndarray  # (k,) int64, the nearest first
    scores: np.ndarray  # (k,) float32


class ExactIndex:
    """Every vector is compared, in memory. `usable` marks those that exist."""

    approximate = False

    def __init__(self, features: np.ndarray, usable: np.ndarray) -> None:
        self.features = torch.from_numpy(np.array(features))  # a copy: a mapped file may be on a slow disk
        self.unusable = None if usable.all() else torch.from_numpy(~usable)

    def nearest(self, query: np.ndarray, count: int, span: tuple[int, int] | None = None) -> Nearest:
        """The vectors with the largest products with the query, of all or of a range of ids."""
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

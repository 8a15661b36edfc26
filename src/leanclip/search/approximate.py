"""An approximate index of many vectors: a graph of usearch, built once and mapped. Only this module imports it."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from leanclip.errors import UserError, first_line
from leanclip.filesystem import atomic_path, write_atomically
from leanclip.progress import progress_bar

INDEX, FACTS = "index.usearch", "index.json"
CONNECTIVITY, EXPANSION_ADD, EXPANSION_SEARCH = 16, 128, 256  # of the graph; the last two trade time for recall
ADDED_AT_ONCE = 10_000


class ApproximateIndex:
    def __init__(self, graph: Any) -> None:
        self.graph = graph

    def candidates(self, query: np.ndarray, count: int) -> np.ndarray:
        """The ids of vectors near a query; some of the nearest may be missing."""
        return np.asarray(self.graph.search(np.asarray(query, np.float16), count).keys, np.int64)

    def neighbours(self, queries: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids and scores, (q, count) each, of many queries at once."""
        found = self.graph.search(np.asarray(queries, np.float16), count, threads=os.cpu_count() or 1)
        return np.asarray(found.keys, np.int64), 1 - np.asarray(found.distances, np.float32)


def load_or_build(
    directory: Path, features: np.ndarray, usable: np.ndarray, identity: dict[str, Any]
) -> ApproximateIndex:
    """The index in a directory if it was built from the same vectors, else a new one."""
    path, facts = directory / INDEX, directory / FACTS
    try:
        if json.loads(facts.read_text()) == identity:
            graph = _graph(features.shape[1])
            graph.view(str(path))  # mapped: pages are read as they are needed
            return ApproximateIndex(graph)
    except (OSError, ValueError, RuntimeError):
        pass  # there is none, or it is damaged
    graph = _graph(features.shape[1])
    facts.unlink(missing_ok=True)
    with progress_bar("building the index", len(features)) as advance:
        for start in range(0, len(features), ADDED_AT_ONCE):
            ids = start + np.flatnonzero(usable[start : start + ADDED_AT_ONCE])
            graph.add(ids, np.asarray(features[ids]), threads=os.cpu_count() or 1)
            advance(min(ADDED_AT_ONCE, len(features) - start))
    try:
        with atomic_path(path) as temporary:
            graph.save(str(temporary))
        write_atomically(facts, json.dumps(identity))
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"cannot write {path} ({first_line(error)}); make room, or copy the embeddings elsewhere",
            code="search.not_writable",
        ) from error
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
        dtype="f16",
        connectivity=CONNECTIVITY,
        expansion_add=EXPANSION_ADD,
        expansion_search=EXPANSION_SEARCH,
    )

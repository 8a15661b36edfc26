"""An approximate index of many vectors: a graph of usearch, built once and mapped. Only this module imports it."""

import json
import os
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from leanclip.errors import UserError, first_line
from leanclip.filesystem import atomic_path, parse_json, write_atomically
from leanclip.progress import progress_bar

INDEX, FACTS = "index.usearch", "index.json"
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
    path, facts = directory / INDEX, directory / FACTS
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

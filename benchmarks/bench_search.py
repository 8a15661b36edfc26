"""Search on a CPU: exact search in memory, and the approximate index.

    python benchmarks/bench_search.py                  # 1 million x 512; 10 minutes on 2 cores
    python benchmarks/bench_search.py --index DIR      # keeps the index there; the next run only asks it
    python benchmarks/bench_search.py --quick          # smoke run

The vectors lie in clusters of 100. Times of a query are those after the first: wall-clock, which depends on the load
of the machine, and CPU time of all threads, which hardly does. Rows go to results/search.csv.
"""

import json
import math
import os
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from evidence.command_line import Flag, command_line
from evidence.measurements import append
from torch.nn.functional import normalize

import leanclip
from leanclip.search.index import GRAPH, ApproximateIndex, ExactIndex, LargeIndex, load_or_build

RESULTS = Path(__file__).parent / "results" / "search.csv"
DIM, PER_CLUSTER, SPREAD = 512, 100, 0.65  # members of a cluster have a cosine of about 0.7
AT_ONCE, MANY, NEAREST = 50_000, 100_000_000, 10
FIELDS = (
    "what", "vectors", "dim", "median_ms", "least_ms", "largest_ms", "cpu_ms", "load", "gib", "recall_at_10",
    "build_seconds", "build_cpu_seconds", "build_gib", "build_load",
)  # fmt: skip


def clustered(count: int, centres: torch.Tensor, seed: int) -> np.ndarray:
    """Unit vectors around centres, in float16."""
    rows, generator = np.empty((count, DIM), np.float16), torch.Generator().manual_seed(seed)
    for start in range(0, count, AT_ONCE):
        size = min(AT_ONCE, count - start)
        chosen = centres[torch.randint(len(centres), (size,), generator=generator)]
        noise = torch.randn(size, DIM, generator=generator) / DIM**0.5
        rows[start : start + size] = normalize(chosen + SPREAD * noise, dim=1).half().numpy()
    return rows


def timed(index: ExactIndex | LargeIndex, queries: np.ndarray) -> tuple[dict[str, float], list[np.ndarray]]:
    """Milliseconds of a query after the first, and the ids that each one finds."""
    wall, cpu, ids = [], [], []
    index.nearest(queries[0], NEAREST)
    for query in queries:
        began, began_cpu = time.perf_counter(), time.process_time()
        ids.append(index.nearest(query, NEAREST).ids)
        wall.append(1e3 * (time.perf_counter() - began))
        cpu.append(1e3 * (time.process_time() - began_cpu))
    times = {
        "median_ms": statistics.median(wall), "least_ms": min(wall), "largest_ms": max(wall),
        "cpu_ms": statistics.median(cpu), "load": os.getloadavg()[0],
    }  # fmt: skip
    return times, ids


def built(directory: Path, features: np.ndarray, usable: np.ndarray) -> tuple[ApproximateIndex, dict[str, float]]:
    """The index in a directory and what it took to build it, then or now."""
    record, identity = directory / "build.json", {"vectors": len(features)}
    if not record.is_file():
        peak, began, cpu = peak_gib(), time.perf_counter(), time.process_time()
        load_or_build(directory, features, usable, identity)
        cost = {
            "build_seconds": time.perf_counter() - began, "build_cpu_seconds": time.process_time() - cpu,
            "build_gib": peak_gib() - peak, "build_load": os.getloadavg()[0],
        }  # fmt: skip
        record.write_text(json.dumps(cost))
    return load_or_build(directory, features, usable, identity), json.loads(record.read_text())


def peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def search_rows(count: int, queries: int, directory: Path) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    centres = normalize(torch.randn(max(1, count // PER_CLUSTER), DIM), dim=1)
    features, asked = clustered(count, centres, 1), clustered(queries, centres, 2).astype(np.float32)
    usable = np.ones(count, bool)
    whole, cost = built(directory, features, usable)
    times, right = timed(ExactIndex(features, usable), asked)
    rows = [{"what": "exact", "vectors": count, "dim": DIM, **times, "gib": features.nbytes / 2**30}]
    print(rows, flush=True)
    times, found = timed(LargeIndex(features, usable, whole), asked)
    hits = sum(len(np.intersect1d(*both)) for both in zip(found, right, strict=True))
    rows.append({
        "what": "approximate", "vectors": count, "dim": DIM, **times,
        "gib": (directory / GRAPH).stat().st_size / 2**30,
        "recall_at_10": hits / (NEAREST * queries), **cost,
    })  # fmt: skip
    return rows


def main() -> None:
    arguments = command_line(
        __doc__, quick={"vectors": 3000, "queries": 20}, vectors=1_000_000, queries=100,
        index=Flag(None, "the directory of the index", kind=Path), output=RESULTS,
    )  # fmt: skip
    torch.set_num_threads(os.cpu_count() or 1)
    with tempfile.TemporaryDirectory() as name:
        directory = arguments.index or Path(name)
        directory.mkdir(parents=True, exist_ok=True)
        rows = search_rows(arguments.vectors, arguments.queries, directory)
    for row in rows:
        shown = (f"{name} {value:,.4g}" if isinstance(value, float) else f"{value}" for name, value in row.items())
        print("  ".join(shown))
    build, count = rows[1], rows[1]["vectors"]
    scale, cores = MANY / count, os.cpu_count() or 1
    hours = scale * math.log(MANY) / math.log(count) * build["build_cpu_seconds"] / cores / 3600
    print(f"100 million vectors: an index of {scale * build['gib']:,.0f} GiB, in proportion;"
          f" built in {hours:,.1f} hours on {cores} idle cores, if the time grows as n log n")  # fmt: skip
    facts = {"cores": cores, "version": leanclip.__version__, "date": time.strftime("%Y-%m-%d")}
    append(arguments.output, *({field: row.get(field, "") for field in FIELDS} | facts for row in rows))


if __name__ == "__main__":
    main()

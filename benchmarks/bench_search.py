"""Search and embedding on a CPU: exact search, the approximate index, and the rate of leanclip embed.

python benchmarks/bench_search.py                  # exact and approximate, 1 million x 512; 20 minutes on 2 cores
python benchmarks/bench_search.py --embed 50000    # also embed so many synthetic samples with a tiny model
python benchmarks/bench_search.py --quick          # smoke run
"""

import argparse
import os
import resource
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from steps import append_rows
from torch.nn.functional import normalize

import leanclip
from leanclip.data import DataConfig, EvaluationTransform
from leanclip.data.synthetic import Synthetic
from leanclip.evaluation import EvaluationSettings
from leanclip.features.views import view_batches
from leanclip.models import ModelConfig, create_model
from leanclip.models.export import export_open_clip
from leanclip.search.approximate import INDEX, load_or_build
from leanclip.search.embed import embed_data
from leanclip.search.index import ExactIndex, LargeIndex

RESULTS = Path(__file__).parent / "results" / "search.csv"
DIM, PER_CLUSTER, SPREAD = 512, 100, 0.65  # members of a cluster have a cosine of about 0.7
AT_ONCE = 50_000


def clustered(count: int, centres: torch.Tensor, seed: int) -> np.ndarray:
    """Unit vectors around centres, in float16."""
    rows, generator = np.empty((count, DIM), np.float16), torch.Generator().manual_seed(seed)
    for start in range(0, count, AT_ONCE):
        size = min(AT_ONCE, count - start)
        chosen = centres[torch.randint(len(centres), (size,), generator=generator)]
        noise = torch.randn(size, DIM, generator=generator) / DIM**0.5
        rows[start : start + size] = normalize(chosen + SPREAD * noise, dim=1).half().numpy()
    return rows


def milliseconds(search: Callable[[np.ndarray], object], queries: np.ndarray) -> tuple[float, float]:
    """Median and largest time of a query after the first."""
    times = []
    search(queries[0])
    for query in queries:
        began = time.perf_counter()
        search(query)
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times), max(times)


def peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def search_rows(count: int, queries: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    centres = normalize(torch.randn(max(1, count // PER_CLUSTER), DIM), dim=1)
    features, asked = clustered(count, centres, 1), clustered(queries, centres, 2).astype(np.float32)
    usable = np.ones(count, bool)
    exact = ExactIndex(features, usable)
    median, largest = milliseconds(lambda query: exact.nearest(query, 10), asked)
    size = features.nbytes / 2**30
    rows: list[dict[str, Any]] = [
        {"what": "exact", "vectors": count, "median_ms": median, "largest_ms": largest, "gib": size}
    ]
    print(rows[0], flush=True)
    truth = [exact.nearest(query, 10).ids for query in asked]
    with tempfile.TemporaryDirectory() as name:
        before, began = peak_gib(), time.perf_counter()
        load_or_build(Path(name), features, usable, {"vectors": count})
        build = time.perf_counter() - began
        memory, size = peak_gib() - before, (Path(name) / INDEX).stat().st_size / 2**30
        large = LargeIndex(features, usable, load_or_build(Path(name), features, usable, {"vectors": count}))
        median, largest = milliseconds(lambda query: large.nearest(query, 10), asked)
        found = [large.nearest(query, 10).ids for query in asked]
        hits = [len(np.intersect1d(ids, right)) for ids, right in zip(found, truth, strict=True)]
    rows.append({
        "what": "approximate", "vectors": count, "median_ms": median, "largest_ms": largest, "gib": size,
        "recall_at_10": sum(hits) / (10 * queries), "build_seconds": build, "build_gib": memory,
    })  # fmt: skip
    return rows


class AnonymousMemory:
    """The largest private memory of this process over a while, sampled: mapped files do not count."""

    def __init__(self) -> None:
        self.samples: list[float] = []
        self.stop = threading.Event()
        threading.Thread(target=self._sample, daemon=True).start()

    def _sample(self) -> None:
        while not self.stop.wait(0.5):
            line = next(line for line in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in line)
            self.samples.append(int(line.split()[1]) / 2**20)


def embed_rows(count: int, workers: int) -> list[dict[str, Any]]:
    """The rate of leanclip embed, that of decoding alone with the same workers, and the memory."""
    model = create_model(ModelConfig(model="leanclip-tiny")).eval()
    source = f"synthetic:{count}:jpeg"
    with tempfile.TemporaryDirectory() as name:
        export_open_clip(model, Path(name) / "tiny.safetensors")
        few = min(count, 10_000)
        began = time.perf_counter()
        transform = EvaluationTransform(model.preprocess)
        options = {"views": 1, "seed": 0, "batch": 256, "workers": workers}
        for _ in view_batches(Synthetic(count, jpeg=True), np.arange(few), transform, **options):
            pass
        decoding, memory, began = few / (time.perf_counter() - began), AnonymousMemory(), time.perf_counter()
        embed_data(
            str(Path(name) / "tiny.safetensors"), source, Path(name) / "out", of="images", config=DataConfig(),
            precision="fp32", settings=EvaluationSettings(device=torch.device("cpu"), workers=workers), notify=print,
        )  # fmt: skip
        seconds = time.perf_counter() - began
        memory.stop.set()
    early = memory.samples[: max(1, len(memory.samples) // 10)]
    return [{
        "what": "embed", "vectors": count, "samples_a_second": count / seconds, "decoding_alone": decoding,
        "gib": max(memory.samples), "gib_in_first_tenth": max(early),
    }]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--vectors", type=int, default=1_000_000)
    parser.add_argument("--embed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    rows = search_rows(3000 if arguments.quick else arguments.vectors, 20 if arguments.quick else 200)
    if arguments.quick or arguments.embed:
        rows += embed_rows(512 if arguments.quick else arguments.embed, 0 if arguments.quick else 2)
    for row in rows:
        print(
            "  ".join(
                f"{name} {value:,.4g}" if isinstance(value, float) else f"{value}" for name, value in row.items()
            )
        )
    build = next(row for row in rows if row["what"] == "approximate")
    scale = 100_000_000 / build["vectors"]
    print(f"100 million vectors, in proportion: index of {scale * build['gib']:,.0f} GiB,"
          f" built in {scale * build['build_seconds'] / 3600:,.1f} hours on {os.cpu_count()} cores")  # fmt: skip
    if not arguments.quick:
        facts = {"cores": os.cpu_count(), "version": leanclip.__version__, "date": time.strftime("%Y-%m-%d")}
        append_rows(arguments.output, [_complete(row) | facts for row in rows])


def _complete(row: dict[str, Any]) -> dict[str, Any]:
    names = ("what", "vectors", "median_ms", "largest_ms", "gib", "recall_at_10", "build_seconds", "build_gib",
             "samples_a_second", "decoding_alone", "gib_in_first_tenth")  # fmt: skip
    return {name: row.get(name, "") for name in names}


if __name__ == "__main__":
    main()

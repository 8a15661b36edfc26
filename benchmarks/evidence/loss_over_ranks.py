"""Memory and time of the loss over ranks: one rank's part of a step's loss, forward and backward, on a real device.

    python benchmarks/evidence/loss_over_ranks.py              # the whole table, on a GPU: two to three minutes
    python benchmarks/evidence/loss_over_ranks.py --quick      # small sizes, any machine, keeps nothing

The rank is the first of N: its collectives return its own part, so they cost a copy and no network traffic
(communication.py counts that). Embeddings are bf16 with d = 512. Extra memory is the peak above inputs, parameters
and tables: gathered embeddings, matrices, gradients. A cell with a predicted time above --cap seconds is not run. The
floor is the arithmetic alone, 8 B^2 d / N operations. Stored rows are not measured again.
"""

import gc
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import baseline_losses
import line_chart
import measurements
import torch
import torch.nn.functional as F
from command_line import Flag, command_line
from measurements import Table

RATE = 769e12  # operations/s of a large bf16 product on an H200
# Time relative to the floor, for predictions: from benchmarks/results/loss.csv.
SLOWER = {
    "leanclip infonce": 1.5,
    "leanclip fastclip-v3": 1.5,
    "undivided": 5.0,
    "local": 5.0,
    "disco": 5.0,
    "inf_cl": 42,
}
NAMES = {"undivided": "CLIP, undivided", "local": "open_clip local loss", "disco": "DisCo-CLIP split"}


def measure(step: Callable[[], torch.Tensor], predicted: float, limit: int, device: str) -> dict[str, Any]:
    """Time and memory. A call of more than ten seconds runs once: smaller sizes have compiled its kernels."""
    cuda = device == "cuda"
    before = torch.cuda.memory_allocated() if cuda else 0
    repeats = max(1, min(limit, int(1.0 / max(predicted, 1e-3))))
    if predicted < 10:
        step()
    free_memory()
    times, value = [], torch.zeros(())
    for _ in range(repeats):
        start = time.perf_counter()
        value = step()
        if cuda:
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    extra = (torch.cuda.max_memory_allocated() - before) / 2**30 if cuda else None
    times.sort()
    return {
        "ms": round(statistics.median(times), 4),
        "low_ms": round(times[len(times) // 5], 4),
        "high_ms": round(times[-1 - len(times) // 5], 4),
        "repeats": repeats,
        "extra_gib": "" if extra is None else round(extra, 4),
        "loss": round(value.item(), 6),
    }


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def measure_cell(provider: str, batch: int, ranks: int, dim: int, cap: float, repeats: int) -> dict[str, Any]:
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    floor = 8 * batch**2 * dim / ranks / RATE
    predicted = SLOWER[provider] * floor * (ranks if provider == "undivided" else 1)
    row: dict[str, Any] = {
        "provider": provider, "batch": batch, "ranks": ranks, "dim": dim, "dtype": str(dtype).split(".")[1],
        "status": "measured", **dict.fromkeys(("ms", "low_ms", "high_ms", "repeats", "extra_gib"), ""),
        "predicted_ms": round(1e3 * predicted, 3), "floor_ms": round(1e3 * floor, 4), "loss": "",
        **measurements.provenance(),
    }  # fmt: skip
    if predicted > cap and provider not in NAMES:  # those are out of memory long before
        return row | {"status": "not run"}
    step = None
    try:
        with baseline_losses.first_of(ranks, always=provider == "inf_cl"):  # which all-reduces on one rank, too
            torch.manual_seed(0)
            image, text = (
                F.normalize(torch.randn(batch // ranks, dim, device=device), dim=1).to(dtype).requires_grad_()
                for _ in range(2)
            )
            step = baseline_losses.loss_step(provider, image, text, torch.arange(batch // ranks), batch)
            return row | measure(step, predicted, repeats, device)
    except torch.cuda.OutOfMemoryError:
        return row | {"status": "out of memory"}
    finally:
        del step
        free_memory()


def run(arguments: Any) -> None:
    warm = torch.ones(256, 256, device="cuda" if torch.cuda.is_available() else "cpu")
    _ = warm @ warm  # allocates the library's workspace
    stored = {(row["provider"], int(row["batch"]), int(row["ranks"])) for row in measurements.rows(arguments.output)}
    for provider, batch, ranks in itertools.product(arguments.providers, arguments.batches, arguments.ranks):
        undivided = ranks == 1 and provider in ("local", "disco")  # one rank has nothing to divide
        cuda_only = provider == "inf_cl" and not torch.cuda.is_available()
        if (provider, batch, ranks) in stored or undivided or cuda_only:
            continue
        row = measure_cell(provider, batch, ranks, arguments.dim, arguments.cap, arguments.repeats)
        measurements.append(arguments.output, row)
        print(f"{provider:21s} B={batch:<8d} N={ranks:<3d} {row['status']} {row['ms']} ms {row['extra_gib']} GiB")


def shown(row: dict[str, str] | None, column: str) -> str:
    if row is None:
        return "not measured"
    if row["status"] == "not run" and column == "ms":
        return f"not run (about {float(row['predicted_ms']) / 1e3:.0f} s)"
    if row["status"] != "measured" or not row[column]:
        return row["status"]
    return f"{float(row[column]):,.{1 if column == 'ms' else 2}f}"


def tables(path: Path) -> dict[str, Table]:
    rows = measurements.rows(path)
    cells = {(row["provider"], int(row["batch"]), int(row["ranks"])): row for row in rows}
    providers = [name for name in SLOWER if any(key[0] == name for key in cells)]
    sizes = sorted({key[1:] for key in cells})

    def table(column: str) -> Table:
        lines = []
        for batch, ranks in sizes:
            same = NAMES if ranks == 1 else ()  # on one rank these are the undivided loss
            row = [cells.get(("undivided" if name in same else name, batch, ranks)) for name in providers]
            lines.append([f"{batch:,}", str(ranks), *(shown(cell, column) for cell in row)])
        return Table(["B", "N", *(NAMES.get(name, name) for name in providers)], lines)

    return {"loss_memory": table("extra_gib"), "loss_time": table("ms")}


def draw(path: Path) -> None:
    """Memory on one of the most ranks. A line ends where the loss is out of memory or was not run."""
    rows = [row for row in measurements.rows(path) if row["status"] == "measured" and row["extra_gib"]]
    ranks = max(rows, key=lambda row: int(row["ranks"]))["ranks"]
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["ranks"] == ranks:
            name = NAMES.get(row["provider"], row["provider"])
            lines.setdefault(name, []).append((float(row["batch"]), float(row["extra_gib"])))
    title = f"Extra memory of the loss on one of {ranks} ranks ({rows[0]['device']})"
    line_chart.draw(
        path.with_suffix(".svg"), {"global batch": lines}, title=title, ylabel="GiB", xscale="log", yscale="log"
    )


def main(argv: list[str] | None = None) -> None:
    arguments = command_line(
        __doc__, argv, quick={"batches": [256], "ranks": [1, 4], "dim": 32, "repeats": 2},
        providers=Flag(list(SLOWER), choices=list(SLOWER)),
        batches=[2**power for power in (13, 15, 16, 17, 18, 20)], ranks=[1, 8, 64], dim=512,
        cap=Flag(20.0, "seconds; a longer cell is not run"),
        repeats=Flag(20, "at most; fewer if they take over a second"),
        output=measurements.RESULTS / "loss_over_ranks.csv",
    )  # fmt: skip
    run(arguments)
    measurements.show(tables(arguments.output))


if __name__ == "__main__":
    sys.exit(main())

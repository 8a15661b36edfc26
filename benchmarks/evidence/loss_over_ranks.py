"""Memory and time of the loss over ranks: one rank's share of a step's loss, forward and backward, run for real.

    python benchmarks/evidence/loss_over_ranks.py              # the whole table, on a GPU: two to three minutes
    python benchmarks/evidence/loss_over_ranks.py --quick      # small sizes, any machine, nothing kept
    python benchmarks/evidence/loss_over_ranks.py --write      # plot and tables from the rows, measure nothing

The rank is the first of N: its collectives give back its own part, so what they cost is a copy and not a network
(communication.py is about that). Embeddings are bf16 with d = 512; the losses of others run under autocast, as in
their trainers, so their similarities are bf16 and their cross-entropy float32. Extra memory is the peak above inputs,
parameters and tables: gathered embeddings, matrices, gradients. A cell whose predicted time is above --cap seconds is
not run and says so; one that is out of memory says so. The floor is the arithmetic alone, 8 B^2 d / N operations.
Rows that are there already are not measured again.
"""

import argparse
import gc
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chart
import losses_of_others
import table
import torch
import torch.nn.functional as F

import leanclip

FIELDS = (
    "provider", "batch", "ranks", "dim", "dtype", "status", "ms", "low_ms", "high_ms", "repeats", "extra_gib",
    "predicted_ms", "floor_ms", "loss", *table.PROVENANCE,
)  # fmt: skip
RATE = 769e12  # operations/s of a large bf16 product on an H200
# Times the floor, for predictions: from benchmarks/results/loss.csv. The undivided loss has N times the arithmetic.
SLOWER = {
    "leanclip infonce": 1.5,
    "leanclip fastclip-v3": 1.5,
    "undivided": 5.0,
    "local": 5.0,
    "disco": 5.0,
    "inf_cl": 42,
}
NAMES = {"undivided": "CLIP, undivided", "local": "open_clip local loss", "disco": "DisCo-CLIP split"}
CARDS = (40, 80)  # GiB of common cards
Step = Callable[[], torch.Tensor]


def step_of(provider: str, batch: int, ranks: int, dim: int, device: str) -> Step:
    """A call that runs the loss forward and backward, and gives its value."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    share = batch // ranks
    image, text = (
        F.normalize(torch.randn(share, dim, device=device), dim=1).to(dtype).requires_grad_() for _ in range(2)
    )
    kind, _, name = provider.partition(" ")
    if kind == "leanclip":
        stateful = name.startswith("fastclip")
        hyper: dict[str, Any] = {"num_samples": batch} if stateful else {}
        ours = leanclip.create_loss(name, **hyper).to(device)
        ids = torch.arange(share) if stateful else None

        def own() -> torch.Tensor:
            ours.set_epoch(0, 2)
            ours.zero_grad()
            image.grad = text.grad = None
            value = ours(image, text, ids).loss
            value.backward()
            return value.detach()

        return own
    loss = losses_of_others.MAKERS[provider]()
    log_scale = torch.tensor(2.659260, device=device, requires_grad=True)  # 1 / 0.07

    def others() -> torch.Tensor:
        image.grad = text.grad = log_scale.grad = None
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda" and provider != "inf_cl"):
            value = loss(image, text, log_scale.exp())
        value.backward()
        return value.detach()

    return others


def measure(step: Step, predicted: float, most: int, device: str) -> dict[str, Any]:
    """Time and memory. A call of more than ten seconds is made once: smaller ones have compiled its kernels."""
    cuda = device == "cuda"
    before = torch.cuda.memory_allocated() if cuda else 0
    repeats = max(1, min(most, int(1.0 / max(predicted, 1e-3))))
    if predicted < 10:
        step()
    clear(cuda)
    times, value = [], torch.zeros(())
    for _ in range(repeats):
        if cuda:
            torch.cuda.synchronize()
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


def clear(cuda: bool) -> None:
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def cell(provider: str, batch: int, ranks: int, dim: int, cap: float, repeats: int, device: str) -> dict[str, Any]:
    floor = 8 * batch**2 * dim / ranks / RATE
    predicted = SLOWER[provider] * floor * (ranks if provider == "undivided" else 1)
    row: dict[str, Any] = dict.fromkeys(FIELDS, "") | {
        "provider": provider, "batch": batch, "ranks": ranks, "dim": dim, "floor_ms": round(1e3 * floor, 4),
        "dtype": "bfloat16" if device == "cuda" else "float32", "predicted_ms": round(1e3 * predicted, 3),
        **table.provenance(),
    }  # fmt: skip
    if predicted > cap and provider in ("inf_cl", "leanclip infonce", "leanclip fastclip-v3"):
        return row | {"status": "not run"}  # the others are out of memory long before
    step = None
    try:
        with losses_of_others.world(ranks, always=provider == "inf_cl"):  # which sums the scale's gradient even alone
            step = step_of(provider, batch, ranks, dim, device)
            return row | measure(step, predicted, repeats, device) | {"status": "measured"}
    except torch.cuda.OutOfMemoryError:
        return row | {"status": "out of memory"}
    except Exception as error:  # of another's kernels, for any reason: the other cells are still worth their time
        return row | {"status": f"failed: {type(error).__name__}: {str(error)[:300]}"}
    finally:
        del step
        clear(device == "cuda")


def run(arguments: argparse.Namespace) -> int:
    """How many cells failed, other than for want of memory. They are tried again next time."""
    failed = 0
    device = "cuda" if torch.cuda.is_available() else "cpu"
    warm = torch.ones(256, 256, device=device)
    _ = warm @ warm  # the library's workspace, which is nobody's extra memory
    for provider in arguments.providers:
        for batch in arguments.batches:
            for ranks in arguments.ranks:
                if ranks == 1 and provider in ("local", "disco"):
                    continue  # nothing to divide: the undivided loss
                if device == "cpu" and provider == "inf_cl":
                    continue  # CUDA only
                key = (provider, str(batch), str(ranks), str(arguments.dim))
                known = [tuple(row[name] for name in FIELDS[:4]) for row in table.rows(arguments.output)]
                if key in known:
                    continue
                row = cell(provider, batch, ranks, arguments.dim, arguments.cap, arguments.repeats, device)
                print(
                    f"{provider:21s} B={batch:<8d} N={ranks:<3d} {row['status']:14s}"
                    f" {row['ms']:>12} ms (floor {row['floor_ms']}, predicted {row['predicted_ms']})"
                    f" {row['extra_gib']:>9} GiB  loss {row['loss']}",
                    flush=True,
                )
                if row["status"].startswith("failed"):
                    failed += 1
                else:
                    table.append(arguments.output, FIELDS, row)
    return failed


def shown(row: dict[str, str] | None, what: str) -> str:
    if row is None:
        return "not measured"
    if row["status"] == "out of memory":
        return "out of memory"
    if row["status"] == "not run":
        return f"not run (about {float(row['predicted_ms']) / 1e3:.0f} s)" if what == "ms" else "not run"
    if what == "ms":
        return f"{float(row['ms']):,.1f}"
    if not row["extra_gib"]:
        return "not counted"
    extra = float(row["extra_gib"])
    over = [card for card in CARDS if extra > card]
    return f"{extra:,.2f}" + (f" (> {over[-1]})" if over else "")


def verdicts(cells: dict[tuple[str, int, int], dict[str, str]]) -> list[str]:
    """What became of DisCo-CLIP's claim, and who is ahead where, each from its largest comparable cell."""

    def largest(*providers: str) -> tuple[int, int, list[float], list[float]] | None:
        """Where all of them were measured on several ranks: the batch, the ranks, GiB and milliseconds."""
        both = [
            (batch, -ranks, ranks)
            for provider, batch, ranks in cells
            if provider == providers[0] and ranks > 1
            and all(cells.get((p, batch, ranks), {}).get("extra_gib") for p in providers)
        ]  # fmt: skip
        if not both:
            return None
        batch, _, ranks = max(both)
        found = [cells[provider, batch, ranks] for provider in providers]
        return batch, ranks, [float(row["extra_gib"]) for row in found], [float(row["ms"]) for row in found]

    lines = []
    if found := largest("disco", "undivided"):
        batch, ranks, (split, undivided), _ = found
        held = "holds" if undivided / split > 0.9 * ranks else "does not hold"
        lines.append(
            f"DisCo-CLIP's claim of O(B²/N) {held}: at {batch:,} on {ranks} ranks its split needs {split:.2f} GiB"
            f" where the undivided loss needs {undivided:.2f}, {undivided / split:.1f} times as much."
        )
    if found := largest("disco", "local"):
        batch, ranks, (split, local), (split_ms, local_ms) = found
        lines.append(
            f"open_clip's local loss and that split at {batch:,} on {ranks}: {local:.2f} and {split:.2f} GiB,"
            f" {local_ms:.1f} and {split_ms:.1f} ms; communication.py says how they differ in what they send."
        )
    for other in ("disco", "inf_cl"):
        if found := largest("leanclip infonce", other):
            batch, ranks, (own, theirs), (own_ms, theirs_ms) = found
            lines.append(
                f"Beside {NAMES.get(other, other)} at {batch:,} on {ranks}: leanclip {own:.2f} GiB and"
                f" {own_ms:,.1f} ms, the other {theirs:.2f} GiB and {theirs_ms:,.1f} ms."
            )
    return [" ".join(lines), "", *reservations(cells)] if lines else []


def reservations(cells: dict[tuple[str, int, int], dict[str, str]]) -> list[str]:
    """Where leanclip is slower than a loss of others on as many ranks, and whose loss came out as another number."""
    done = {key: row for key, row in cells.items() if row["status"] == "measured"}
    fastest: dict[tuple[int, int], float] = {}
    for (provider, batch, ranks), row in done.items():
        if provider in NAMES:
            fastest[batch, ranks] = min(float(row["ms"]), fastest.get((batch, ranks), math.inf))
    slower = []
    for name in ("leanclip infonce", "leanclip fastclip-v3"):
        own = {(batch, ranks): float(row["ms"]) for (provider, batch, ranks), row in done.items() if provider == name}
        places = [
            f"{batch:,} on {ranks} ({own[batch, ranks]:.1f} against {other:.1f})"
            for (batch, ranks), other in sorted(fastest.items())
            if own.get((batch, ranks), 0.0) > other
        ]
        if places:
            slower.append(f"{name} at {', '.join(places)}")
    text = []
    if slower:
        text += [f"Slower than the fastest of the losses that keep a matrix, in ms: {'; '.join(slower)}.", ""]
    wrong = sorted(
        {key[0] for key, row in done.items() if another_loss(row, done.get(("leanclip infonce", *key[1:])))}
    )
    if wrong:
        text += [
            f"On several ranks the loss of {', '.join(wrong)} came out as another number than everybody's: it passes"
            " embeddings from rank to rank, and from ranks that do not exist none arrive. It does the same work on"
            " other numbers, so what is told of it there is time and memory alone; on one rank its loss agrees.",
            "",
        ]
    return text


def another_loss(row: dict[str, str], ours: dict[str, str] | None) -> bool:
    """All but fastclip-v3's are InfoNCE, of the same embeddings."""
    if ours is None or row["provider"].endswith("fastclip-v3"):
        return False
    return abs(float(row["loss"]) - float(ours["loss"])) > 0.01


def write(output: Path) -> None:
    """Two tables and a plot beside the rows."""
    rows = table.rows(output)
    if not rows:
        sys.exit(f"{output} has no rows")
    cells = {(row["provider"], int(row["batch"]), int(row["ranks"])): row for row in rows}
    providers = [name for name in SLOWER if any(key[0] == name for key in cells)]
    batches, counts = sorted({key[1] for key in cells}), sorted({key[2] for key in cells})
    text = [
        f"One rank's share of the loss, forward and backward, {rows[-1]['device']}, {rows[-1]['dtype']}, d ="
        f" {rows[-1]['dim']}; the network is not in these times. At N = 1 local loss and DisCo-CLIP's split are the"
        " undivided loss. Memory is the loss alone: above 40 or 80 GiB it does not fit a card of that size, whatever"
        " the model. Losses of others under autocast, as in their trainers; DisCo-CLIP's split is written again here"
        " after its paper, with the collectives of its published code.",
        "",
    ]  # fmt: skip
    text += verdicts(cells)
    for what, title in (("extra_gib", "Peak extra memory, GiB"), ("ms", "Milliseconds")):
        text += [f"**{title}**", "", "| B | N | " + " | ".join(NAMES.get(name, name) for name in providers) + " |"]
        text.append("|---|---|" + "---|" * len(providers))
        for batch in batches:
            for ranks in counts:
                same = NAMES if ranks == 1 else ()  # one rank has nothing to divide
                found = [cells.get(("undivided" if name in same else name, batch, ranks)) for name in providers]
                text.append(f"| {batch:,} | {ranks} | " + " | ".join(shown(row, what) for row in found) + " |")
        text.append("")
    most = max(counts)
    known = {
        name: [
            (float(batch), float(row["extra_gib"] or row["ms"]))
            for batch in batches
            if (row := cells.get((name, batch, most))) and row["status"] == "measured"
        ]
        for name in providers
    }
    counted = any(row["extra_gib"] for row in rows)
    chart.draw(
        output.with_suffix(".svg"),
        {NAMES.get(name, name): points for name, points in known.items() if points},
        title=f"Loss on one of {most} ranks: {'extra memory' if counted else 'time'} ({rows[-1]['device']})",
        x_label="global batch; a curve ends where it is out of memory or too slow to run",
        y_label="GiB" if counted else "ms",
        log=(True, True),
        x_ticks=[float(batch) for batch in batches],
        x_name=lambda batch: f"{batch / 1024:,.0f}K",
    )
    text += [f"![memory of the loss on one of {most} ranks]({output.with_suffix('.svg').name})", ""]
    output.with_suffix(".md").write_text("\n".join(text))
    print("\n".join(text))


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--providers", nargs="+", default=list(SLOWER), choices=list(SLOWER))
    parser.add_argument("--batches", nargs="+", type=int, default=[2**power for power in (13, 15, 16, 17, 18, 20)])
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--cap", type=float, default=20.0, help="seconds; a longer cell is not run")
    parser.add_argument("--repeats", type=int, default=20, help="at most, and fewer where they take over a second")
    parser.add_argument("--output", type=Path, default=table.RESULTS / "loss_over_ranks.csv")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", action="store_true", help="no run: plot and tables from the rows")
    arguments = parser.parse_args(given)
    if arguments.write:
        write(arguments.output)
        return 0
    if arguments.quick:
        with tempfile.TemporaryDirectory() as name:
            arguments.output = Path(name) / "loss_over_ranks.csv"
            arguments.batches, arguments.ranks, arguments.dim = [256], [1, 4], 32
            arguments.repeats = 2
            failed = run(arguments)
            write(arguments.output)
        return failed
    failed = run(arguments)
    write(arguments.output)
    return failed


if __name__ == "__main__":
    sys.exit(main())

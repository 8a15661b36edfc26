"""What learned pair weights cost: the loss alone and a whole step, with and without them, in turns.

    python benchmarks/bench_pair_weights.py             # batch 32,768 alone, ViT-B-32 at 2,048; a minute on a GPU
    python benchmarks/bench_pair_weights.py --quick     # small, on a CPU too; nothing is kept

Rows go to benchmarks/results/pair_weights.csv. `without` and `with` are medians in milliseconds.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_step
import torch
from bench_loss import Case
from evidence.command_line import command_line
from evidence.measurements import append
from steps import device_name, synchronize

import leanclip
from leanclip.losses.pair_weights import Mode

RESULTS = Path(__file__).parent / "results" / "pair_weights.csv"
MODES: tuple[Mode, ...] = ("off", "learned")
SAMPLES = 1_000_000


def loss_step(loss_name: str, batch: int, dim: int, device: torch.device, mode: Mode) -> Callable[[], Any]:
    case = Case(loss_name, batch, dim, torch.bfloat16 if device.type == "cuda" else torch.float32, str(device))
    loss = leanclip.create_loss(loss_name, num_samples=SAMPLES, pair_weights=mode).to(device)
    ids = torch.randperm(SAMPLES)[:batch].to(device)
    loss.set_epoch(1, 4)

    def step() -> None:
        case.clear()
        loss.zero_grad()
        loss(case.image, case.text, ids).loss.backward()

    return step


def in_turns(steps: list[Callable[[], Any]], device: torch.device, repeats: int) -> list[float]:
    """The median milliseconds of each."""
    times: list[list[float]] = [[] for _ in steps]
    for number in range(repeats + 5):
        for step, measured in zip(steps, times, strict=True):
            synchronize(device)
            began = time.perf_counter()
            step()
            synchronize(device)
            if number >= 5:
                measured.append(1e3 * (time.perf_counter() - began))
    return [statistics.median(measured) for measured in times]


def row(what: str, batch: int, steps: list[Callable[[], Any]], device: torch.device, repeats: int) -> dict[str, Any]:
    without, with_weights = in_turns(steps, device, repeats)
    result = {
        "version": leanclip.__version__, "device": device_name(), "what": what, "batch": batch,
        "without": round(without, 3), "with": round(with_weights, 3), "ratio": round(with_weights / without, 4),
    }  # fmt: skip
    print(result, flush=True)
    return result


def main() -> None:
    arguments = command_line(__doc__, output=RESULTS)
    quick = arguments.quick
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batch, dim, repeats = (64, 16, 3) if quick else (32_768, 512, 60)
    found = []
    for name in ("infonce", "siglip", "fastclip-v1", "fastclip-v3"):
        steps = [loss_step(name, batch, dim, device, mode) for mode in MODES]
        found.append(row(f"{name} alone", batch, steps, device, repeats))
    case = bench_step.Case("tiny", bench_step.TINY, 16) if quick else bench_step.CASES[0]
    data = bench_step.Data(case, bench_step.config_of(case), device)
    whole = [
        bench_step.leanclip_step(case, data, "fastclip-v1", compiled=not quick, pair_weights=mode) for mode in MODES
    ]
    number = iter(range(10**9))
    turns = [lambda step=step: step(next(number) // 2 % bench_step.BATCHES) for step in whole]
    found.append(row(f"step, {case.name}, fastclip-v1", case.batch, turns, device, repeats // 2))
    append(arguments.output, *found)


if __name__ == "__main__":
    main()

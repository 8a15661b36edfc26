"""Communication: the bytes that one rank receives in a step for the loss, counted from the collectives called.

    python benchmarks/evidence/communication.py             # the whole table, on a CPU: six minutes on two cores
    python benchmarks/evidence/communication.py --quick     # small sizes, keeps nothing

Every collective passes torch's dispatcher and is counted there, forward and backward. Two ways: `gloo` runs N
processes with float32 embeddings, compares their gradients with those of one process with the whole batch, and counts
on the first rank; `alone` is the first of N ranks that do not exist (baseline_losses.first_of), with bf16 embeddings
as in training, and for the baselines with tensors without content. The two must agree for the same sizes and
precision.

Bytes are those that a rank receives on a ring: a gathered or reduce-scattered vector of S bytes costs S (N-1)/N, an
all-reduced one twice that. Times come from the planner's model of networks (leanclip.planning.network), collective by
collective, without overlap with computation. The gradients of the parameters, equal for all losses, are not counted.
Stored rows are not counted again.
"""

import contextlib
import multiprocessing
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import baseline_losses
import line_chart
import measurements
import torch
import torch.distributed as dist
import torch.nn.functional as F
from command_line import Flag, command_line
from measurements import Table
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from leanclip.planning.network import NETWORKS

PROVIDERS = {
    "undivided": "open_clip, default flags",
    "local": "open_clip --local-loss --gather-with-grad",
    "disco": "DisCo-CLIP",
    "leanclip infonce": "leanclip infonce",
    "leanclip fastclip-v3": "leanclip fastclip-v3",
}
SHOWN = {"nvlink": "NVLink", "infiniband": "InfiniBand, one adapter per GPU", "25gbe": "25 GbE"}
KINDS = {
    "allgather_": "gathered", "_allgather_base_": "gathered", "reduce_scatter_": "scattered",
    "_reduce_scatter_base_": "scattered", "allreduce_": "summed",
}  # fmt: skip


class Call(NamedTuple):
    kind: str
    bytes: int  # of the whole vector


class Counter(TorchDispatchMode):
    """Lists the collectives that are called inside its context."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.split("::")[1]
            if name not in KINDS:
                raise RuntimeError(f"{name} is an unknown collective")
            self.calls.append(Call(KINDS[name], max(size(argument) for argument in args)))
        return func(*args, **(kwargs or {}))


def size(argument: Any) -> int:
    if isinstance(argument, Tensor):
        return argument.nbytes
    return sum(map(size, argument)) if isinstance(argument, list | tuple) else 0


def count(provider: str, image: Tensor, text: Tensor, ids: Tensor, num_samples: int) -> list[Call]:
    """The collectives of one step's loss, forward and backward."""
    step = baseline_losses.loss_step(provider, image, text, ids, num_samples)
    with Counter() as counter:
        step()
    return counter.calls


def count_alone(provider: str, ranks: int, share: int, dim: int, dtype: torch.dtype) -> list[Call]:
    contents = contextlib.nullcontext() if provider.startswith("leanclip") else FakeTensorMode()
    with baseline_losses.first_of(ranks), contents:
        image, text = (torch.randn(share, dim).to(dtype).requires_grad_() for _ in range(2))
        return count(provider, image, text, torch.arange(share), ranks * share)


def count_on_rank(rank: int, ranks: int, share: int, dim: int, folder: str) -> None:
    """One process of the gloo group: stores its calls and gradients."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    results: dict[str, Any] = {}
    for provider in PROVIDERS:
        image, text = (rows.requires_grad_() for rows in embeddings(rank, share, dim))
        with baseline_losses.as_nccl():
            calls = count(provider, image, text, torch.arange(share) + rank * share, ranks * share)
        assert image.grad is not None and text.grad is not None
        results[provider] = {"calls": [tuple(call) for call in calls], "gradient": torch.cat([image.grad, text.grad])}
    torch.save(results, f"{folder}/{rank}")
    dist.barrier()
    dist.destroy_process_group()


def embeddings(rank: int, share: int, dim: int) -> list[Tensor]:
    """Images and texts of a rank."""
    random = torch.Generator().manual_seed(rank)
    return [F.normalize(torch.randn(share, dim, generator=random), dim=1) for _ in range(2)]


def single_process_gradients(provider: str, ranks: int, share: int, dim: int) -> Tensor:
    """The gradients of the whole batch's mean loss, in the order of the ranks."""
    parts = [embeddings(rank, share, dim) for rank in range(ranks)]
    image, text = (torch.cat(side).requires_grad_() for side in zip(*parts, strict=True))
    baseline_losses.loss_step(provider, image, text, torch.arange(ranks * share), ranks * share)()
    assert image.grad is not None and text.grad is not None
    pairs = zip(image.grad.chunk(ranks), text.grad.chunk(ranks), strict=True)
    return torch.cat([rows for pair in pairs for rows in pair])


def count_in_group(ranks: int, share: int, dim: int) -> dict[str, tuple[list[Call], float]]:
    """Of each provider in a real group of processes: its calls, and the relative error of its gradients.

    Each rank's gradients are N times those of the mean, because DDP averages over ranks, except with open_clip's
    default flags."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, ranks, share, dim, folder) for rank in range(ranks)]
        processes = [context.Process(target=count_on_rank, args=values) for values in arguments]
        for process in processes:
            process.start()
        for process in processes:
            process.join(300)
        if any(process.exitcode != 0 for process in processes):
            raise RuntimeError(f"processes ended with {[process.exitcode for process in processes]}")
        results = [torch.load(f"{folder}/{rank}", weights_only=True) for rank in range(ranks)]
    counted = {}
    for provider in PROVIDERS:
        gradient = torch.cat([result[provider]["gradient"] for result in results])
        loss = provider if provider.startswith("leanclip") else "undivided"  # all baselines are InfoNCE
        expected = single_process_gradients(loss, ranks, share, dim) * (1 if provider == "undivided" else ranks)
        error = ((gradient - expected).norm() / expected.norm()).item()
        calls = [Call(*call) for call in results[0][provider]["calls"]]
        if error > 1e-5:
            raise RuntimeError(f"{provider} on {ranks} processes has other gradients than one process: {error:.1e}")
        if sorted(count_alone(provider, ranks, share, dim, torch.float32)) != sorted(calls):
            raise RuntimeError(f"{provider} on {ranks} ranks: other calls alone than in the group, {calls}")
        counted[provider] = calls, error
    return counted


def csv_row(
    provider: str, ranks: int, share: int, dim: int, dtype: str, how: str, calls: Sequence[Call], difference: str = ""
) -> dict[str, Any]:
    totals = {kind: sum(call.bytes for call in calls if call.kind == kind) for kind in dict.fromkeys(KINDS.values())}
    received = (sum(totals.values()) + totals["summed"]) * (ranks - 1) / ranks
    seconds = {
        name: sum(
            NETWORKS[name].sum(call.bytes, ranks)
            if call.kind == "summed"
            else NETWORKS[name].gather(call.bytes, ranks)
            for call in calls
        )
        for name in SHOWN
    }
    return {
        "provider": provider, "ranks": ranks, "per_rank": share, "batch": ranks * share, "dim": dim, "dtype": dtype,
        "how": how, "collectives": len(calls), **{f"{kind}_bytes": total for kind, total in totals.items()},
        "received_bytes": round(received), **{f"{name}_ms": round(1e3 * time, 4) for name, time in seconds.items()},
        "gradient_difference": difference, **measurements.provenance(),
    }  # fmt: skip


def run(arguments: Any) -> None:
    stored = measurements.rows(arguments.output)
    known = {(row["provider"], int(row["ranks"]), int(row["per_rank"]), row["how"]) for row in stored}
    dim, per_rank = arguments.dim, arguments.per_rank
    for ranks in arguments.processes:
        if not all((provider, ranks, per_rank, "gloo") in known for provider in PROVIDERS):
            for provider, (calls, error) in count_in_group(ranks, per_rank, dim).items():
                row = csv_row(provider, ranks, per_rank, dim, "float32", "gloo", calls, f"{error:.1e}")
                measurements.append(arguments.output, row)
    shares = [(ranks, per_rank) for ranks in arguments.ranks]
    shares += [(ranks, arguments.batch // ranks) for ranks in arguments.ranks if ranks >= 8]
    for ranks, share in dict.fromkeys(shares):
        for provider in PROVIDERS:
            if (provider, ranks, share, "alone") not in known:
                calls = count_alone(provider, ranks, share, dim, torch.bfloat16)
                row = csv_row(provider, ranks, share, dim, "bfloat16", "alone", calls)
                measurements.append(arguments.output, row)


def tables(path: Path) -> dict[str, Table]:
    alone = [row for row in measurements.rows(path) if row["how"] == "alone"]
    per_rank = [row for row in alone if row["per_rank"] == alone[0]["per_rank"]]
    other = next(row["batch"] for row in alone if row not in per_rank)
    ranks = max((row["ranks"] for row in per_rank), key=int)

    def received(rows: list[dict[str, str]]) -> Table:
        """Megabytes over ranks."""
        counts = sorted({int(row["ranks"]) for row in rows})
        cells = {(row["provider"], int(row["ranks"])): int(row["received_bytes"]) / 1e6 for row in rows}
        lines = [
            [name, *(f"{cells[provider, count]:,.2f}" for count in counts)] for provider, name in PROVIDERS.items()
        ]
        return Table(["loss", *(f"N = {count}" for count in counts)], lines)

    most_ranks = {row["provider"]: row for row in per_rank if row["ranks"] == ranks}
    times = [
        [name, most_ranks[provider]["collectives"]]
        + [f"{float(most_ranks[provider][f'{network}_ms']):,.2f}" for network in SHOWN]
        for provider, name in PROVIDERS.items()
    ]
    return {
        "traffic_per_rank": received(per_rank),
        "traffic_batch": received([row for row in alone if row["batch"] == other]),
        "traffic_time": Table(["loss", "collectives", *SHOWN.values()], times),
    }


def draw(path: Path) -> None:
    rows = [row for row in measurements.rows(path) if row["how"] == "alone" and int(row["ranks"]) > 1]
    lines: dict[str, list[tuple[float, float]]] = {name: [] for name in PROVIDERS.values()}
    for row in rows:
        if row["per_rank"] == rows[0]["per_rank"]:
            lines[PROVIDERS[row["provider"]]].append((float(row["ranks"]), int(row["received_bytes"]) / 1e6))
    title = f"Received by a rank for the loss in a step, {rows[0]['per_rank']} samples per rank, d = {rows[0]['dim']}"
    panels = {"ranks (the three lowest lines coincide)": lines}
    line_chart.draw(path.with_suffix(".svg"), panels, title=title, ylabel="MB", xscale="log", yscale="log")


def main(argv: list[str] | None = None) -> None:
    arguments = command_line(
        __doc__, argv, quick={"ranks": [1, 2, 8], "processes": [2], "per_rank": 16, "batch": 64, "dim": 32},
        ranks=[1, 2, 4, 8, 16, 32, 64], processes=Flag([2, 4, 8], "sizes of real process groups"), per_rank=512,
        batch=Flag(32768, "also this global batch, on 8 ranks and more"), dim=512,
        output=measurements.RESULTS / "communication.csv",
    )  # fmt: skip
    run(arguments)
    measurements.show(tables(arguments.output))


if __name__ == "__main__":
    sys.exit(main())

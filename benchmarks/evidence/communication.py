"""Communication: what one rank receives in a step for the loss, counted from the collectives that are really called.

    python benchmarks/evidence/communication.py             # the whole table, on a CPU: six minutes on two cores
    python benchmarks/evidence/communication.py --quick     # small sizes, nothing kept
    python benchmarks/evidence/communication.py --write     # plot and tables from the rows, count nothing

Every collective passes torch's dispatcher, and is counted there, whoever calls it, forward and backward. Two ways:
`gloo` runs N processes on this machine with float32 embeddings, compares their gradients with those of one process
that has the whole batch, and counts on the first; `alone` is the first of N ranks whose others do not exist
(losses_of_others.world), with bf16 embeddings as in training, and for the losses of others with tensors without
content, so that 64 ranks need no 64 machines. Where both were counted for the same sizes and precision they must
agree.

Bytes are those that a rank receives on a ring: a gathered or reduce-scattered vector of S bytes costs S (N-1)/N, an
all-reduced one twice that. Times come from the planner's model of networks (leanclip.planning.network), collective by
collective, with nothing hidden behind computation. Parameter gradients, which all send alike, are not in the table.
Rows that are there already are not counted again.
"""

import argparse
import contextlib
import multiprocessing
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import chart
import losses_of_others
import table
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import leanclip
from leanclip.planning.network import NETWORKS

PROVIDERS = {
    "undivided": "open_clip, default flags",
    "local": "open_clip --local-loss --gather-with-grad",
    "disco": "DisCo-CLIP",
    "leanclip infonce": "leanclip infonce",
    "leanclip fastclip-v3": "leanclip fastclip-v3",
}
SHOWN = {"nvlink": "NVLink", "infiniband": "InfiniBand, a card per GPU", "25gbe": "25 GbE"}
FIELDS = (
    "provider", "ranks", "per_rank", "batch", "dim", "dtype", "how", "collectives", "gathered_bytes",
    "scattered_bytes", "summed_bytes", "received_bytes", *(f"{name}_ms" for name in SHOWN), "gradient_difference",
    *table.PROVENANCE,
)  # fmt: skip
KEY = 7  # so many fields say what a row is of
KINDS = {
    "allgather_": "gathered", "_allgather_base_": "gathered", "reduce_scatter_": "scattered",
    "_reduce_scatter_base_": "scattered", "allreduce_": "summed",
}  # fmt: skip
PARAMETERS = 151_277_313  # of a ViT-B-32, for scale


class Call(NamedTuple):
    kind: str
    bytes: int  # of the whole vector


class Counter(TorchDispatchMode):
    """Writes down the collectives that are called while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.split("::")[1]
            if name not in KINDS:
                raise RuntimeError(f"{name} is a collective that this table does not know")
            self.calls.append(Call(KINDS[name], max(size(argument) for argument in args)))
        return func(*args, **(kwargs or {}))


def size(argument: Any) -> int:
    if isinstance(argument, Tensor):
        return argument.nbytes
    return sum(map(size, argument)) if isinstance(argument, list | tuple) else 0


def step(provider: str, image: Tensor, text: Tensor, ids: Tensor, samples: int) -> list[Call]:
    """The collectives of one step's loss, forward and backward."""
    kind, _, name = provider.partition(" ")
    if kind == "leanclip":
        stateful = name.startswith("fastclip")
        ours = leanclip.create_loss(name, num_samples=samples if stateful else None)
        ours.set_epoch(0, 2)
        with Counter() as counter:
            ours(image, text, ids if stateful else None).loss.backward()
        return counter.calls
    loss = losses_of_others.MAKERS[provider]()
    scale = torch.tensor(1 / 0.07, requires_grad=True)
    with Counter() as counter:
        loss(image, text, scale).backward()
    return counter.calls


def alone(provider: str, ranks: int, share: int, dim: int, dtype: torch.dtype) -> list[Call]:
    with losses_of_others.world(ranks), contents(provider.startswith("leanclip")):
        image, text = (torch.randn(share, dim).to(dtype).requires_grad_() for _ in range(2))
        return step(provider, image, text, torch.arange(share), ranks * share)


@contextlib.contextmanager
def contents(real: bool) -> Iterator[None]:
    with contextlib.nullcontext() if real else FakeTensorMode():
        yield


def one_of_many(rank: int, ranks: int, share: int, dim: int, folder: str) -> None:
    """What a process of the gloo group does; each leaves its gradients, the first its calls."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    found: dict[str, Any] = {}
    for provider in PROVIDERS:
        image, text = (rows.requires_grad_() for rows in embeddings(rank, share, dim))
        with losses_of_others.as_nccl():
            calls = step(provider, image, text, torch.arange(share) + rank * share, ranks * share)
        assert image.grad is not None and text.grad is not None
        found[provider] = {"calls": [tuple(call) for call in calls], "gradient": torch.cat([image.grad, text.grad])}
    torch.save(found, f"{folder}/{rank}")
    dist.barrier()
    dist.destroy_process_group()


def embeddings(rank: int, share: int, dim: int) -> list[Tensor]:
    """Of a rank: images and texts."""
    draw = torch.Generator().manual_seed(rank)
    return [F.normalize(torch.randn(share, dim, generator=draw), dim=1) for _ in range(2)]


def of_one_process(provider: str, ranks: int, share: int, dim: int) -> Tensor:
    """The gradients of the whole batch's mean loss, ordered as those of the ranks are."""
    parts = [embeddings(rank, share, dim) for rank in range(ranks)]
    image, text = (torch.cat(several).requires_grad_() for several in zip(*parts, strict=True))
    step(provider, image, text, torch.arange(ranks * share), ranks * share)
    assert image.grad is not None and text.grad is not None
    pairs = zip(image.grad.chunk(ranks), text.grad.chunk(ranks), strict=True)
    return torch.cat([rows for pair in pairs for rows in pair])


def together(ranks: int, share: int, dim: int) -> dict[str, tuple[list[Call], float]]:
    """Of each provider in a real group of processes: its calls, and how far its gradients are from one process's.

    Each rank's gradients are N times those of the mean, which is taken over the ranks later, but for open_clip's
    default flags, whose are not."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=one_of_many, args=(rank, ranks, share, dim, folder)) for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(300)
        if any(process.exitcode != 0 for process in processes):
            raise RuntimeError(f"processes ended with {[process.exitcode for process in processes]}")
        everyones = [torch.load(f"{folder}/{rank}", weights_only=True) for rank in range(ranks)]
    found = {}
    for name in PROVIDERS:
        ours = torch.cat([everyone[name]["gradient"] for everyone in everyones])
        kind = name if name.startswith("leanclip") else "undivided"  # the others' are all that one, alone
        right = of_one_process(kind, ranks, share, dim) * (1 if name == "undivided" else ranks)
        error = ((ours - right).norm() / right.norm()).item()
        print(f"{ranks} processes: gradients of {name} differ from one process's by {error:.1e}")
        if error > 1e-5:
            raise RuntimeError(f"{name} on {ranks} processes computes something else than one process")
        found[name] = [Call(*call) for call in everyones[0][name]["calls"]], error
    return found


def row_of(
    provider: str, ranks: int, share: int, dim: int, dtype: str, how: str, calls: list[Call],
    difference: float | None = None,
) -> dict[str, Any]:  # fmt: skip
    totals = {kind: sum(call.bytes for call in calls if call.kind == kind) for kind in set(KINDS.values())}
    passes = sum(totals.values()) + totals["summed"]
    times = {
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
        "how": how, "collectives": len(calls), "received_bytes": round(passes * (ranks - 1) / ranks),
        **{f"{kind}_bytes": total for kind, total in totals.items()},
        **{f"{name}_ms": round(1e3 * seconds, 4) for name, seconds in times.items()},
        "gradient_difference": "" if difference is None else f"{difference:.1e}", **table.provenance(),
    }  # fmt: skip


def run(arguments: argparse.Namespace) -> None:
    known = {tuple(row[name] for name in FIELDS[:KEY]) for row in table.rows(arguments.output)}

    def keep(row: dict[str, Any]) -> None:
        if tuple(str(row[name]) for name in FIELDS[:KEY]) in known:
            return
        table.append(arguments.output, FIELDS, row)
        print(
            f"{row['provider']:21s} N={row['ranks']:<3d} b={row['per_rank']:<5d} {row['dtype']:9s} {row['how']:5s}"
            f" {row['collectives']} collectives, {row['received_bytes'] / 1e6:,.3f} MB received",
            flush=True,
        )

    dim = arguments.dim
    for ranks in arguments.processes:
        share = arguments.per_rank
        wanted = (str(ranks), str(share), str(ranks * share), str(dim), "float32", "gloo")
        if all((provider, *wanted) in known for provider in PROVIDERS):
            continue
        for provider, (calls, difference) in together(ranks, share, dim).items():
            row = row_of(provider, ranks, share, dim, "float32", "gloo", calls, difference)
            again = alone(provider, ranks, share, dim, torch.float32)
            if sorted(again) != sorted(calls):
                raise RuntimeError(f"{provider} on {ranks} ranks: alone {again}, together {calls}")
            keep(row)
    shares = [(ranks, arguments.per_rank) for ranks in arguments.ranks]
    shares += [(ranks, arguments.batch // ranks) for ranks in arguments.ranks if ranks >= 8]
    for ranks, share in dict.fromkeys(shares):
        for provider in PROVIDERS:
            if (provider, str(ranks), str(share), str(ranks * share), str(dim), "bfloat16", "alone") not in known:
                calls = alone(provider, ranks, share, dim, torch.bfloat16)
                keep(row_of(provider, ranks, share, dim, "bfloat16", "alone", calls))


def received(rows: list[dict[str, str]], counts: list[int]) -> list[str]:
    """A table of megabytes over ranks."""
    cells = {(row["provider"], int(row["ranks"])): int(row["received_bytes"]) / 1e6 for row in rows}
    lines = ["| | " + " | ".join(f"N = {count}" for count in counts) + " |", "|---|" + "---|" * len(counts)]
    for provider, name in PROVIDERS.items():
        lines.append(f"| {name} | " + " | ".join(f"{cells[provider, count]:,.2f}" for count in counts) + " |")
    return lines


def write(output: Path) -> None:
    """Tables and a plot beside the rows."""
    rows = table.rows(output)
    if not rows:
        sys.exit(f"{output} has no rows")
    trained = [row for row in rows if row["how"] == "alone"]
    per_rank, dim = trained[0]["per_rank"], trained[0]["dim"]
    fixed = [row for row in trained if row["per_rank"] == per_rank]
    counts = sorted({int(row["ranks"]) for row in fixed})
    most = counts[-1]
    other = next((row["batch"] for row in trained if row["per_rank"] != per_rank), None)
    cells = {row["provider"]: row for row in fixed if int(row["ranks"]) == most}
    real = [row for row in rows if row["how"] == "gloo"]
    checked = [str(count) for count in sorted({int(row["ranks"]) for row in real})]
    far = max(float(row["gradient_difference"]) for row in real)
    text = [
        f"What a rank receives for the loss in one step, MB, d = {dim}, bf16 embeddings, counted from the calls. On"
        f" {', '.join(checked)} real processes (float32) the calls were the same, and the gradients those of one"
        f" process with the whole batch, to {far:.1e} of their norm: of open_clip's default flags after they are"
        " multiplied by N, which Adam does not see. DisCo-CLIP's loss is written again here, after its paper, with"
        " the collectives of its published code.",
        "",
        f"{per_rank} samples on each rank:",
        "",
        *received(fixed, counts),
        "",
    ]
    if other is not None:
        whole = [row for row in trained if row["batch"] == other]
        text += [f"{int(other):,} samples in all:", ""]
        text += [*received(whole, sorted({int(row["ranks"]) for row in whole})), ""]
    text += [
        f"Predicted time of these collectives, ms, hidden behind nothing, N = {most}, {per_rank} samples on each;"
        " NVLink between all of them, or hosts of 8 with NVLink inside:",
        "",
        "| | collectives | " + " | ".join(SHOWN.values()) + " |",
        "|---|---|" + "---|" * len(SHOWN),
    ]
    for provider, name in PROVIDERS.items():
        times = " | ".join(f"{float(cells[provider][f'{network}_ms']):,.2f}" for network in SHOWN)
        text.append(f"| {name} | {cells[provider]['collectives']} | {times} |")
    sent = {provider: int(row["received_bytes"]) for provider, row in cells.items()}
    parameters = 8 * PARAMETERS * (most - 1) / most / 1e6
    text += [
        "",
        f"At N = {most} leanclip's InfoNCE receives {sent['leanclip infonce'] / sent['local']:.2f} of what"
        f" open_clip's local loss does, and {sent['leanclip infonce'] / sent['disco']:.2f} of DisCo-CLIP. open_clip's"
        " default flags send no gradients either, and pay with the whole B x B matrix on every rank. All of them also"
        f" all-reduce the parameters' gradients: {parameters:,.0f} MB for a ViT-B-32 in float32, beside which"
        f" {sent['disco'] / 1e6:,.0f} MB or {sent['leanclip infonce'] / 1e6:,.0f} MB for the loss are little: a step"
        " gains less than these ratios. Inf-CL's ring was not counted: its kernels need a GPU.",
        "",
        f"![megabytes received over ranks]({output.with_suffix('.svg').name})",
        "",
    ]
    curves: dict[str, list[tuple[float, float]]] = {name: [] for name in PROVIDERS.values()}
    for row in fixed:
        if int(row["ranks"]) > 1:
            curves[PROVIDERS[row["provider"]]].append((float(row["ranks"]), int(row["received_bytes"]) / 1e6))
    chart.draw(
        output.with_suffix(".svg"),
        {name.replace(" --gather-with-grad", ""): curve for name, curve in curves.items()},
        title=f"Received by a rank for the loss in a step, {per_rank} samples on each, d = {dim}, bf16",
        x_label="ranks (the three lowest curves lie on each other)",
        y_label="MB",
        log=(True, True),
        x_ticks=[float(count) for count in counts if count > 1],
    )
    output.with_suffix(".md").write_text("\n".join(text))
    print("\n".join(text))


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument(
        "--processes", nargs="+", type=int, default=[2, 4, 8], help="counted with real processes, too"
    )
    parser.add_argument("--per-rank", type=int, default=512)
    parser.add_argument("--batch", type=int, default=32768, help="also this global batch, on 8 ranks and more")
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--output", type=Path, default=table.RESULTS / "communication.csv")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", action="store_true", help="count nothing: plot and tables from the rows")
    arguments = parser.parse_args(given)
    if arguments.write:
        write(arguments.output)
        return 0
    if arguments.quick:
        with tempfile.TemporaryDirectory() as name:
            arguments.output = Path(name) / "communication.csv"
            arguments.ranks, arguments.processes, arguments.per_rank = [1, 2, 8], [2], 16
            arguments.batch, arguments.dim = 64, 32
            run(arguments)
            write(arguments.output)
        return 0
    run(arguments)
    write(arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Measured and predicted time of the losses' collectives on a slow network.

    python benchmarks/evidence/network_time.py             # the whole table, as root on Linux: three minutes
    python benchmarks/evidence/network_time.py --quick     # small sizes, keeps nothing

2 to 4 gloo processes, each in a network namespace whose wire to a switch is limited to 1 Gbit/s in each direction
(tbf). The collectives of one step of the loss, forward and backward, are those that communication.py counts, in
float32. Each is repeated by itself and timed on the first process, from a barrier until it is complete; the bytes
sent are those of the wire. Predictions come from the planner's model of networks (leanclip.planning.network). Stored
rows are not measured again.
"""

import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import communication
import line_chart
import measurements
import torch
import torch.distributed as dist
from command_line import INTERNAL, Flag, command_line
from communication import Call
from measurements import Table
from network_hosts import WIRE, Host, connected_hosts, output_of_first

from leanclip.planning.network import NETWORKS

MEGABITS, PORT = 1000, 29500
RATE = MEGABITS / 8 * 1e6  # bytes/s
HOP = 1e-4  # seconds to another process through this machine's kernel
NETWORK = replace(NETWORKS["25gbe"], inside=RATE, between=RATE, hop_inside=HOP, hop_between=HOP, per_host=1)
PROVIDERS = {name: communication.PROVIDERS[name] for name in ("leanclip fastclip-v3", "local", "disco")}
LARGE = 1e6  # bytes: what is sent in less time than a busy machine needs to wake a process is not compared


def repeat_calls(rank: int, ranks: int, arguments: Any) -> None:
    """One process of the group. The first prints the milliseconds of all repeats and the bytes sent, call by call."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{arguments.address}:{PORT}", rank=rank, world_size=ranks)
    sent = Path(f"/sys/class/net/{WIRE}/statistics/tx_bytes")
    for kind, size in json.loads(arguments.calls):
        collective, times, volumes = prepare(kind, size, ranks), [], []
        for _ in range(1 + arguments.repeats):  # the first connects the processes
            dist.barrier()
            before, began = int(sent.read_text()), time.perf_counter()
            collective()
            times.append(1e3 * (time.perf_counter() - began))
            volumes.append(int(sent.read_text()) - before)
        if rank == 0:
            print(json.dumps([times[1:], statistics.median(volumes[1:])]), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def prepare(kind: str, size: int, ranks: int) -> Callable[[], object]:
    """A collective of a vector of `size` bytes."""
    whole, part = torch.zeros(size // 4), torch.zeros(size // 4 // ranks)
    return {
        "gathered": lambda: dist.all_gather_into_tensor(whole, part),
        "scattered": lambda: dist.reduce_scatter_tensor(part, whole),
        "summed": lambda: dist.all_reduce(whole),
    }[kind]


def predicted(call: Call, ranks: int) -> float:
    """Milliseconds. gloo has no reduce-scatter of its own: it all-reduces."""
    return 1e3 * (NETWORK.gather if call.kind == "gathered" else NETWORK.sum)(call.bytes, ranks)


def measure(provider: str, hosts: list[Host], arguments: Any) -> Iterator[dict[str, Any]]:
    """A row for each collective of a step."""
    ranks, share, dim = len(hosts), arguments.per_rank, arguments.dim
    calls = communication.count_alone(provider, ranks, share, dim, torch.float32)
    command = [sys.executable, __file__, "--calls", json.dumps(calls), "--repeats", str(arguments.repeats)]
    command += ["--address", hosts[0].address, "--rank"]
    commands = [host.command([*command, str(rank), str(ranks)]) for rank, host in enumerate(hosts)]
    output = output_of_first(commands, [{"GLOO_SOCKET_IFNAME": WIRE}] * ranks, seconds=600)
    for number, (call, line) in enumerate(zip(calls, output.splitlines(), strict=True)):
        times, sent = json.loads(line)
        yield {
            "provider": provider, "processes": ranks, "per_rank": share, "dim": dim, "megabits": MEGABITS,
            "call": number, "kind": call.kind, "bytes": call.bytes, "sent_bytes": round(sent), "repeats": len(times),
            "ms": round(statistics.median(times), 3), "low_ms": round(min(times), 3),
            "high_ms": round(max(times), 3), "predicted_ms": round(predicted(call, ranks), 3),
            **measurements.provenance(),
        }  # fmt: skip


def run(arguments: Any) -> None:
    stored = {(row["provider"], int(row["processes"])) for row in measurements.rows(arguments.output)}
    with connected_hosts(max(arguments.processes)) as hosts:
        for host in hosts:
            host.shape(MEGABITS)
        for ranks, provider in itertools.product(arguments.processes, PROVIDERS):
            if (provider, ranks) not in stored:
                for row in measure(provider, hosts[:ranks], arguments):
                    measurements.append(arguments.output, row)
                    print(
                        f"{provider:21s} N={ranks} {row['kind']:9s} {row['bytes']:>10,} bytes,"
                        f" {row['sent_bytes']:>10,} sent {row['ms']:>8} ms, predicted {row['predicted_ms']} ms"
                    )


def tables(path: Path) -> dict[str, Table]:
    """Of the large collectives: their sums by loss, and how far the measurements are from the prediction."""
    large = [row for row in measurements.rows(path) if float(row["bytes"]) > LARGE]
    counts = sorted({int(row["processes"]) for row in large})
    lines = []
    for provider, name in PROVIDERS.items():
        cells = []
        for ranks in counts:
            rows = [row for row in large if (row["provider"], int(row["processes"])) == (provider, ranks)]
            total, expected = (sum(float(row[column]) for row in rows) for column in ("ms", "predicted_ms"))
            cells.append(f"{total:,.0f} / {expected:,.0f}")
        lines.append([name, *cells])
    ratios = {
        name: sorted(float(row[column]) / float(row["predicted_ms"]) for row in large)
        for name, column in (("median", "ms"), ("fastest", "low_ms"))
    }
    return {
        "network_time": Table(["loss", *(f"N = {ranks}" for ranks in counts)], lines),
        "network_ratio": Table(
            ["repeat", "least", "most"],
            [[name, f"{values[0]:.2f}", f"{values[-1]:.2f}"] for name, values in ratios.items()],
        ),
    }


def draw(path: Path) -> None:
    """Measured and predicted on processes, and predicted on GPUs from the calls that communication.py counted."""
    processes: dict[str, dict[float, list[float]]] = {}
    for row in measurements.rows(path):
        name = PROVIDERS[row["provider"]]
        for line, column in ((name, "ms"), (f"{name}, predicted", "predicted_ms")):
            processes.setdefault(line, {}).setdefault(float(row["processes"]), []).append(float(row[column]))
    counted = [row for row in measurements.rows(path.with_name("communication.csv")) if row["how"] == "alone"]
    gpus: dict[str, list[tuple[float, float]]] = {f"{name}, predicted": [] for name in PROVIDERS.values()}
    for row in counted:
        if row["provider"] in PROVIDERS and row["per_rank"] == counted[0]["per_rank"] and int(row["ranks"]) > 1:
            gpus[f"{PROVIDERS[row['provider']]}, predicted"].append((float(row["ranks"]), float(row["25gbe_ms"])))
    line_chart.draw(
        path.with_suffix(".svg"),
        {
            "gloo processes, 1 Gbit/s each": {
                name: [(ranks, sum(times)) for ranks, times in points.items()] for name, points in processes.items()
            },
            "GPUs, hosts of 8, 25 GbE": gpus,
        },
        title="Time of the loss's collectives in a step", ylabel="ms", xscale="log", yscale="log",
    )  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    arguments = command_line(
        __doc__, argv, quick={"processes": [2], "per_rank": 64, "dim": 32, "repeats": 2}, processes=[2, 3, 4],
        per_rank=2048, dim=512, repeats=25, output=measurements.RESULTS / "network_time.csv",
        rank=Flag([], INTERNAL, kind=int), calls=Flag("", INTERNAL), address=Flag("", INTERNAL),
    )  # fmt: skip
    if arguments.rank:
        rank, ranks = arguments.rank
        repeat_calls(rank, ranks, arguments)
    else:
        run(arguments)


if __name__ == "__main__":
    sys.exit(main())

"""Where the time of a step goes on several processes: computation, communication that is not hidden, overlap, other.

    python benchmarks/evidence/overlap.py                  # gloo on 1 Gbit/s, as root on Linux: fifteen minutes
    python benchmarks/evidence/overlap.py --device cuda --processes 2 --model ViT-B-32 --per-process 512
                                                           # processes of this machine, which may share a GPU
    python benchmarks/evidence/overlap.py --quick          # small sizes, processes of this machine, keeps nothing

The rows are those of `leanclip train --profile` (leanclip.planning.profile) on synthetic data, one for each
collective of a step. Without a GPU every process is in a network namespace whose wire is limited to 1 Gbit/s. Stored
rows are not measured again.
"""

import contextlib
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import line_chart
import measurements
from command_line import INTERNAL, Flag, command_line
from measurements import Table
from network_hosts import WIRE, Host, connected_hosts, output_of_first
from network_time import MEGABITS

from leanclip.config import override
from leanclip.planning.profile import profile
from leanclip.runs import TrainConfig
from leanclip.training import set_up
from leanclip.training_run import joined_processes

PARTS = {
    "computation": "computation", "overlap": "overlap", "exposed": "communication not hidden", "other": "other"
}  # fmt: skip
PORT = 29500
LOCAL = "one machine"


def profile_process(arguments: Any) -> None:
    """One process, of torchrun's variables. The first prints the result."""
    with tempfile.TemporaryDirectory() as logs:
        batch = arguments.per_process * int(os.environ["WORLD_SIZE"])
        values = {
            "train_data": f"synthetic:{4 * batch}", "model": arguments.model, "global_batch_size": batch,
            "loss": arguments.losses[0], "device": arguments.device, "workers": arguments.workers, "logs": logs,
            "precision": "fp32" if arguments.device == "cpu" else "amp_bf16",
        }  # fmt: skip
        with joined_processes(override(TrainConfig(), values, "overlap")) as (config, _):
            job = set_up(config)
            result = profile(job, steps=arguments.steps)
            if job.context.ranks.first:
                breakdown = result.breakdown()
                times = {part: 1e3 * breakdown[name] for part, name in PARTS.items()}
                collectives = [
                    [purpose, c.calls, c.bytes, 1e3 * c.alone, 1e3 * c.hidden, 1e3 * c.exposed]
                    for purpose, c in result.collectives.items()
                ]
                print(json.dumps([result.steps, 1e3 * result.step, times, collectives]), flush=True)


def measure(loss: str, hosts: list[Host | None], arguments: Any) -> Iterator[dict[str, Any]]:
    """A row for each collective of a step."""
    command = [sys.executable, __file__, "--losses", loss, "--one"]
    for name in ("device", "model", "per_process", "workers", "steps"):
        command += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    commands, environments = [], []
    for rank, host in enumerate(hosts):
        variables = {"RANK": str(rank), "WORLD_SIZE": str(len(hosts)), "MASTER_PORT": str(PORT)}
        variables |= {"LOCAL_RANK": "0" if host else str(rank), "OMP_NUM_THREADS": "1"}
        if hosts[0]:
            variables |= {"MASTER_ADDR": hosts[0].address, "GLOO_SOCKET_IFNAME": WIRE}
        commands.append(host.command(command) if host else command)
        environments.append(variables)
    output = output_of_first(commands, environments, seconds=900)
    steps, step, times, collectives = json.loads(output.splitlines()[-1])
    for purpose, calls, size, alone, hidden, exposed in collectives:
        yield {
            "loss": loss, "processes": len(hosts), "network": f"{MEGABITS} Mbit/s" if hosts[0] else LOCAL,
            "model": Path(arguments.model).stem, "per_process": arguments.per_process, "steps": steps,
            "step_ms": round(step, 2), **{f"{part}_ms": round(time, 2) for part, time in times.items()},
            "collective": purpose, "calls": calls, "bytes": round(size), "alone_ms": round(alone, 3),
            "hidden_ms": round(hidden, 3), "not_hidden_ms": round(exposed, 3), **measurements.provenance(),
        }  # fmt: skip


def run(arguments: Any) -> None:
    network = f"{MEGABITS} Mbit/s" if arguments.hosts else LOCAL
    stored = {
        (row["loss"], int(row["processes"]), row["network"], row["model"])
        for row in measurements.rows(arguments.output)
    }
    with contextlib.ExitStack() as stack:
        hosts: list[Host | None] = [None] * max(arguments.processes)
        if arguments.hosts:
            hosts = [*stack.enter_context(connected_hosts(len(hosts)))]
            for host in hosts:
                assert host is not None
                host.shape(MEGABITS)
        for count, loss in itertools.product(arguments.processes, arguments.losses):
            if (loss, count, network, Path(arguments.model).stem) not in stored:
                for row in measure(loss, hosts[:count], arguments):
                    measurements.append(arguments.output, row)


def _runs(path: Path) -> dict[tuple[str, ...], dict[str, str]]:
    keys = ("model", "network", "processes", "loss")
    return {tuple(row[key] for key in keys): row for row in measurements.rows(path)}


def tables(path: Path) -> dict[str, Table]:
    runs = [
        [*key, *(f"{float(row[f'{part}_ms']) / float(row['step_ms']):.1%}" for part in PARTS), row["step_ms"]]
        for key, row in _runs(path).items()
    ]
    collectives = [
        [row["model"], row["processes"], row["loss"], row["collective"], f"{int(row['bytes']) / 1e6:,.2f}"]
        + [f"{float(row[column]):,.1f}" for column in ("alone_ms", "hidden_ms", "not_hidden_ms")]
        for row in measurements.rows(path)
        if row["collective"] in ("embeddings", "parameter gradients")
    ]
    headings = ["model", "processes", "loss", "collective", "MB", "ms alone", "hidden", "not hidden"]
    return {
        "overlap": Table(["model", "network", "processes", "loss", *PARTS.values(), "ms"], runs),
        "overlap_collectives": Table(headings, collectives),
    }


def draw(path: Path) -> None:
    """One stacked bar for each run."""
    runs = _runs(path)
    labels = [f"{model}, {network}, {processes} x {loss}" for model, network, processes, loss in runs]
    left = [0.0] * len(runs)
    size = (10, 1.5 + 0.45 * len(runs))
    with line_chart.figure(path.with_suffix(".svg"), figsize=size) as (figure, axes):
        for part, name in PARTS.items():
            shares = [100 * float(row[f"{part}_ms"]) / float(row["step_ms"]) for row in runs.values()]
            axes.barh(labels, shares, left=left, label=name)
            left = [a + b for a, b in zip(left, shares, strict=True)]
        axes.set_axisbelow(True)
        axes.invert_yaxis()
        axes.set(xlabel="% of a step", xlim=(0, 100))
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
        figure.suptitle("Where the time of a step of leanclip goes", x=0.01, ha="left")


def main(argv: list[str] | None = None) -> None:
    small_vit = str(Path(__file__).with_name("small_vit.json"))
    arguments = command_line(
        __doc__, argv, quick={"model": "leanclip-tiny", "processes": [2], "per_process": 8, "steps": 2},
        losses=["infonce", "fastclip-v3"], processes=[2, 4], device="cpu", model=small_vit, per_process=64, workers=0,
        steps=10, output=measurements.RESULTS / "overlap.csv", one=Flag(False, INTERNAL),
    )  # fmt: skip
    arguments.hosts = arguments.device == "cpu" and not arguments.quick
    if arguments.one:
        profile_process(arguments)
        return
    run(arguments)
    measurements.show(tables(arguments.output))


if __name__ == "__main__":
    sys.exit(main())

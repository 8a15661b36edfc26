"""How this process was started, and joining the others: torchrun, SLURM's srun, or nobody."""

import contextlib
import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from leanclip.distributed.heartbeat import Watch
from leanclip.errors import UserError

PORT = 29500


@dataclass(frozen=True)
class Launch:
    """This process among those that were started together."""

    rank: int
    size: int
    local_rank: int  # among those of this host: it chooses the GPU
    by: str  # torchrun, srun, or alone
    address: str = "127.0.0.1"
    port: int = PORT


def launched(environment: Mapping[str, str] = os.environ) -> Launch:
    """What the launcher says in the environment. torchrun inside a SLURM job is torchrun."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        try:
            return Launch(
                int(environment["RANK"]),
                int(environment["WORLD_SIZE"]),
                int(environment.get("LOCAL_RANK", 0)),
                "torchrun",
                environment.get("MASTER_ADDR", "127.0.0.1"),
                int(environment.get("MASTER_PORT", PORT)),
            )
        except ValueError as error:
            raise UserError(
                f"the launcher's environment is broken (RANK, WORLD_SIZE, LOCAL_RANK): {error}"
            ) from error
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", 1))  # set by srun only: a batch script itself is alone
    if tasks > 1:
        # Several jobs may share a host: the port follows from the job's number, as all its tasks know it.
        port = 20000 + int(environment.get("SLURM_JOB_ID", 0)) % 20000
        return Launch(
            int(environment["SLURM_PROCID"]),
            tasks,
            int(environment.get("SLURM_LOCALID", 0)),
            "srun",
            environment.get("MASTER_ADDR", first_host(environment.get("SLURM_STEP_NODELIST", "127.0.0.1"))),
            int(environment.get("MASTER_PORT", port)),
        )
    return Launch(0, 1, 0, "alone")


def restarted(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun started this process again, after one of them failed."""
    return int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def launch_id(environment: Mapping[str, str] = os.environ) -> str | None:
    """What all starts of processes by one torchrun have in common; none without one."""
    if launched(environment).by != "torchrun":
        return None
    return f"{environment.get('TORCHELASTIC_RUN_ID', 'none')} {start_time():%Y-%m-%dT%H:%M:%S}"


def start_time() -> datetime:
    """When the job was started: under torchrun when that was, which stays when it starts its processes again."""
    if launched().by == "torchrun":
        with contextlib.suppress(OSError, ValueError, IndexError):
            ticks = int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19])
            booted = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
            return datetime.fromtimestamp(int(booted.split()[1]) + ticks / os.sysconf("SC_CLK_TCK"))
    return datetime.now()


def first_host(nodes: str) -> str:
    """The first name of a SLURM node list: node[03-05,09],other -> node03."""
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", nodes).partition(",")[0]


@contextlib.contextmanager
def joined(launch: Launch, device: torch.device, *, timeout: float, always: bool = False) -> Iterator[Watch]:
    """Be one of the processes while inside. One alone needs no group, unless `always`.

    Yields the watch over the others: a rank that dies or hangs ends this process too, within `timeout` seconds and
    with a message that names it.
    """
    if device.index is not None and device.type == "cuda":
        torch.cuda.set_device(device)
    if launch.size == 1 and not always:
        yield Watch(None, launch.rank, launch.size, timeout)
        return
    store: Store = HashStore()
    try:
        if launch.size > 1:
            # torchrun's agent keeps the store; elsewhere rank 0 does.
            agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            tcp = TCPStore(
                launch.address,
                launch.port,
                launch.size,
                is_master=launch.rank == 0 and not agent,
                timeout=timedelta(seconds=timeout),
                wait_for_workers=False,
            )
            store = PrefixStore(f"leanclip/{attempt}", tcp)
        dist.init_process_group(
            _backend(store, launch, device),
            store=store,
            rank=launch.rank,
            world_size=launch.size,
            timeout=timedelta(seconds=2 * timeout + 30),  # the watch speaks first, and knows more
        )
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"rank {launch.rank} of {launch.size} did not meet the others at {launch.address}:{launch.port} within"
            f" {timeout:.0f} s: is every process started, and the address reachable? ({reason})"
        ) from error
    watch = Watch(store, launch.rank, launch.size, timeout)
    watch.start()
    failed = True
    try:
        yield watch
        failed = False
    except UserError:
        raise
    except (RuntimeError, OSError) as error:
        # Where another rank is the cause, that is the news, not the collective in which this one noticed.
        watch.explain(error)
        raise
    finally:
        watch.stop(failed=failed)
        with contextlib.suppress(Exception):
            if not failed:
                dist.barrier()  # whoever keeps the store leaves with the last
                dist.destroy_process_group()  # after a failure it might wait for what is still on its way


def device_for(launch: Launch, name: str | None) -> str:
    """The device of this process: the one asked for, or a GPU of its own if the host has GPUs."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and launch.size > 1:
        return f"cuda:{launch.local_rank % max(1, torch.cuda.device_count())}"
    return name


def _backend(store: Store, launch: Launch, device: torch.device) -> str:
    """NCCL between GPUs; gloo where there are none, or where two ranks share one, which NCCL refuses."""
    place = f"{socket.gethostname()} cpu {launch.rank}"
    if device.type == "cuda":
        place = f"{socket.gethostname()} cuda {torch.cuda.get_device_properties(device).uuid}"
    store.set(f"place/{launch.rank}", place)
    places = [store.get(f"place/{rank}").decode() for rank in range(launch.size)]
    if all(" cuda " in other for other in places) and len(set(places)) == len(places):
        return "cpu:gloo,cuda:nccl"
    if device.type == "cuda" and launch.rank == 0:
        print(
            "leanclip: processes share a GPU, so they talk through gloo, slowly; give each its own", file=sys.stderr
        )
    return "gloo"

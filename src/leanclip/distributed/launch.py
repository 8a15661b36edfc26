"""Detects how this process was started (torchrun, srun or alone) and joins the process group."""

import contextlib
import os
import re
import socket
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from leanclip.distributed.heartbeat import Heartbeat
from leanclip.errors import UserError, first_line

PORT = 29500
AGENT_TIMEOUT = 30.0  # seconds to connect to torchrun's store, which may have been killed
ASK_INTERVAL = 0.05  # seconds between rank 0's looks for ranks that ask to join


@dataclass(frozen=True)
class Launch:
    """This process among those that were started together."""

    rank: int
    size: int
    local_rank: int  # on this host; selects the GPU
    by: str  # torchrun, srun or alone
    address: str = "127.0.0.1"
    port: int = PORT


def detect_launch(environment: Mapping[str, str] = os.environ) -> Launch:
    """Read the launcher's environment variables. torchrun inside a SLURM job counts as torchrun."""
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
                f"RANK, WORLD_SIZE, LOCAL_RANK and MASTER_PORT must be whole numbers: {error}",
                code="launch.bad_environment",
            ) from error
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", 1))  # set by srun only, not in the batch script
    if tasks > 1:
        # Several jobs may share a host, so the port follows from the job id.
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


def launch_id(environment: Mapping[str, str] = os.environ) -> str | None:
    """Identifies one torchrun, the same for all its restarts; None without torchrun."""
    run = environment.get("TORCHELASTIC_RUN_ID")  # other launchers that set RANK do not set it
    return run and f"{run} {start_time():%Y-%m-%dT%H:%M:%S}"


def start_time() -> datetime:
    """When the job started: under torchrun the start of torchrun itself, which restarts of its processes keep."""
    if detect_launch().by == "torchrun":
        with contextlib.suppress(OSError, ValueError, IndexError):
            ticks = int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19])
            booted = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
            return datetime.fromtimestamp(int(booted.split()[1]) + ticks / os.sysconf("SC_CLK_TCK"))
    return datetime.now()


def first_host(nodes: str) -> str:
    """The first name of a SLURM node list: node[03-05,09],other -> node03."""
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", nodes).partition(",")[0]


@contextlib.contextmanager
def process_group(
    launch: Launch, device: torch.device, *, timeout: float, always: bool = False
) -> Iterator[Heartbeat]:
    """Join the process group while inside. A single process needs none, unless `always`.

    Yields the heartbeat: a rank that dies or hangs ends this process too, within `timeout` seconds and with a message
    that names the rank.
    """
    if device.index is not None and device.type == "cuda":
        torch.cuda.set_device(device)
    if launch.size == 1 and not always:
        yield Heartbeat(None, launch.rank, launch.size, timeout)
        return
    try:
        store = join_store(launch, timeout)
        dist.init_process_group(
            _backend(store, launch, device),
            store=store,
            rank=launch.rank,
            world_size=launch.size,
            timeout=timedelta(seconds=2 * timeout + 30),  # longer than the heartbeat's, whose message says more
        )
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"rank {launch.rank} of {launch.size} could not connect to {launch.address}:{launch.port} within"
            f" {timeout:.0f} s: check that every process is started and the address is reachable"
            f" ({first_line(error)})",
            code="launch.no_connection",
        ) from error
    heartbeat = Heartbeat(store, launch.rank, launch.size, timeout)
    heartbeat.start()
    failed = True
    try:
        yield heartbeat
        failed = False
    except UserError:
        raise
    except (RuntimeError, OSError):
        heartbeat.exit_if_rank_lost()  # then that is the cause, not the collective that failed
        raise
    finally:
        heartbeat.stop(failed=failed)
        with contextlib.suppress(Exception):
            if not failed:
                dist.barrier()  # the process that hosts the store ends last
                dist.destroy_process_group()  # after a failure it might wait for unfinished collectives


def join_store(launch: Launch, timeout: float, environment: Mapping[str, str] = os.environ) -> Store:
    """A store that the ranks of this start share and that holds no keys of an earlier start."""
    if launch.size == 1:
        return HashStore()
    # torchrun's agent hosts the store, and has started it before its ranks; elsewhere rank 0 does.
    agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    tcp = TCPStore(
        launch.address,
        launch.port,
        launch.size,
        is_master=launch.rank == 0 and not agent,
        timeout=timedelta(seconds=min(timeout, AGENT_TIMEOUT) if agent else timeout),
        wait_for_workers=False,
    )
    tcp.set_timeout(timedelta(seconds=timeout))
    store = PrefixStore("leanclip", tcp)
    # The agent's store keeps the keys of earlier rounds; that of rank 0 is new with each rank 0.
    return PrefixStore(agree_on_round(store, launch.rank, launch.size, timeout), store) if agent else store


def agree_on_round(store: Store, rank: int, size: int, timeout: float) -> str:
    """A name for this start of the ranks that none before had, the same on all ranks.

    torchrun passes none: every host counts its own restarts, and a change of hosts does not count. So each rank asks
    with a number that nobody used before, and only a rank 0 that is running can have answered it. What dead processes
    asked is answered, too, but they do not confirm, and rank 0 continues until all ranks have.
    """
    proposed = uuid.uuid4().hex
    if rank > 0:
        store.set(f"asks/{rank}", proposed)
        name = store.get(f"answer/{proposed}").decode()
        store.set(f"{name}/joined/{rank}", "")
        return name
    answered: set[str] = set()
    missing, deadline = set(range(1, size)), time.monotonic() + timeout
    while missing:
        for other in sorted(missing):
            if store.check([f"{proposed}/joined/{other}"]):
                missing.remove(other)
            elif store.check([f"asks/{other}"]) and (asked := store.get(f"asks/{other}").decode()) not in answered:
                store.set(f"answer/{asked}", proposed)
                answered.add(asked)
        if missing and time.monotonic() > deadline:
            raise RuntimeError(f"rank {', '.join(map(str, sorted(missing)))} did not join")
        time.sleep(ASK_INTERVAL if missing else 0)
    return proposed


def device_for(launch: Launch, name: str | None) -> str:
    """The device of this process: the requested one, or a separate GPU for each process if the host has GPUs."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and launch.size > 1:
        return f"cuda:{launch.local_rank % max(1, torch.cuda.device_count())}"
    return name


def _backend(store: Store, launch: Launch, device: torch.device) -> str:
    """NCCL between GPUs; gloo on CPUs, or where two ranks share a GPU, which NCCL does not support."""
    device_name = f"{socket.gethostname()} cpu {launch.rank}"
    if device.type == "cuda":
        device_name = f"{socket.gethostname()} cuda {torch.cuda.get_device_properties(device).uuid}"
    store.set(f"device/{launch.rank}", device_name)
    device_names = [store.get(f"device/{rank}").decode() for rank in range(launch.size)]
    if all(" cuda " in name for name in device_names) and len(set(device_names)) == len(device_names):
        return "cpu:gloo,cuda:nccl"
    if device.type == "cuda" and launch.rank == 0:
        print(
            "leanclip: processes share a GPU and communicate over gloo, which is slow; use one GPU per process",
            file=sys.stderr,
        )
    return "gloo"

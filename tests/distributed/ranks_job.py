"""Starts N processes on this machine and collects the result of each."""

import contextlib
import multiprocessing
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# A server that has imported the slow modules once and forks for each process. CUDA needs fresh processes.
CONTEXT: Any = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
CONTEXT.set_forkserver_preload(["leanclip.training", "torch.distributed.fsdp"])


def run_ranks(call, size, folder, *arguments, timeout=280):
    """The results of `call(ranks, folder, *arguments)` on each of N gloo processes."""
    folder = Path(folder)
    rendezvous = folder / f"rendezvous-{len(list(folder.glob('rendezvous-*')))}"
    processes = [
        CONTEXT.Process(target=_one, args=(call, rank, size, rendezvous, folder, *arguments)) for rank in range(size)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(timeout)
        errors = [path.read_text() for path in sorted(folder.glob(f"{rendezvous.name}-error-*"))]
        assert not errors, "\n".join(error[-2000:] for error in errors)
        assert all(process.exitcode == 0 for process in processes), [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [torch.load(f"{rendezvous}-out-{rank}", weights_only=True) for rank in range(size)]


def _one(call, rank, size, rendezvous, folder, *arguments):
    torch.set_num_threads(1)
    try:
        from leanclip.distributed import Ranks

        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
        torch.save(call(Ranks.current(), folder, *arguments), f"{rendezvous}-out-{rank}")
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        Path(f"{rendezvous}-error-{rank}").write_text(traceback.format_exc())
        sys.stderr.flush()
        os._exit(1)


def processes_where(field, value):
    """Live processes by a field of /proc/PID/stat: 1 is the parent, 2 the group, 3 the session."""
    pids = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[field]) == value and fields[0] != "Z":
                pids.append(int(stat.parent.name))
    return sorted(pids)

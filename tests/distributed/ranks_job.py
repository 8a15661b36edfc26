"""Start N processes on this machine and collect what each finds."""

import multiprocessing
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# A server that has imported the slow modules once and forks itself for each process. CUDA wants fresh ones.
CONTEXT: Any = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
CONTEXT.set_forkserver_preload(["leanclip.training", "torch.distributed.fsdp"])


def run_ranks(call, size, folder, *arguments, timeout=280):
    """What `call(ranks, folder, *arguments)` returns on each of N gloo processes."""
    folder = Path(folder)
    meeting = folder / f"meeting-{len(list(folder.glob('meeting-*')))}"
    processes = [
        CONTEXT.Process(target=_one, args=(call, rank, size, meeting, folder, *arguments)) for rank in range(size)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(timeout)
        errors = [path.read_text() for path in sorted(folder.glob(f"{meeting.name}-error-*"))]
        assert not errors, "\n".join(error[-2000:] for error in errors)
        assert all(process.exitcode == 0 for process in processes), [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [torch.load(f"{meeting}-out-{rank}", weights_only=True) for rank in range(size)]


def _one(call, rank, size, meeting, folder, *arguments):
    torch.set_num_threads(1)
    try:
        from leanclip.distributed import Ranks

        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
        found = call(Ranks.current(), folder, *arguments)
        torch.save(found, f"{meeting}-out-{rank}")
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        Path(f"{meeting}-error-{rank}").write_text(traceback.format_exc())
        sys.stderr.flush()
        os._exit(1)

"""One rank of the agreement tests: sets up a run that differs from that of the other rank."""

import os
from pathlib import Path

import torch
from shard_files import sound, write_shard

from leanclip.config import override
from leanclip.errors import UserError
from leanclip.runs import TrainConfig
from leanclip.training import resolve, set_up


def disagree(ranks, folder, what):
    """Each host has a copy of the data, which is allowed unless it differs."""
    copy = Path(folder) / f"host-{ranks.rank}"
    copy.mkdir()
    for number, name in enumerate("ab"):
        write_shard(copy / f"{name}.tar", sound(4 + number, start=10 * number))
    names = "b,a" if what == "order" and ranks.rank == 1 else "a,b"
    values = {"train_data": f"{copy}/{{{names}}}.tar", "global_batch_size": 4, "warmup": 0}
    if what == "rate" and ranks.rank == 1:
        values["lr"] = 0.5
    try:
        resolve(override(TrainConfig(), values, "test"))
    except UserError as error:
        return {"error": str(error)}
    return {"error": ""}


def chosen_threads(ranks, folder):
    """The threads of a run on a host with four cores, after measured passes; and a gradient that is left."""
    os.environ.pop("OMP_NUM_THREADS", None)
    os.cpu_count = lambda: 4
    torch.set_num_threads(4)
    values = {"global_batch_size": 9, "workers": 0, "device": "cpu", "logs": str(folder), "name": "run"}
    job = set_up(override(TrainConfig(), values, "test"))
    return {"threads": job.threads, "gradients": sum(p.grad is not None for p in job.context.parameters)}

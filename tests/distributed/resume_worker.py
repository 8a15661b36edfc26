"""One rank of the resume tests: a part of a run of six steps, in float64, without batch norm."""

import contextlib
import os
from pathlib import Path

from rich.console import Console
from training_worker import vit_file

from leanclip.config import override
from leanclip.data.datasets import BUNDLED
from leanclip.distributed import launch_id
from leanclip.runs import RunDirectory, TrainConfig
from leanclip.runs.config import ParallelConfig
from leanclip.runs.stopping import Stopping
from leanclip.training import set_up, train
from leanclip.training_run import continued, prepare


class Killed(BaseException):
    pass


class KilledAfter(Stopping):
    """Ends a run without a last checkpoint."""

    def __init__(self, step):
        super().__init__()
        self.step = step

    def after(self, step):
        if step > self.step:
            raise Killed


def begin(values, **parallel):
    """The job of a run with these settings and its directory, which the first rank has prepared."""
    job = set_up(override(TrainConfig(parallel=ParallelConfig(**parallel)), values, "test"))
    directory = RunDirectory(Path(job.config.run.logs) / "run")
    job.context.ranks.broadcast_from_first(lambda: prepare(job, directory))
    return job, directory


def train_part(ranks, folder, logs, stop, resume=False, parallel=None):
    vit = vit_file(folder, text={"context_length": 77, "vocab_size": 49408})
    values = {
        "train_data": str(BUNDLED / "train-*.tar"), "model": vit, "global_batch_size": 31, "epochs": 3,
        "max_steps": 6, "precision": "fp64", "device": "cpu", "workers": 0, "loss": "fastclip-v2", "logs": str(logs),
        "name": "run", "log_every": 1, "eval_every": 0, "save_every": 3, "warmup": 0, "opt": "sgdm", "lr": 0.1,
        "seed": 4,
    }  # fmt: skip
    if resume:
        values["resume"] = "latest"
    job, directory = begin(values, **(parallel or {}))
    with contextlib.suppress(Killed):
        train(job, directory, Console(quiet=True), stop=KilledAfter(stop))
    return {}


def restart(ranks, folder, host, pid):
    """The settings with which this rank continues a run that was begun on a host, perhaps by this process.

    Each rank is on a host of its own: 0, 1, and others that no longer take part.
    """
    os.environ |= {"RANK": str(ranks.rank), "WORLD_SIZE": str(ranks.size), "TORCHELASTIC_RUN_ID": str(ranks.rank)}
    if ranks.first:
        directory = RunDirectory(Path(folder) / "run")
        directory.path.mkdir()
        launch = launch_id(os.environ | {"TORCHELASTIC_RUN_ID": str(host)})
        directory.describe(launch=launch, pid=pid or os.getpid())
    values = {"logs": str(folder), "name": "run", "overwrite": True, "device": f"cuda:{ranks.rank}"}
    run = continued(override(TrainConfig(), values, "test"), ranks).run
    return {"resume": run.resume, "overwrite": run.overwrite, "device": run.device}

"""What one rank of the tests of bad numbers does: a short run in which some steps see images that are no numbers."""

import itertools
import signal
from dataclasses import replace
from pathlib import Path

import torch
from resume_worker import begin
from rich.console import Console
from torch._C._distributed_c10d import HashStore
from training_worker import vit_file

from leanclip.data import TrainingLoader
from leanclip.data.datasets import BUNDLED
from leanclip.distributed import full_tensor
from leanclip.progress import ACTIVITY, Activity
from leanclip.runs.stopping import Stopping
from leanclip.training import loop, train
from leanclip.training.nonfinite import NotFiniteError


def poisoned_run(ranks, folder, bad, *, on=0, fsdp=False, times=9, stop_at=None, **settings):
    """Train; at the given global steps, as often as `times`, rank `on` gets one image that is no number. A signal to
    stop comes after so many steps as `stop_at` says.

    Returns the exit code and the message, all tensors at the end, and for every step taken whether it moved any.
    """
    vit = vit_file(folder, text={"context_length": 77, "vocab_size": 49408})
    values = {
        "train_data": str(BUNDLED / "train-*.tar"), "model": vit, "global_batch_size": 13, "epochs": 1,
        "max_steps": 8, "precision": "fp32", "device": "cpu", "workers": 0, "loss": "fastclip-v2",
        "logs": str(Path(folder) / "logs"), "name": "run", "log_every": 1, "eval_every": 0, "warmup": 0, "lr": 1e-3,
        "max_bad_steps": 2, "report_to": "none",
    }  # fmt: skip
    job, directory = begin(values | settings, fsdp=fsdp)
    seen = dict.fromkeys(bad, 0)
    honest = TrainingLoader.epoch

    def poisoned(self, epoch, *, start=0):
        for at, batch in enumerate(honest(self, epoch, start=start), start + 1):
            images = batch.images.float() / 255
            if at in seen and seen[at] < times:
                seen[at] += 1
                if ranks.rank == on:
                    images[1] = torch.nan
            yield replace(batch, images=images)

    def tensors():
        named = {f"model {name}": value for name, value in job.model.state_dict().items()}
        named |= {f"loss {name}": value for name, value in job.context.loss.state_dict().items()}
        for number, values in job.context.optimizer.state_dict()["state"].items():
            named |= {f"optimizer {number} {name}": value for name, value in values.items()}
        if job.ema is not None:
            named |= {f"ema {name}": value for name, value in job.ema.averages.items()}
            named["ema updates"] = torch.tensor(job.ema.updates)
        return {name: full_tensor(value).clone() for name, value in named.items()}

    history = [tensors()]
    said = (0, "")
    stop = Stopping(HashStore())

    class Watched(Activity):
        def advance(self):
            history.append(tensors())
            if len(history) - 1 == stop_at:
                stop.signal = signal.SIGTERM

    TrainingLoader.epoch, loop.ACTIVITY = poisoned, Watched()
    try:
        train(job, directory, Console(quiet=True), stop)
    except NotFiniteError as error:
        said = (error.exit_code, str(error))
    finally:
        TrainingLoader.epoch, loop.ACTIVITY = honest, ACTIVITY
    moved = [
        set(before) != set(after) or any(not torch.equal(before[name], after[name]) for name in before)
        for before, after in itertools.pairwise(history)
    ]
    return {"said": said, "state": tensors(), "moved": moved}


def poisoned_with(ranks, folder, bad, settings):
    return poisoned_run(ranks, folder, bad, **settings)

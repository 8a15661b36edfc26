"""One rank of the data tests: trains on shards with broken samples and records the samples of each step."""

import contextlib
import hashlib
import json

import torch
from resume_worker import Killed, KilledAfter, begin
from rich.console import Console
from training_worker import vit_file

from leanclip.errors import UserError
from leanclip.training import train
from leanclip.training.loop import _Trainer


def train_on_shards(ranks, folder, pattern, logs, stop, resume=False, workers=0, max_broken=1.0):
    """Steps of a run of three epochs, up to `stop`; returns this rank's share of each step."""
    vit = vit_file(folder, text={"context_length": 77, "vocab_size": 49408})
    values = {
        "train_data": pattern, "model": vit, "global_batch_size": 10, "epochs": 3, "device": "cpu",
        "workers": workers, "loss": "fastclip-v3", "logs": str(logs), "name": "run", "log_every": 1, "eval_every": 0,
        "save_every": 1, "warmup": 0, "lr": 1e-3, "seed": 4, "max_broken": max_broken,
    }  # fmt: skip
    if resume:
        values["resume"] = "latest"
    job, directory = begin(values)
    seen = {}
    take_step = _Trainer.take_step

    def watched(self, batch):
        share = zip(batch.sample_ids.tolist(), batch.tokens, batch.images, strict=True)
        seen[self.at.step] = [
            [index, *(hashlib.sha256(part.contiguous().numpy()).hexdigest() for part in (tokens, pixels))]
            for index, tokens, pixels in share
        ]
        return take_step(self, batch)

    code = ""
    _Trainer.take_step = watched
    try:
        with contextlib.suppress(Killed):
            train(job, directory, Console(quiet=True), stop=KilledAfter(stop))
    except UserError as error:
        code = error.code
    finally:
        _Trainer.take_step = take_step
    return {"seen": json.dumps(seen), "code": code, "weights": torch.zeros(())}

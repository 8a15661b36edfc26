"""One rank of the test of feature tables: both towers locked, their features computed by all ranks together."""

import os
import time
from pathlib import Path

import torch
from training_worker import vit_file

from leanclip.config import override
from leanclip.data import on_device
from leanclip.data.feature_table import FeatureTable
from leanclip.features import locked_towers
from leanclip.runs import TrainConfig
from leanclip.training import set_up
from leanclip.training.step import training_step

VIEWS, STEPS = 2, 3


class LateTable(FeatureTable):
    """Opened after the other ranks have begun to write."""

    def __init__(self, *args, **kwargs):
        time.sleep(1)
        super().__init__(*args, **kwargs)


def train_heads(ranks, folder, pattern, weights, cache):
    """The losses of a few steps, and the tables."""
    os.environ["LEANCLIP_CACHE"] = str(cache)
    if ranks.rank:
        locked_towers.FeatureTable = LateTable
    values = {
        "train_data": pattern, "model": vit_file(folder, text={"context_length": 77, "vocab_size": 49408}),
        "pretrained": str(weights), "lock_image": True, "lock_text": True, "cache_locked": VIEWS, "tau": 0.05,
        "global_batch_size": 10, "epochs": 2, "device": "cpu", "workers": 0, "loss": "fastclip-v1", "warmup": 0,
        "lr": 0.01, "name": "run", "logs": str(folder), "precision": "fp64",
    }  # fmt: skip
    job = set_up(override(TrainConfig(), values, "test"))
    job.context.loss.set_epoch(0, 2)
    batches = on_device(job.loader.epoch(0), job.device, job.dtype, job.pack)
    losses = [training_step(job.context, next(batches)).loss for _ in range(STEPS)]
    tables = [FeatureTable(path) for path in sorted((Path(cache) / "features").iterdir())]
    return {"losses": torch.stack(losses)} | {
        f"{name} {number}": torch.from_numpy(getattr(table, name).copy())
        for number, table in enumerate(tables)
        for name in ("features", "done", "first")
    }

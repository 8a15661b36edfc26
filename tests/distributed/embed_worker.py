"""Processes that embed: one rank of several, and one that is killed at a given moment."""

import os
import signal
from pathlib import Path

import torch

from leanclip.data import DataConfig
from leanclip.data.feature_table import FeatureTable
from leanclip.evaluation import EvaluationSettings
from leanclip.search import embed as embedding
from leanclip.search import store

BLOCK = 8
FILES = ("keys.npy", "images/features.npy", "images/done.npy", "captions/features.npy", "captions/done.npy")


def embed(ranks, folder, model, data, out):
    """The bytes of all files of the store."""
    embedding.BLOCK = BLOCK
    embedding.embed_data(
        str(model), str(data), Path(out), of="both", config=DataConfig(), precision="fp32",
        settings=EvaluationSettings(device=torch.device("cpu")), notify=lambda _: None,
    )  # fmt: skip
    return [(Path(out) / name).read_bytes() for name in FILES]


def embed_and_die(step, model, data, out):
    """Killed at the given step: before, within or after a write, or between two tables."""
    torch.set_num_threads(1)
    count = 0

    def advance():
        nonlocal count
        count += 1
        if count == step:
            os.kill(os.getpid(), signal.SIGKILL)

    class DyingTable(FeatureTable):
        def write(self, ids, rows):
            advance()
            self.features[self.first[ids[0]]] = 1  # half of a write
            advance()
            super().write(ids, rows)
            advance()

        def mark_broken(self, index, kind, message):
            advance()
            super().mark_broken(index, kind, message)

    store.FeatureTable = DyingTable
    embed(None, None, model, data, out)

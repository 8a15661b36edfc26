"""A small run with checkpoints, for tests that resume or damage it."""

import json

import torch

from leanclip.checkpointing.storage import StoredTensors
from leanclip.config import override
from leanclip.data.datasets import BUNDLED
from leanclip.runs import TrainConfig
from leanclip.training import set_up
from refusal import assert_refused, exit_code
from run_records import records

TINY = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 16, "layers": 1, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 16, "heads": 1, "layers": 1},
}
SMALL = {
    "embed_dim": 48,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 64, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 64, "heads": 4, "layers": 1},
}
VALUES = {
    "train_data": str(BUNDLED / "val-*.tar"), "global_batch_size": 20, "epochs": 3, "device": "cpu", "workers": 0,
    "name": "run", "log_every": 1, "eval_every": 0, "warmup": 0, "lr": 0.01, "report_to": "none", "max_steps": 8,
    "save_every": 2,
}  # fmt: skip


def arguments(folder, **changed):
    path = folder / "tiny.json"
    path.write_text(json.dumps(TINY))
    values = VALUES | {"model": str(path), "logs": str(folder / "logs")} | changed
    words = ["train"]
    for name, value in values.items():
        flag = "--" + name.replace("_", "-")
        words += [flag] if value is True else [] if value is False else [flag, str(value)]
    return words


def train(folder, **changed):
    return exit_code(*arguments(folder, **changed))


def assert_train_refused(code, folder, capsys, *words, **changed):
    return assert_refused(code, arguments(folder, **changed), capsys, *words)


def names(folder):
    return sorted(path.name for path in (folder / "logs/run/checkpoints").iterdir())


def steps_of_metrics(folder):
    return [line["step"] for line in records(folder / "logs/run", "train")]


def job_of(folder, **changed):
    (folder / "tiny.json").write_text(json.dumps(TINY))
    values = VALUES | {"model": str(folder / "tiny.json"), "logs": str(folder / "logs")} | changed
    return set_up(override(TrainConfig(), values, "test"))


def saved_tensors(folder, step):
    return StoredTensors.open(folder / f"logs/run/checkpoints/step_{step:08d}/state").read()


def equal(tensors, expected):
    torch.testing.assert_close(tensors, expected, rtol=0, atol=0, equal_nan=False)

"""A training run: configuration, set-up, step, loop, checkpoints, metrics."""

from leanclip.training.config import RunConfig, TrainConfig
from leanclip.training.loop import describe, train
from leanclip.training.run_directory import RunDirectory
from leanclip.training.setup import Job, autocast_of, device_of, resolve, set_up

__all__ = [
    "Job",
    "RunConfig",
    "RunDirectory",
    "TrainConfig",
    "autocast_of",
    "describe",
    "device_of",
    "resolve",
    "set_up",
    "train",
]

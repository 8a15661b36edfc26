"""Training: set-up, step and loop."""

from leanclip.training.loop import describe, train
from leanclip.training.setup import Job, resolve, set_up

__all__ = ["Job", "describe", "resolve", "set_up", "train"]

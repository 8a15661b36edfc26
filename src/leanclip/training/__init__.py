"""Training: set-up, step and loop."""

from leanclip.training.loop import train
from leanclip.training.run_output import describe
from leanclip.training.setup import Job, resolve, set_up

__all__ = ["Job", "describe", "resolve", "set_up", "train"]

"""Training: set-up, step and loop."""

from leanclip.training.loop import Ending, train
from leanclip.training.run_output import describe
from leanclip.training.setup import Job, resolve, set_up

__all__ = ["Ending", "Job", "describe", "resolve", "set_up", "train"]

"""A run on disk and on screen: configuration, directory, metrics, trackers, model card."""

from leanclip.runs.config import RunConfig, TrainConfig
from leanclip.runs.run_directory import RunDirectory

__all__ = ["RunConfig", "RunDirectory", "TrainConfig"]

"""The data: indexed shards, stable ids, batches that are a pure function of (seed, epoch, step)."""

from leanclip.data.batch import Batch
from leanclip.data.config import DataConfig
from leanclip.data.datasets import Datasets, Subset, open_datasets, open_source, open_validation
from leanclip.data.loader import TrainingLoader, evaluation_images
from leanclip.data.shards import Shards
from leanclip.data.source import BrokenSample, Source

__all__ = [
    "Batch",
    "BrokenSample",
    "DataConfig",
    "Datasets",
    "Shards",
    "Source",
    "Subset",
    "TrainingLoader",
    "evaluation_images",
    "open_datasets",
    "open_source",
    "open_validation",
]

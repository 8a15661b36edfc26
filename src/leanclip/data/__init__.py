"""The data: indexed shards, stable ids, batches that are a pure function of (seed, epoch, step)."""

from leanclip.data.batch import Batch, on_device
from leanclip.data.config import DataConfig
from leanclip.data.datasets import (
    Datasets,
    Subset,
    TrainingSet,
    check_fields,
    open_datasets,
    open_source,
    open_validation,
    split_source,
)
from leanclip.data.decode import EvaluationTransform, training_transform
from leanclip.data.loader import TrainingLoader, evaluation_batches
from leanclip.data.shards import Shards, check_manifest, load_manifest
from leanclip.data.source import BrokenCount, BrokenSample, Manifest, Source

__all__ = [
    "Batch",
    "BrokenCount",
    "BrokenSample",
    "DataConfig",
    "Datasets",
    "EvaluationTransform",
    "Manifest",
    "Shards",
    "Source",
    "Subset",
    "TrainingLoader",
    "TrainingSet",
    "check_fields",
    "check_manifest",
    "evaluation_batches",
    "load_manifest",
    "on_device",
    "open_datasets",
    "open_source",
    "open_validation",
    "split_source",
    "training_transform",
]

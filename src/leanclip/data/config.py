"""The data section of the configuration."""

import math
from dataclasses import dataclass
from typing import Literal

from leanclip.settings import setting
from leanclip.worker_pool import MOST_WORKERS

MOST_CAPTIONS = 64  # of a sample, with a score each: 8 bytes of every sample


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Data"""

    train_data: str | None = setting(None, common=True, resume="free")
    """WebDataset tar shards, or a .csv or .tsv of image paths and captions. Shards: a path, a directory, a glob, a
    brace pattern such as 'cc3m-{00000..00331}.tar', or URLs of these forms (s3://, gs://, https://); separate several
    with ::. synthetic:N generates N samples. Default: the bundled emoji."""
    train_data_upsampling_factors: str | None = setting(None, resume="fixed_unless_reset")
    """How often an epoch visits each of several sources, such as 2::1. Default: once."""
    val_data: str | None = setting(None, common=True, resume="free")
    """Held-out pairs for retrieval. Several captions per image are read from .json under "captions"."""
    csv_img_key: str = "filepath"
    """The column of a .csv or .tsv that holds image paths; relative paths count from the file's folder."""
    csv_caption_key: str = "title"
    """The column that holds captions."""
    csv_separator: str | None = None
    """The column separator, such as ',' or '\\t'. Default: detected from the header."""
    val_split: float = setting(0.0, common=True, resume="fixed_unless_reset")
    """Share of the training data to hold out. For runs without --val-data."""
    caption_key: str = "captions"
    """The key of the caption or list of captions in a sample's .json; without it the .txt is the caption."""
    caption_weights_key: str | None = None
    """The key of the list of caption weights in a sample's .json. Default: equal weights."""
    group_key: str | None = None
    """A field of the metadata (.json or column): samples with the same value are not each other's negatives."""
    pair_weights: str | None = setting(None, resume="fixed_unless_reset")
    """learned: the run finds pairs that look wrong and lowers their weights, from the third epoch on. auto: only if
    more than 1% look wrong. off: all pairs count alike. Another word: the field of the metadata that holds the weight
    of a pair, 0 or more. Default: auto where only new projections are trained, else off."""
    captions_per_sample: int = setting(1, resume="fixed_unless_reset")
    """How many captions of a sample --pair-weights learned and auto judge each by itself; further ones share their
    scores. 1, the default: a sample with all its captions is one pair."""
    exchange_captions: float = setting(0.0, resume="fixed_unless_reset")
    """Give this share of the training samples another one's captions, drawn at random with --seed: a trial of how a
    loss or --pair-weights takes wrong captions."""
    exclude: str | None = setting(None, resume="free")
    """A file of samples to leave out: keys or id:NUMBER, one per line, or a table of leanclip data suspects (.csv,
    .parquet), whose rows with a probability above 0.5 are taken. The other samples keep their ids. A resumed run must
    leave out the same ones."""
    max_broken: float = setting(0.01, resume="free")
    """The share of samples that may be broken before the run stops. Broken samples are replaced by others."""
    shuffle: Literal["all", "blocks"] = setting("all", resume="fixed_unless_reset")
    """all: an epoch is a permutation of all samples. blocks: neighbours stay close together, for slow disks."""
    batch_size: int | None = setting(None, resume="free")
    """Samples per step on each process (as in OpenCLIP). Give this or --global-batch-size."""
    global_batch_size: int | None = setting(None, common=True, resume="fixed")
    """Samples per step over all processes. A resumed run must keep it. Default: 128."""
    workers: int = setting(2, common=True, resume="free")
    """Processes that decode and augment images. 0 does it in the training process."""
    decode: Literal["auto", "cpu", "gpu"] = setting("auto", resume="free")
    """Where training images are resized after they were decoded, to the same pixels. cpu: in the workers. gpu: on the
    GPU, which leaves the workers time to decode more. auto: gpu if that is an NVIDIA GPU with Triton."""
    cache_locked: int | None = setting(None, resume="fixed")
    """Run locked towers once, on this many augmented views of each image and on all captions, and keep their features
    on disk (LEANCLIP_CACHE): epochs then read features instead of pixels. 0, the default: run them in every step."""
    train_num_samples: int | None = setting(None, resume="free")
    """Accepted for OpenCLIP's command lines and ignored: leanclip counts the samples."""
    data_size: int | None = setting(None, resume="free")
    """Accepted for FastCLIP's command lines and ignored: leanclip counts the samples."""

    def __post_init__(self) -> None:
        factors = self.upsampling_factors or []
        problems = {
            "--batch-size (per process) and --global-batch-size (all processes) exclude each other; give one": (
                self.batch_size is not None and self.global_batch_size is not None
            ),
            f"batch_size is {self.batch_size}; it must be at least 1": self.batch_size is not None
            and self.batch_size < 1,
            f"global_batch_size is {self.global_batch_size}; it must be at least 1": (
                self.global_batch_size is not None and self.global_batch_size < 1
            ),
            f"val_split is {self.val_split}; give a share in [0, 1)": not 0 <= self.val_split < 1,
            "--val-split and --val-data exclude each other; give one": self.val_split and self.val_data,
            "--val-split does not work with --shuffle blocks; hold out with --val-data": (
                self.val_split and self.shuffle == "blocks"
            ),
            f"exchange_captions is {self.exchange_captions}; give a share in [0, 1]": (
                not 0 <= self.exchange_captions <= 1
            ),
            f"captions_per_sample is {self.captions_per_sample}; it must be from 1 to {MOST_CAPTIONS}": (
                not 1 <= self.captions_per_sample <= MOST_CAPTIONS
            ),
            f"max_broken is {self.max_broken}; give a share in [0, 1]": not 0 <= self.max_broken <= 1,
            f"train_data_upsampling_factors is {self.train_data_upsampling_factors!r}; give numbers, as 2::1": (
                not all(math.isfinite(factor) and factor > 0 for factor in factors)
            ),
            f"workers is {self.workers}; it must be from 0 to {MOST_WORKERS}": not 0 <= self.workers <= MOST_WORKERS,
            f"cache_locked is {self.cache_locked}; give at least 1 view, or 0 for none": (
                self.cache_locked is not None and self.cache_locked < 0
            ),
            "train_data is empty; name the data, or leave it out for the bundled emoji": self.train_data == "",
            "val_data is empty; name the data, or leave it out": self.val_data == "",
        }
        for message, applies in problems.items():
            if applies:
                raise ValueError(message)

    @property
    def pair_weights_mode(self) -> Literal["off", "learned", "auto"]:
        """What the loss does by itself; weights of a field come with the batches."""
        return self.pair_weights if self.pair_weights in ("learned", "auto") else "off"

    @property
    def scored_captions(self) -> int:
        """Of each sample, those that the loss scores by themselves."""
        return 1 if self.pair_weights_mode == "off" else self.captions_per_sample

    @property
    def pair_weights_field(self) -> str | None:
        return None if self.pair_weights in ("off", "learned", "auto") else self.pair_weights

    @property
    def upsampling_factors(self) -> list[float] | None:
        if self.train_data_upsampling_factors is None:
            return None
        try:
            return [float(factor) for factor in self.train_data_upsampling_factors.split("::")]
        except ValueError:
            return [math.nan]

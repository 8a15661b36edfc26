"""Which samples train and which are held out."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from leanclip.data import synthetic
from leanclip.data.config import DataConfig
from leanclip.data.shards import Shards
from leanclip.data.source import Source
from leanclip.data.table import Table
from leanclip.errors import UserError

BUNDLED = Path(__file__).parent / "emoji"
BUNDLED_NOTE = "Bundled emoji: held-out figures measure unseen renders of known concepts, not unseen concepts."


@dataclass(frozen=True)
class Subset:
    """Some samples of a source, by id."""

    source: Source
    ids: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Datasets:
    train: Subset
    val: Subset | None
    note: str | None  # to be shown wherever figures on these data are


def open_datasets(config: DataConfig, *, seed: int) -> Datasets:
    """Index the training and validation data. Without a train_data, those that come with the package."""
    train = _train_source(config)
    if config.val_split:
        kept, held_out = _split(len(train), config.val_split, seed)
        return Datasets(Subset(train, kept), Subset(train, held_out), _note(config))
    val, note = open_validation(config, seed=seed)
    return Datasets(Subset(train, np.arange(len(train))), val, note)


def open_validation(config: DataConfig, *, seed: int) -> tuple[Subset | None, str | None]:
    """The held-out data alone, and the note that goes with figures on them."""
    if config.val_split:
        source = _train_source(config)
        return Subset(source, _split(len(source), config.val_split, seed)[1]), _note(config)
    if config.val_data is None and config.train_data is not None:
        return None, None
    source = open_source(config.val_data or str(BUNDLED / "val-*.tar"), config)
    return Subset(source, np.arange(len(source))), _note(config)


def _note(config: DataConfig) -> str | None:
    return BUNDLED_NOTE if config.train_data is None and config.val_data is None else None


def open_source(data: str, config: DataConfig) -> Source:
    """The samples of a --train-data or --val-data: its form decides what it is."""
    if data.startswith(synthetic.PREFIX):
        return synthetic.open_synthetic(data)
    if data.lower().endswith((".csv", ".tsv")):
        return Table(
            data, image_key=config.csv_img_key, caption_key=config.csv_caption_key, separator=config.csv_separator
        )
    return Shards(data)


def _train_source(config: DataConfig) -> Source:
    return open_source(str(BUNDLED / "train-*.tar") if config.train_data is None else config.train_data, config)


def _split(count: int, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Which samples train and which are held out."""
    held_out = round(share * count)
    if not 0 < held_out < count:
        raise UserError(f"--val-split {share} of {count} samples leaves an empty set; change it")
    shuffled = np.random.default_rng([seed, 0x5EED]).permutation(count)
    return np.sort(shuffled[held_out:]), np.sort(shuffled[:held_out])

"""Which samples train and which are held out."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from leanclip.data.config import DataConfig
from leanclip.data.shards import Shards
from leanclip.errors import UserError

BUNDLED = Path(__file__).parent / "emoji"
BUNDLED_NOTE = "Bundled emoji: held-out figures measure unseen renders of known concepts, not unseen concepts."


@dataclass(frozen=True)
class Subset:
    """Some samples of some shards, by id."""

    shards: Shards
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
    bundled = config.train_data is None
    train = Shards(str(BUNDLED / "train-*.tar") if config.train_data is None else config.train_data)
    val_data = config.val_data or (str(BUNDLED / "val-*.tar") if bundled and not config.val_split else None)
    everything = np.arange(len(train))
    note = BUNDLED_NOTE if bundled and config.val_data is None else None
    if config.val_split:
        held_out = round(config.val_split * len(train))
        if not 0 < held_out < len(train):
            raise UserError(f"--val-split {config.val_split} of {len(train)} samples leaves an empty set; change it")
        shuffled = np.random.default_rng([seed, 0x5EED]).permutation(everything)
        val, kept = np.sort(shuffled[:held_out]), np.sort(shuffled[held_out:])
        return Datasets(Subset(train, kept), Subset(train, val), note)
    val = None
    if val_data is not None:
        shards = Shards(val_data)
        val = Subset(shards, np.arange(len(shards)))
    return Datasets(Subset(train, everything), val, note)

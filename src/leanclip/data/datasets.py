"""Which samples train and which are held out."""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from leanclip.data import synthetic
from leanclip.data.broken import BrokenCount
from leanclip.data.config import DataConfig
from leanclip.data.csv_table import Table
from leanclip.data.order import Kept, Once, Visits, Weighted
from leanclip.data.shards import Manifest, Shards
from leanclip.data.source import Source
from leanclip.errors import UserError

BUNDLED = Path(__file__).parent / "emoji"
BUNDLED_NOTE = "Bundled emoji: held-out figures measure unseen renders of known concepts, not unseen concepts."


@dataclass(frozen=True)
class TrainingSet:
    """What an epoch visits of a source."""

    source: Source
    ids: Visits

    def __len__(self) -> int:
        """Visits an epoch."""
        return len(self.ids)


@dataclass(frozen=True)
class Subset:
    """Some samples of a source, by id."""

    source: Source
    ids: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Datasets:
    train: TrainingSet
    val: Subset | None
    note: str | None  # to be shown wherever figures on these data are


def open_datasets(config: DataConfig, *, seed: int, manifest: Manifest | None = None) -> Datasets:
    """Index the training and validation data. Without a train_data, those that come with the package.

    The manifest of a run that is resumed keeps its samples' ids.
    """
    source = _train_source(config, manifest)
    BrokenCount(config.max_broken).add(len(source), source.broken)
    explain_counts(config, source)
    weighted = any(part.factor != 1 for part in source.parts)
    if config.val_split:
        if weighted:
            raise UserError("--val-split does not go with --train-data-upsampling-factors; hold out with --val-data")
        if _known(manifest, source) < len(source):
            raise UserError("shards were added, and --val-split would hold out others than before; start a new run")
        kept = _split(len(source), config.val_split, seed)
        return Datasets(TrainingSet(source, kept), Subset(source, kept.held_out_ids()), _note(config))
    val, note = open_validation(config, seed=seed)
    visits = Weighted(source.parts) if weighted else Once(range(len(source)))
    return Datasets(TrainingSet(source, visits), val, note)


def open_validation(
    config: DataConfig, *, seed: int, manifest: Manifest | None = None
) -> tuple[Subset | None, str | None]:
    """The held-out data alone, and the note that goes with figures on them."""
    if config.val_split:
        source = _train_source(config, manifest)
        return Subset(source, _split(_known(manifest, source), config.val_split, seed).held_out_ids()), _note(config)
    if config.val_data is None and config.train_data is not None:
        return None, None
    source = open_source(config.val_data or str(BUNDLED / "val-*.tar"), config)
    return Subset(source, np.arange(len(source))), _note(config)


def open_source(
    data: str, config: DataConfig, *, factors: list[float] | None = None, manifest: Manifest | None = None
) -> Source:
    """The samples of a --train-data or --val-data: its form decides what it is."""
    other = next((part for part in data.split("::") if _is_table(part) or part.startswith(synthetic.PREFIX)), None)
    if other is not None and (other != data or factors is not None):
        raise UserError(f"only shards can be mixed and weighted; pack {other} first: leanclip data pack {other} OUT")
    if data.startswith(synthetic.PREFIX):
        return synthetic.open_synthetic(data)
    if _is_table(data):
        return Table(
            data,
            image_key=config.csv_img_key,
            caption_key=config.csv_caption_key,
            separator=config.csv_separator,
            manifest=manifest,
        )
    if data.lower().endswith((".parquet", ".json")):
        raise UserError(f"{data} is not read directly; pack it first: leanclip data pack {data} OUT")
    if data.lower().endswith(".jsonl"):
        raise UserError(f"{data} is of no kind that is read; give tar shards, a CSV file, or a folder of either")
    if Path(data).is_dir() and not any(Path(data).glob("*.tar")):
        raise UserError(f"no *.tar in {data}; if it holds pictures, pack them first: leanclip data pack {data} OUT")
    return Shards(
        data,
        factors=factors,
        caption_key=config.caption_key,
        weights_key=config.caption_weights_key,
        manifest=manifest,
    )


def _is_table(data: str) -> bool:
    return data.lower().endswith((".csv", ".tsv"))


def explain_counts(config: DataConfig, source: Source) -> None:
    """OpenCLIP's and FastCLIP's ways to say how many samples there are get an answer, and decide nothing."""
    for flag, given in (("--train-num-samples", config.train_num_samples), ("--data-size", config.data_size)):
        if given is not None:
            said = "" if given == len(source) else f", not {given:,}"
            print(
                f"{flag} is not needed: the data hold {len(source):,} samples{said}, and all are used",
                file=sys.stderr,
            )


def _note(config: DataConfig) -> str | None:
    return BUNDLED_NOTE if config.train_data is None and config.val_data is None else None


def _train_source(config: DataConfig, manifest: Manifest | None) -> Source:
    data = str(BUNDLED / "train-*.tar") if config.train_data is None else config.train_data
    return open_source(data, config, factors=config.upsampling_factors, manifest=manifest)


def _known(manifest: Manifest | None, source: Source) -> int:
    """How many samples the run began with: their ids come first."""
    return len(source) if manifest is None else sum(int(entry["count"]) for entry in manifest)


def _split(count: int, share: float, seed: int) -> Kept:
    """Which samples train and which are held out."""
    held_out = round(share * count)
    if not 0 < held_out < count:
        raise UserError(f"--val-split {share} of {count} samples leaves an empty set; change it")
    return Kept(count, held_out, seed)

"""Opening the training data and the held-out data."""

import sys
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote

import numpy as np

from leanclip.data import synthetic
from leanclip.data.config import DataConfig
from leanclip.data.csv_table import Table
from leanclip.data.exclusion.listed import Listed, listed_samples
from leanclip.data.files import is_folder
from leanclip.data.order import NO_IDS, Visits, WeightedVisits
from leanclip.data.shards import Shards
from leanclip.data.source import BrokenCount, BrokenSample, Manifest, Source, manifest_version
from leanclip.data.split import Split, split
from leanclip.errors import UserError

BUNDLED = Path(__file__).parent / "emoji"
LOOKED_AT = 300  # samples, for a field that the settings name
BUNDLED_NOTE = "Bundled emoji: held-out figures measure unseen renders of known concepts, not unseen concepts."


@dataclass(frozen=True)
class TrainingSet:
    """A source and what an epoch visits of it. The length is the number of visits per epoch."""

    source: Source
    visits: Visits
    captions_of: np.ndarray | None = None  # the sample whose captions each one gets; None: its own

    def __len__(self) -> int:
        return len(self.visits)


@dataclass(frozen=True)
class Subset:
    """Selected samples of a source, by id."""

    source: Source
    ids: np.ndarray
    copies: np.ndarray = field(default_factory=lambda: NO_IDS)  # ids of further samples with an image of these

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Datasets:
    train: TrainingSet
    val: Subset | None
    note: str | None  # shown with every figure on these data
    messages: tuple[str, ...] = ()  # for the log: which rows and images were grouped


def open_datasets(config: DataConfig, *, seed: int, manifest: Manifest | None = None) -> Datasets:
    """Open the training and validation data; the manifest of a resumed run preserves the sample ids."""
    source = train_source(config, manifest)
    BrokenCount(config.max_broken).add(len(source), source.broken)
    check_fields(config, source)
    _explain_ignored_counts(config, source)
    if config.val_split:
        if any(part.factor != 1 for part in source.parts):
            raise UserError(
                "--val-split does not work with --train-data-upsampling-factors; hold out with --val-data",
                code="data.split_weighted",
            )
        if _samples_at_start(manifest, source) < len(source):
            raise UserError(
                "samples were added since the run began, so --val-split would hold out other ones; start a new run",
                code="data.split_changed",
            )
    parts = train_visits(config, source, seed=seed, manifest=manifest)
    train = TrainingSet(source, parts.visits, exchanged(config, source, parts.held_out, seed=seed))
    val, note = (
        open_validation(config, seed=seed)
        if not config.val_split
        else (Subset(source, parts.evaluated, parts.copies), _note(config))
    )
    return Datasets(train, val, note, (*source.notes, *parts.messages))


def train_visits(config: DataConfig, source: Source, *, seed: int, manifest: Manifest | None) -> Split:
    """What an epoch visits of the training data: not what is held out, nor what --exclude names."""
    parts = Split(WeightedVisits(source.parts), NO_IDS)
    if config.val_split:
        parts = split_source(source, config.val_split, seed, manifest)
    captions_of = exchanged(config, source, parts.held_out, seed=seed)
    visits, left_out = _without_excluded(parts.visits, config, source, manifest, captions_of)
    return parts._replace(visits=visits, messages=(*parts.messages, *left_out))


def exchanged(config: DataConfig, source: Source, held_out: np.ndarray, *, seed: int) -> np.ndarray | None:
    """The sample whose captions each one gets, with --exchange-captions; captions of held-out samples stay."""
    if not config.exchange_captions:
        return None
    ids = np.setdiff1d(np.arange(len(source)), held_out)
    return synthetic.exchanged_captions(ids, len(source), config.exchange_captions, seed=seed)


def open_validation(
    config: DataConfig, *, seed: int, manifest: Manifest | None = None
) -> tuple[Subset | None, str | None]:
    """The held-out data alone, and the note to show with figures on them."""
    if config.val_split:
        source = train_source(config, manifest)
        parts = split_source(source, config.val_split, seed, manifest)
        return Subset(source, parts.evaluated, parts.copies), _note(config)
    if config.val_data is None and config.train_data is not None:
        return None, None
    source = open_source(config.val_data or str(BUNDLED / "val-*.tar"), config)
    return Subset(source, np.arange(len(source))), _note(config)


def open_source(
    data: str, config: DataConfig, *, factors: list[float] | None = None, manifest: Manifest | None = None
) -> Source:
    """The samples of a --train-data or --val-data."""
    other = next((part for part in data.split("::") if _is_table(part) or part.startswith(synthetic.PREFIX)), None)
    if other is not None and (other != data or factors is not None):
        raise UserError(
            f"{other} cannot be mixed or weighted, only shards can; pack it first: leanclip data pack"
            f" {quote(other)} OUT",
            code="data.mixed_sources",
        )
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
    if data.lower().endswith((".parquet", ".json")) or (is_folder(data) and not any(Path(data).glob("*.tar"))):
        raise UserError(
            f"{data} holds no tar shards; pack its images first: leanclip data pack {quote(data)} OUT",
            code="data.not_packed",
        )
    return Shards(
        data,
        factors=factors,
        caption_key=config.caption_key,
        weights_key=config.caption_weights_key,
        manifest=manifest,
    )


def check_fields(config: DataConfig, source: Source) -> None:
    """Refuse a field of the metadata that no sample has, before anything takes long."""
    fields = {"--pair-weights": config.pair_weights_field, "--group-key": config.group_key}
    if isinstance(source, Shards):  # samples without captions there have them in the .txt
        caption_key = None if config.caption_key == DataConfig.caption_key else config.caption_key
        fields |= {"--caption-key": caption_key, "--caption-weights-key": config.caption_weights_key}
    ids = np.unique(np.linspace(0, len(source) - 1, min(LOOKED_AT, len(source))).astype(int)).tolist()
    for flag, key in fields.items():
        choices = "; --pair-weights takes off, learned, auto or a field" if flag == "--pair-weights" else ""
        try:
            if key is None or any(_has_field(source, index, key) for index in ids):
                continue
        except UserError as error:  # a table without such a column
            raise UserError(f"{flag} {key}: {error}{choices}", code=error.code) from error
        raise UserError(
            f"{flag} {key}: no sample (of {len(ids):,} looked at) has a field {key!r} in its metadata{choices}",
            code="data.missing_field",
        )


def _has_field(source: Source, index: int, key: str) -> bool:
    try:
        return source.field(index, key) is not None
    except BrokenSample:
        return False


def _is_table(data: str) -> bool:
    return data.lower().endswith((".csv", ".tsv"))


def _explain_ignored_counts(config: DataConfig, source: Source) -> None:
    for flag, count in (("--train-num-samples", config.train_num_samples), ("--data-size", config.data_size)):
        if count is not None:
            correction = "" if count == len(source) else f", not {count:,}"
            message = f"{flag} is not needed: the data hold {len(source):,} samples{correction}, and all are used"
            print(message, file=sys.stderr)


def _note(config: DataConfig) -> str | None:
    return BUNDLED_NOTE if config.train_data is None and config.val_data is None else None


def train_source(config: DataConfig, manifest: Manifest | None) -> Source:
    """All samples of the training data, without what an epoch visits of them."""
    data = str(BUNDLED / "train-*.tar") if config.train_data is None else config.train_data
    return open_source(data, config, factors=config.upsampling_factors, manifest=manifest)


def _without_excluded(
    visits: Visits, config: DataConfig, source: Source, manifest: Manifest | None, captions_of: np.ndarray | None
) -> tuple[Visits, list[str]]:
    """The visits without the samples of --exclude, and what the log says. The source leaves captions out. A run keeps
    a checksum of all that."""
    listed = None if config.exclude is None else listed_samples(config.exclude, source, captions_of)
    expected = None if listed is None else _checksum(listed, _samples_at_start(manifest, source))
    if manifest is not None and manifest[0].get("excluded") != expected:
        raise UserError(
            "the run leaves out other samples than this command; resume with the same --exclude, or start a new run",
            code="data.exclude_changed",
        )
    if listed is None:
        return visits, []
    source.excluded = _checksum(listed, len(source))
    owners = range(len(source)) if captions_of is None else captions_of
    source.left_out = {int(owners[index]): numbers for index, numbers in listed.captions.items()}
    return visits.without(listed.ids), [listed.message]


def _checksum(listed: Listed, samples: int) -> int | None:
    """Of what is left out of the first samples; None for nothing."""
    captions = [(i, n) for i, numbers in sorted(listed.captions.items()) if i < samples for n in sorted(numbers)]
    ids = listed.ids[listed.ids < samples]
    content = ids.tobytes()
    if captions:  # their number of ids keeps both apart
        content += np.array([(len(ids), -1), *captions], np.int64).tobytes()
    return zlib.crc32(content) if content else None


def _samples_at_start(manifest: Manifest | None, source: Source) -> int:
    """The number of samples when the run began; their ids come first."""
    return len(source) if manifest is None else sum(int(entry["count"]) for entry in manifest)


def split_source(source: Source, share: float, seed: int, manifest: Manifest | None) -> Split:
    """A source of a run keeps in its manifest what was held out, since the images that a table names may change."""
    count, version = _samples_at_start(manifest, source), manifest_version(manifest)
    parts = split(source, share, seed, count=count, version=version)
    source.held_out = zlib.crc32(parts.held_out.tobytes())
    if manifest and manifest[0].get("held_out", source.held_out) != source.held_out:
        raise UserError(
            "images have changed since the run began, so --val-split would hold out other ones; restore them, or"
            " start a new run",
            code="data.split_changed",
        )
    return parts

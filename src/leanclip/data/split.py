"""Holding out a share of the training data by --val-split: no image is on both sides."""

import contextlib
import hashlib
import json
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from leanclip.data.files import is_remote
from leanclip.data.index import lock, show_progress
from leanclip.data.order import NO_IDS, SPLIT_KEY, Permutation, SplitVisits, Visits, WeightedVisits
from leanclip.data.shards import Shards
from leanclip.data.source import BrokenSample, Part, Source
from leanclip.errors import UserError
from leanclip.filesystem import cache_directory, write_atomically
from leanclip.progress import ACTIVITY, progress_bar

READ_AT_ONCE = 256  # images requested from the storage together
MIN_KEPT_IMAGES = 20_000  # the result for fewer is not kept on disk: they are read in seconds


class Split(NamedTuple):
    visits: Visits
    held_out: np.ndarray  # ids
    messages: tuple[str, ...] = ()  # for the log
    copies: np.ndarray = NO_IDS  # held out, and not evaluated: they have the image of another one that is

    @property
    def evaluated(self) -> np.ndarray:
        return np.setdiff1d(self.held_out, self.copies)


def split(source: Source, share: float, seed: int, *, count: int, version: int) -> Split:
    """Hold out a share of the first `count` samples. In a run of version 1, equal images may be on both sides."""
    held_out = round(share * count)
    if not 0 < held_out < count:
        raise UserError(
            f"--val-split {share} of {count:,} samples gives an empty set; give a share such as"
            f" {max(0.02, 1 / count):.2g}, or --val-data",
            code="data.empty_split",
        )
    if version > 1 and isinstance(source, Shards) and any(is_remote(file.path) for file in source.files):
        return _split_shards(source, held_out, seed, count)
    visits = SplitVisits(count, held_out, seed)
    sizes = source.image_sizes() if version > 1 else None
    equal = None if sizes is None else _equal_images(source, sizes[:count], visits.held_out_ids)
    if equal is None or not equal.size:
        return Split(visits, visits.held_out_ids)
    visits.keep_together(*equal)
    if not len(visits):
        raise UserError(
            f"--val-split {share}: the images are too few, or all the same; give --val-data", code="data.empty_split"
        )
    copies = np.intersect1d(equal[0], visits.held_out_ids)
    held_out = len(visits.held_out_ids)
    message = (
        f"--val-split: {held_out:,} samples are held out; {held_out - len(copies):,} of them are evaluated, and"
        f" the other {len(copies):,} have the same images as these (held_out.csv in the run directory lists all)"
    )
    return Split(visits, visits.held_out_ids, (message,) if len(copies) else (), copies)


def _split_shards(source: Shards, held_out: int, seed: int, count: int) -> Split:
    """Whole shards: to compare remote images, all of them would have to be downloaded."""
    parts = [Part(*ends, 1.0) for ends in zip(source.bases, source.bases[1:], strict=False) if ends[1] <= count]
    order = Permutation(len(parts), seed, SPLIT_KEY)(np.arange(len(parts))).tolist()
    sizes = np.cumsum([parts[i].stop - parts[i].start for i in order[:-1]])
    chosen = sorted(order[: int(np.searchsorted(sizes, held_out)) + 1]) if len(parts) > 1 else []
    if not 0 < len(chosen) < len(parts):
        raise UserError(
            f"--val-split holds out whole shards of remote data, and there are {len(parts)}; give --val-data",
            code="data.empty_split",
        )
    ids = np.concatenate([np.arange(parts[i].start, parts[i].stop) for i in chosen])
    message = f"--val-split: {len(chosen)} of {len(parts)} remote shards are held out, with {len(ids):,} samples"
    return Split(WeightedVisits([part for i, part in enumerate(parts) if i not in chosen]), ids, (message,))


def _equal_images(source: Source, sizes: np.ndarray, held_out: np.ndarray) -> np.ndarray:
    """(2, n): samples whose image has the bytes of an earlier one, and these earlier ones. Only images of the size of
    a held-out one are read: the others have no equal image there."""
    ids = np.flatnonzero(np.isin(sizes, sizes[held_out]))
    if len(ids) < MIN_KEPT_IMAGES:
        return _compare(source, ids)
    identity = json.dumps(source.manifest()).encode()
    key = hashlib.sha256(identity + sizes.tobytes() + held_out.tobytes()).hexdigest()
    path = cache_directory() / f"split-{key[:24]}"
    with lock(path, "compares the images"):
        equal = _load(path, len(sizes))
        if equal is None:
            equal = _compare(source, ids, path)
            content = equal.tobytes()
            with contextlib.suppress(OSError):  # compared again at the next start
                write_atomically(path, zlib.crc32(content).to_bytes(4, "little") + content)
    return equal


def _load(path: Path, count: int) -> np.ndarray | None:
    """The pairs in a file; None if it is missing or damaged."""
    content = path.read_bytes() if path.is_file() else b""
    if zlib.crc32(content[4:]).to_bytes(4, "little") != content[:4] or (len(content) - 4) % 16:
        return None
    equal = np.frombuffer(content[4:], np.int64).reshape(2, -1)
    valid = (equal[1] >= 0) & (equal[1] < equal[0]) & (equal[0] < count)
    return equal if valid.all() and (np.diff(equal[0]) > 0).all() else None


def _compare(source: Source, ids: np.ndarray, path: Path | None = None) -> np.ndarray:
    hashes, readable = np.zeros(len(ids), np.uint64), np.zeros(len(ids), bool)
    with progress_bar("comparing images for --val-split", len(ids), shown=path is not None) as progress:
        for start in range(0, len(ids), READ_AT_ONCE):
            chunk = ids[start : start + READ_AT_ONCE].tolist()
            source.prefetch(chunk)
            for position, index in enumerate(chunk, start):
                with contextlib.suppress(BrokenSample):  # it is neither trained on nor evaluated
                    digest = hashlib.blake2b(source.image_bytes(index), digest_size=8).digest()
                    hashes[position], readable[position] = int.from_bytes(digest, "little"), True
            progress(len(chunk))
            ACTIVITY.still_working()
            if path is not None:
                show_progress(path)
    ids = ids[readable]
    _, first, group = np.unique(hashes[readable], return_index=True, return_inverse=True)
    earlier = ids[first][group]
    return np.stack([ids, earlier])[:, ids != earlier]

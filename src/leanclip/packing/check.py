"""Measuring a data set: image sizes, caption lengths, broken samples, duplicates."""

import functools
import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from leanclip.data.decode import examine, naming
from leanclip.data.source import MAX_EXAMPLES, BrokenSample, Source
from leanclip.packing.pack import QUALITY, encode
from leanclip.worker_pool import Tick, run_tasks

SAMPLES_PER_TASK = 512
RESIZED = 256  # pixels of the shorter side, for which the effect of `data pack --resize` is estimated
SAMPLES_PER_ENCODED = 16  # of these one is encoded as `data pack` does: decoding it takes longer than examining it
MAX_TOKENS = np.iinfo(np.uint16).max
MAX_DUPLICATES_SORTED = 10_000  # the examples are the first of these
# One value per good sample, the last three one per caption: 50 bytes per sample with one caption.
COLUMNS = {
    "ids": np.int64,
    "width": np.uint32,
    "height": np.uint32,
    "image_bytes": np.uint32,
    "image_hashes": np.uint64,
    "bytes_resized": np.uint32,  # 0 where that was not measured
    "caption_ids": np.int64,
    "caption_hashes": np.uint64,
    "tokens": np.uint16,
}
SAME_CAPTION = "has a caption of"  # a sample may have several


@dataclass
class Findings:
    first_id: int
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    formats: Counter[str] = field(default_factory=Counter)
    broken: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    empty_captions: int = 0
    captions_of_several_lines: int = 0


def check(
    source: Source,
    *,
    count_tokens: Callable[[str], int],
    context_length: int,
    sample: int | None = None,
    workers: int = 1,
    progress: Callable[[int], None] = lambda _: None,
) -> dict[str, Any]:
    """Read every sample, or `sample` of them drawn at random. The result is ready for JSON."""
    if sample is None or sample >= len(source):
        ids = range(len(source))
    else:
        ids = np.sort(np.random.default_rng(0).choice(len(source), sample, replace=False, shuffle=False))
    tasks = [ids[start : start + SAMPLES_PER_TASK] for start in range(0, len(ids), SAMPLES_PER_TASK)]
    measure = functools.partial(_measure, source, count_tokens)
    # Sorted, since they arrive in the order in which they finish.
    parts = sorted(run_tasks(measure, tasks, workers=workers, progress=progress), key=lambda part: part.first_id)
    columns = {name: np.concatenate([part.columns[name] for part in parts]) for name in COLUMNS}
    formats, broken = (sum((getattr(part, name) for part in parts), Counter()) for name in ("formats", "broken"))
    examples = {kind: [message for part in parts for message in part.examples.get(kind, ())] for kind in broken}
    left_out = sum(source.broken.values())
    longer = int((columns["tokens"] > context_length).sum())
    return {
        "samples": len(source),
        "checked": len(ids),
        "left_out_on_opening": dict(source.broken),
        "broken": dict(broken.most_common()),
        "broken_examples": {kind: messages[:MAX_EXAMPLES] for kind, messages in examples.items()},
        "broken_share": (broken.total() + left_out) / max(1, len(ids) + left_out),
        "empty_captions": sum(part.empty_captions for part in parts),
        "captions_of_several_lines": sum(part.captions_of_several_lines for part in parts),
        "captions": len(columns["tokens"]),
        "captions_per_image": _spread(np.unique(columns["caption_ids"], return_counts=True)[1]),
        "tokens": _spread(columns["tokens"]),
        "context_length": context_length,
        "longer_than_context": longer,
        "longer_than_context_share": longer / max(1, len(columns["tokens"])),
        "image_width": _spread(columns["width"]),
        "image_height": _spread(columns["height"]),
        "image_bytes": _spread(columns["image_bytes"]),
        "image_formats": dict(formats.most_common()),
        "resizing": _resizing(columns),
        "duplicate_images": _duplicates(columns["image_hashes"], columns["ids"], source, "duplicates"),
        "duplicate_captions": _duplicates(columns["caption_hashes"], columns["caption_ids"], source, SAME_CAPTION),
    }


def _measure(source: Source, count_tokens: Callable[[str], int], ids: np.ndarray | range, tick: Tick) -> Findings:
    findings = Findings(int(ids[0]))
    values: dict[str, list[int]] = {name: [] for name in COLUMNS}
    for index in map(int, ids):
        captions, empty = None, 0
        try:
            empty = source.empty_captions(index)
            captions = source.captions(index)
            findings.empty_captions += empty
            image = source.image_bytes(index)
            with naming(source, index):
                width, height, image_format = examine(image)
                encoded = index % SAMPLES_PER_ENCODED == 0 and min(width, height) > RESIZED
                resized = len(encode(image, RESIZED, QUALITY)[1]) if encoded else 0
        except BrokenSample as error:
            findings.broken[error.kind] += 1
            if captions is None and error.kind == "empty":  # an image can be empty, too
                findings.empty_captions += max(1, empty)
            if findings.broken[error.kind] <= MAX_EXAMPLES:
                findings.examples.setdefault(error.kind, []).append(str(error))
        else:
            findings.formats[image_format] += 1
            image_values = (index, width, height, len(image), _hash(image), resized)
            for name, value in zip(COLUMNS, image_values, strict=False):
                values[name].append(value)
            findings.captions_of_several_lines += sum("\n" in caption for caption in captions)
            for caption in captions:
                values["caption_ids"].append(index)
                values["caption_hashes"].append(_hash(caption.encode("utf-8", errors="surrogatepass")))
                values["tokens"].append(min(count_tokens(caption), MAX_TOKENS))
        tick()
    findings.columns = {name: np.asarray(values[name], dtype) for name, dtype in COLUMNS.items()}
    return findings


def _resizing(columns: dict[str, np.ndarray]) -> dict[str, Any]:
    """What `data pack --resize` would save, estimated from the images that were encoded."""
    shorter = np.minimum(columns["width"], columns["height"]).astype(np.float64)
    larger, encoded = shorter > RESIZED, columns["bytes_resized"] > 0
    pixels, size = columns["width"].astype(np.float64) * columns["height"], columns["image_bytes"].astype(np.int64)
    ratio = columns["bytes_resized"].sum(dtype=np.int64) / max(1, size[encoded].sum())
    unknown = larger.any() and not encoded.any()
    scale = np.where(larger, RESIZED / np.maximum(shorter, 1), 1.0) ** 2
    return {
        "size": RESIZED,
        "larger": int(larger.sum()),
        "larger_share": float(larger.mean()) if len(larger) else 0.0,
        "encoded": int(encoded.sum()),
        "bytes": int(size.sum()),
        "bytes_resized": None if unknown else int(size[~larger].sum() + ratio * size[larger].sum()),
        "pixels_left": float((pixels * scale).sum() / max(1.0, pixels.sum())),
    }


def _hash(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def _spread(values: np.ndarray) -> dict[str, float]:
    if not len(values):
        return {}
    return {"min": int(values.min()), "median": float(np.median(values)), "max": int(values.max())}


def _duplicates(hashes: np.ndarray, ids: np.ndarray, source: Source, relation: str) -> dict[str, Any]:
    """The number of values that equal one with a smaller id, and the first examples: samples and their relation."""
    order = np.argsort(hashes, kind="stable")
    repeated = np.flatnonzero(hashes[order][1:] == hashes[order][:-1]) + 1
    pairs = sorted((int(ids[order[i]]), int(ids[order[i - 1]])) for i in repeated[:MAX_DUPLICATES_SORTED])
    return {
        "count": len(repeated),
        "share": len(repeated) / max(1, len(hashes)),
        "examples": [
            f"{source.name(later)} {relation} {source.name(first)}" for later, first in pairs[:MAX_EXAMPLES]
        ],
    }

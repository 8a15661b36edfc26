"""What a data set holds: sizes, lengths, what is broken, what is there twice."""

import functools
import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from leanclip.data.decode import naming
from leanclip.data.source import BrokenSample, Source
from leanclip.packing.examine import examine
from leanclip.worker_pool import Tick, run_tasks

SAMPLES_PER_TASK = 512
EXAMPLES = 3
LONGEST = np.iinfo(np.uint16).max


@dataclass(frozen=True)
class Findings:
    """Of some samples. Whole samples have a place in the arrays, broken ones a kind: 46 bytes a sample."""

    ids: np.ndarray
    sizes: np.ndarray  # (n, 2) width, height
    image_bytes: np.ndarray
    image_hashes: np.ndarray
    caption_ids: np.ndarray  # (captions,) the sample of each caption
    caption_hashes: np.ndarray
    tokens: np.ndarray
    formats: Counter[str]
    broken: Counter[str]
    examples: dict[str, list[str]]
    empty_captions: int
    first: int  # id


def check(
    source: Source,
    *,
    count_tokens: Callable[[str], int],
    context_length: int,
    sample: int | None = None,
    workers: int = 1,
    progress: Callable[[int], None] = lambda _: None,
) -> dict[str, Any]:
    """Read every sample, or `sample` of them drawn at random, and say what was found, ready for JSON."""
    if sample is None or sample >= len(source):
        ids = range(len(source))
    else:
        ids = np.sort(np.random.default_rng(0).choice(len(source), sample, replace=False, shuffle=False))
    tasks = [ids[start : start + SAMPLES_PER_TASK] for start in range(0, len(ids), SAMPLES_PER_TASK)]
    look = functools.partial(_look, source, count_tokens)
    found = _joined(list(run_tasks(look, tasks, workers=workers, progress=progress)))
    left_out = dict(source.broken)
    broken = sum(found.broken.values()) + sum(left_out.values())
    longer = int((found.tokens > context_length).sum())
    return {
        "samples": len(source),
        "checked": len(ids),
        "left_out_on_opening": left_out,
        "broken": dict(found.broken.most_common()),
        "broken_examples": found.examples,
        "broken_share": broken / max(1, len(ids) + sum(left_out.values())),
        "empty_captions": found.empty_captions,
        "captions": len(found.tokens),
        "captions_per_image": _spread(np.unique(found.caption_ids, return_counts=True)[1]),
        "tokens": _spread(found.tokens),
        "context_length": context_length,
        "longer_than_context": longer,
        "longer_than_context_share": longer / max(1, len(found.tokens)),
        "image_width": _spread(found.sizes[:, 0]),
        "image_height": _spread(found.sizes[:, 1]),
        "image_bytes": _spread(found.image_bytes),
        "image_formats": dict(found.formats.most_common()),
        "duplicate_images": _duplicates(found.image_hashes, found.ids, source),
        "duplicate_captions": _duplicates(found.caption_hashes, found.caption_ids, source),
    }


def _look(source: Source, count_tokens: Callable[[str], int], ids: np.ndarray | range, tick: Tick) -> Findings:
    whole, sizes, lengths, hashes = [], [], [], []
    caption_ids, caption_hashes, tokens = [], [], []
    formats, broken, examples, empty = Counter[str](), Counter[str](), dict[str, list[str]](), 0
    for index in map(int, ids):
        captions = None
        try:
            captions = source.captions(index)
            image = source.image_bytes(index)
            with naming(source, index):
                facts = examine(image)
        except BrokenSample as error:
            broken[error.kind] += 1
            empty += captions is None and error.kind == "empty"  # and not an image without bytes
            named = examples.setdefault(error.kind, [])
            if len(named) < EXAMPLES:
                named.append(str(error))
        else:
            whole.append(index)
            sizes.append((facts.width, facts.height))
            lengths.append(len(image))
            hashes.append(_hash(image))
            formats[facts.format] += 1
            caption_ids += [index] * len(captions)
            caption_hashes += [_hash(caption.encode("utf-8", errors="surrogatepass")) for caption in captions]
            tokens += [min(count_tokens(caption), LONGEST) for caption in captions]
        tick()
    return Findings(
        ids=np.asarray(whole, np.int64),
        sizes=np.asarray(sizes, np.uint32).reshape(-1, 2),
        image_bytes=np.asarray(lengths, np.uint32),
        image_hashes=np.asarray(hashes, np.uint64),
        caption_ids=np.asarray(caption_ids, np.int64),
        caption_hashes=np.asarray(caption_hashes, np.uint64),
        tokens=np.asarray(tokens, np.uint16),
        formats=formats,
        broken=broken,
        examples=examples,
        empty_captions=empty,
        first=int(ids[0]),
    )


def _hash(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def _joined(parts: list[Findings]) -> Findings:
    parts.sort(key=lambda part: part.first)  # they come as they are ready
    examples: dict[str, list[str]] = {}
    for part in parts:
        for kind, messages in part.examples.items():
            examples[kind] = (examples.get(kind, []) + messages)[:EXAMPLES]
    arrays = ("ids", "sizes", "image_bytes", "image_hashes", "caption_ids", "caption_hashes", "tokens")
    return Findings(
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in arrays},
        formats=sum((part.formats for part in parts), Counter()),
        broken=sum((part.broken for part in parts), Counter()),
        examples=examples,
        empty_captions=sum(part.empty_captions for part in parts),
        first=parts[0].first,
    )


def _spread(values: np.ndarray) -> dict[str, float]:
    if not len(values):
        return {}
    return {"min": int(values.min()), "median": float(np.median(values)), "max": int(values.max())}


def _duplicates(hashes: np.ndarray, ids: np.ndarray, source: Source) -> dict[str, Any]:
    """How many are equal to one with a smaller id, and the first such pairs."""
    order = np.argsort(hashes, kind="stable")
    again = np.flatnonzero(hashes[order][1:] == hashes[order][:-1]) + 1
    pairs = sorted((int(ids[order[at]]), int(ids[order[at - 1]])) for at in again[:10_000])[:EXAMPLES]
    return {
        "count": len(again),
        "share": len(again) / max(1, len(hashes)),
        "examples": [f"{source.name(second)} is as {source.name(first)}" for second, first in pairs],
    }

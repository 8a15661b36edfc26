"""From a source to WebDataset tar shards: a shard is a stretch of the source, so any process can write any shard.

The same source and settings give the same bytes. A shard is written under another name and renamed when it is whole;
a line of pack.jsonl says so, and a later call with the same source and settings goes on from there.
"""

import fcntl
import functools
import hashlib
import io
import json
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from PIL import Image

from leanclip.data.decode import naming, open_image
from leanclip.data.file_source import Packable
from leanclip.data.source import BrokenSample
from leanclip.errors import UserError, first_line
from leanclip.filesystem import atomic_path
from leanclip.packing.examine import decoding, examine
from leanclip.worker_pool import Tick, run_tasks

JOURNAL = "pack.jsonl"
ENDINGS = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp"}  # MPO: a JPEG with more behind it
QUALITY = 90


@dataclass(frozen=True, kw_only=True)
class PackConfig:
    """What decides the bytes of the shards."""

    samples_per_shard: int = 10_000
    max_size: int | None = None
    on_broken: Literal["skip", "stop"] = "skip"

    def __post_init__(self) -> None:
        if self.samples_per_shard < 1:
            raise ValueError(f"samples_per_shard is {self.samples_per_shard}; it must be at least 1")
        if self.max_size is not None and self.max_size < 1:
            raise ValueError(f"max_size is {self.max_size}; it must be at least 1 pixel")


@dataclass(frozen=True, kw_only=True)
class PackedShard:
    """What became of one stretch of the source."""

    shard: int
    samples: int
    bytes: int
    skipped: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)
    """The first message of each kind."""


@dataclass(frozen=True, kw_only=True)
class PackSummary:
    samples: int
    shards: int
    already_there: int
    """Shards that an earlier call had finished."""
    bytes: int
    skipped: dict[str, int]
    examples: dict[str, str]

    @property
    def broken_share(self) -> float:
        skipped = sum(self.skipped.values())
        return skipped / max(1, self.samples + skipped)


def pack(
    source: Packable,
    out: Path,
    config: PackConfig,
    *,
    workers: int = 1,
    progress: Callable[[int], None] = lambda _: None,
) -> PackSummary:
    """Write the shards that are not there yet. `progress` is told how many more samples are done."""
    size = config.samples_per_shard
    shards = -(-len(source) // size)
    width = max(5, len(str(shards - 1)))  # names sort as numbers do
    with _journal(out, source, config) as journal:
        finished: dict[int, PackedShard] = {}
        for line in journal.read().splitlines()[1:]:
            shard = _finished(line, out, width)
            if shard is not None:
                finished[shard.shard] = shard
        for unfinished in out.glob(".*.tar.*.tmp"):  # of a killed process
            unfinished.unlink()
        left = [number for number in range(shards) if number not in finished]
        already = len(finished)
        progress(sum(min(size, len(source) - number * size) for number in finished))
        write = functools.partial(_write_shard, source, out, width, config)
        for shard in run_tasks(write, left, workers=workers, progress=progress):
            finished[shard.shard] = shard
            journal.write(json.dumps(asdict(shard)) + "\n")
            journal.flush()
    skipped: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for number in sorted(finished):
        skipped.update(finished[number].skipped)
        examples = finished[number].examples | examples
    return PackSummary(
        samples=sum(shard.samples for shard in finished.values()),
        shards=shards,
        already_there=already,
        bytes=sum(shard.bytes for shard in finished.values()),
        skipped=dict(skipped.most_common()),
        examples=examples,
    )


@contextmanager
def _journal(out: Path, source: Packable, config: PackConfig) -> Iterator[IO[str]]:
    """The journal of a folder, locked, new or of the very same source and settings; at its start."""
    head = {
        "source": hashlib.blake2b(f"{type(source).__name__} {source.identity()}".encode(errors="surrogateescape"),
                                  digest_size=16).hexdigest(),
        "samples": len(source),
        **{name: value for name, value in asdict(config).items() if name != "on_broken"},
    }  # fmt: skip
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not (out / JOURNAL).exists() and any(out.glob("*.tar")):
            raise UserError(f"{out} holds tar files and no {JOURNAL}; give a folder of its own to pack into")
        file = (out / JOURNAL).open("a+", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write to {out} ({error.strerror})") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(f"another `leanclip data pack` writes to {out}; wait for it") from error
        file.seek(0)
        first = file.readline()
        if not first.endswith("\n"):  # new, or killed in the first moment
            file.truncate(0)
            file.write(json.dumps(head) + "\n")
            file.flush()
        else:
            _refuse_other(out, first, head)
        _drop_broken_line(file)
        file.seek(0)
        try:
            yield file
        except OSError as error:
            raise UserError(f"cannot write to {out} ({error.strerror}); run again to go on") from error


def _refuse_other(out: Path, first: str, head: dict[str, Any]) -> None:
    try:
        found = dict(json.loads(first))
    except (ValueError, TypeError) as error:
        raise UserError(f"{out / JOURNAL} is damaged; remove {out}, or pack into another folder") from error
    for name, value in head.items():
        if found.get(name) == value:
            continue
        if name in ("source", "samples"):
            raise UserError(
                f"{out} was begun from other data, or they changed since; pack into another folder, or remove {out}"
            )
        flag = "--" + name.replace("_", "-")
        raise UserError(f"{out} was begun with {flag} {found.get(name)}, not {value}; go on with that, or elsewhere")


def _drop_broken_line(file: IO[str]) -> None:
    """Whoever was killed while writing a line left a part of it."""
    file.seek(0)
    content = file.read()
    if not content.endswith("\n"):
        file.truncate(len(content[: content.rfind("\n") + 1].encode()))


def _finished(line: str, out: Path, width: int) -> PackedShard | None:
    """The shard of a journal line, if its file is there as it was left."""
    try:
        shard = PackedShard(**json.loads(line))
    except (ValueError, TypeError):
        return None  # a disk that failed: the shard is written again
    path = out / f"{shard.shard:0{width}d}.tar"
    return shard if path.is_file() and path.stat().st_size == shard.bytes else None


def _write_shard(source: Packable, out: Path, width: int, config: PackConfig, number: int, tick: Tick) -> PackedShard:
    path = out / f"{number:0{width}d}.tar"
    samples, skipped, examples = 0, Counter[str](), dict[str, str]()
    start = number * config.samples_per_shard
    try:
        with (
            atomic_path(path) as temporary,
            tarfile.open(temporary, mode="w", format=tarfile.USTAR_FORMAT) as archive,
        ):
            for index in range(start, min(start + config.samples_per_shard, len(source))):
                try:
                    members = _members(source, index, config)
                except BrokenSample as error:
                    if config.on_broken == "stop":
                        raise UserError(f"{error}; mend it, or leave such samples out: --on-broken skip") from error
                    skipped[error.kind] += 1
                    examples.setdefault(error.kind, str(error))
                else:
                    samples += 1
                    for ending, content in members:
                        _add(archive, f"{index:09d}.{ending}", content)
                tick()
    except OSError as error:
        raise UserError(
            f"cannot write {path} ({first_line(error)}); run the command again to resume", code="pack.cannot_write"
        ) from error
    return PackedShard(
        shard=number, samples=samples, bytes=path.stat().st_size, skipped=dict(skipped), examples=examples
    )


def _members(source: Packable, index: int, config: PackConfig) -> list[tuple[str, bytes]]:
    """The files of one sample by ending. The names are numbers: nothing in the data can lead out of an archive."""
    captions = source.captions(index)
    content = source.image_bytes(index)
    with naming(source, index):
        ending, image = _encode(content, config.max_size)
    members = [(ending, image), ("txt", _utf8(captions[0]))]
    if len(captions) > 1:
        members.append(("json", _utf8(json.dumps({"captions": captions}, ensure_ascii=False))))
    return members


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", errors="replace")  # JSON can hold half a surrogate pair


def _encode(content: bytes, max_size: int | None) -> tuple[str, bytes]:
    """The image as it is if training reads its format and it is not too large, else made so."""
    image = open_image(content)
    ending = ENDINGS.get(image.format or "")
    too_large = max_size is not None and min(image.size) > max_size
    if ending is not None and not too_large:
        examine(content)
        return ending, content
    file = io.BytesIO()
    with decoding():
        image = _shrunk(image, max_size) if max_size is not None and too_large else _plain_mode(image)
        if ending == "jpg":
            image.convert("RGB").save(file, "JPEG", quality=QUALITY)
        elif ending == "webp":
            image.save(file, "WEBP", quality=QUALITY)
        else:
            image.save(file, "PNG")
    return ending or "png", file.getvalue()


def _shrunk(image: Image.Image, size: int) -> Image.Image:
    scale = size / min(image.size)
    target = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    image.draft(None, (2 * target[0], 2 * target[1]))  # twice the size: no loss to see, and a fraction of the time
    return _plain_mode(image).resize(target, Image.Resampling.BICUBIC)


def _plain_mode(image: Image.Image) -> Image.Image:
    """Palettes cannot be resized, and sixteen bits or CMYK are not what training sees."""
    return image.convert("RGBA" if "A" in image.getbands() or "transparency" in image.info else "RGB")


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)  # time 0, owner 0: the bytes depend on nothing but the sample
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))

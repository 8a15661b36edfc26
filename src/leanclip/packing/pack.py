"""Packing a source into WebDataset tar shards. Each shard holds a range of samples, so any process can write it.

The same source and settings give the same bytes. A shard is written atomically and then recorded in pack.jsonl; a
later call with the same source and settings writes only the missing shards.
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
from typing import IO, Any

from PIL import Image

from leanclip.data.decode import decoding, examine, naming, open_image
from leanclip.data.source import BrokenSample, Packable
from leanclip.errors import UserError, first_line
from leanclip.filesystem import MAX_JSON_BYTES, atomic_path, parse_json
from leanclip.worker_pool import Tick, run_tasks

JOURNAL = "pack.jsonl"
ENDINGS = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp"}  # MPO: a JPEG with further images
QUALITY = 90  # of JPEG and WebP images that are encoded again
SETTINGS = {"samples_per_shard": None, "resize": None, "quality": QUALITY}  # with the values of journals without them


@dataclass(frozen=True, kw_only=True)
class PackConfig:
    samples_per_shard: int = 10_000
    resize: int | None = None
    quality: int = QUALITY

    def __post_init__(self) -> None:
        for name, value in (("samples-per-shard", self.samples_per_shard), ("resize", self.resize)):
            if value is not None and value < 1:
                raise UserError(f"--{name} is {value}; it must be at least 1", code="pack.bad_value")
        if not 1 <= self.quality <= 100:
            raise UserError(f"--quality is {self.quality}; it must be from 1 to 100", code="pack.bad_value")


@dataclass(frozen=True, kw_only=True)
class PackedShard:
    """A shard that was written: a line of the journal."""

    shard: int
    samples: int
    bytes: int
    skipped: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)  # the first message of each kind


@dataclass(frozen=True, kw_only=True)
class PackSummary:
    samples: int
    shards: int
    finished_before: int  # shards that an earlier call wrote
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
    """Write the missing shards. `progress` gets the number of samples done since its last call."""
    size = config.samples_per_shard
    shards = -(-len(source) // size)
    width = max(5, len(str(shards - 1)))  # of the numbers in file names, which then sort in order
    with _journal(out, source, config) as journal:
        finished = _finished_shards(journal.read().splitlines()[1:], out, width, shards)
        for temporary in out.glob(".*.tar.*.tmp"):  # of a killed process
            temporary.unlink()
        missing = [number for number in range(shards) if number not in finished]
        progress(sum(min(size, len(source) - number * size) for number in finished))
        write = functools.partial(_write_shard, source, out, width, config)
        for shard in run_tasks(write, missing, workers=workers, progress=progress):
            finished[shard.shard] = shard
            journal.write(_line(asdict(shard)))
            journal.flush()
    skipped: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for _, shard in sorted(finished.items()):
        skipped.update(shard.skipped)
        examples = shard.examples | examples
    return PackSummary(
        samples=sum(shard.samples for shard in finished.values()),
        shards=shards,
        finished_before=shards - len(missing),
        bytes=sum(shard.bytes for shard in finished.values()),
        skipped=dict(skipped.most_common()),
        examples=examples,
    )


@contextmanager
def _journal(out: Path, source: Packable, config: PackConfig) -> Iterator[IO[bytes]]:
    """The journal of a folder, locked, at its start; new, or of the same source and settings."""
    identity = f"{type(source).__name__} {source.identity()} with fields".encode(errors="surrogateescape")
    head = {
        "source": hashlib.blake2b(identity, digest_size=16).hexdigest(),
        "samples": len(source),
        **asdict(config),
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not (out / JOURNAL).exists() and any(out.glob("*.tar")):
            raise UserError(
                f"{out} contains tar files and no {JOURNAL}; give a new or empty folder", code="pack.foreign_folder"
            )
        with (out / JOURNAL).open("ab+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.seek(0)
            content = file.read(MAX_JSON_BYTES)
            complete = content[: content.rfind(b"\n") + 1]  # a killed process leaves an incomplete line
            if complete:
                _refuse_other(out, complete.partition(b"\n")[0], head)
            file.truncate(len(complete))
            if not complete:
                file.write(_line(head))
            file.seek(0)
            yield file
    except BlockingIOError as error:
        raise UserError(f"another `leanclip data pack` writes to {out}; wait for it", code="pack.locked") from error
    except OSError as error:  # of a worker, too
        raise UserError(
            f"cannot write to {out} ({first_line(error)}); run the command again to resume", code="pack.cannot_write"
        ) from error


def _line(content: dict[str, Any]) -> bytes:
    return json.dumps(content).encode() + b"\n"


def _refuse_other(out: Path, first: bytes, head: dict[str, Any]) -> None:
    try:
        if (out / JOURNAL).stat().st_size > MAX_JSON_BYTES:
            raise ValueError("too large")
        stored = dict(parse_json(first))
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{out / JOURNAL} is damaged; remove {out}, or pack into another folder", code="pack.journal_damaged"
        ) from error
    if any(stored.get(name) != head[name] for name in ("source", "samples")):
        raise UserError(
            f"{out} was packed from other data, or the data changed since; remove {out}, or pack into another folder",
            code="pack.other_source",
        )
    stored.setdefault("resize", stored.get("max_size"))  # its name up to 0.1.0
    for name, default in SETTINGS.items():
        if (before := stored.get(name, default)) != head[name]:
            raise UserError(
                f"{out} was packed with --{name.replace('_', '-')} {before}, not {head[name]}; give the same value,"
                " or another folder",
                code="pack.other_settings",
            )


def _finished_shards(lines: list[bytes], out: Path, width: int, shards: int) -> dict[int, PackedShard]:
    """The shards of the journal whose files still have their size."""
    finished = {}
    for line in lines:
        try:
            shard = PackedShard(**parse_json(line))
            counts = (shard.shard, shard.samples, *shard.skipped.values())
            sound = all(type(count) is int and count >= 0 for count in counts) and shard.shard < shards
            if not sound or shard.examples.keys() != shard.skipped.keys():
                raise ValueError("impossible counts")
        except (ValueError, TypeError, AttributeError):
            continue  # a damaged line: the shard is written again
        path = out / f"{shard.shard:0{width}d}.tar"
        if path.is_file() and path.stat().st_size == shard.bytes:
            finished[shard.shard] = shard
    return finished


def _write_shard(source: Packable, out: Path, width: int, config: PackConfig, number: int, tick: Tick) -> PackedShard:
    path = out / f"{number:0{width}d}.tar"
    samples, skipped, examples = 0, Counter[str](), dict[str, str]()
    start = number * config.samples_per_shard
    with (
        atomic_path(path) as temporary,
        tarfile.open(temporary, mode="w", format=tarfile.USTAR_FORMAT) as archive,
    ):
        for index in range(start, min(start + config.samples_per_shard, len(source))):
            try:
                members = _members(source, index, config)
            except BrokenSample as error:
                skipped[error.kind] += 1
                examples.setdefault(error.kind, str(error))
            else:
                samples += 1
                for ending, content in members:
                    _add(archive, f"{index:09d}.{ending}", content)
            tick()
    return PackedShard(
        shard=number, samples=samples, bytes=path.stat().st_size, skipped=dict(skipped), examples=examples
    )


def _members(source: Packable, index: int, config: PackConfig) -> list[tuple[str, bytes]]:
    """The files of one sample by ending. File names are numbers, so the data cannot inject paths."""
    captions = source.captions(index)
    content = source.image_bytes(index)
    with naming(source, index):
        members = [encode(content, config.resize, config.quality), ("txt", _utf8(captions[0]))]
    several = {"captions": captions} if len(captions) > 1 else {}
    if content := source.fields(index) | several:
        members.append(("json", _utf8(json.dumps(content, ensure_ascii=False))))
    return members


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", errors="replace")  # JSON may contain an unpaired surrogate


def encode(content: bytes, size: int | None, quality: int) -> tuple[str, bytes]:
    """The ending and the image: unchanged if training supports its format and its shorter side is at most `size`."""
    image = open_image(content)
    ending = ENDINGS.get(image.format or "")
    too_large = size is not None and min(image.size) > size
    if ending is not None and not too_large:
        examine(content)
        return ending, content
    file = io.BytesIO()
    with decoding():
        image = _shrunk(image, size) if size is not None and too_large else _eight_bit(image)
        image.save(file, {"jpg": "JPEG", "webp": "WEBP"}.get(ending or "", "PNG"), quality=quality)
    return ending or "png", file.getvalue()


def _shrunk(image: Image.Image, size: int) -> Image.Image:
    scale = size / min(image.size)
    target = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    image.draft(None, (2 * target[0], 2 * target[1]))  # fast, and without visible loss
    return _eight_bit(image).resize(target, Image.Resampling.BICUBIC)


def _eight_bit(image: Image.Image) -> Image.Image:
    """RGB or RGBA: a palette cannot be resized, and training reads neither 16 bits nor CMYK."""
    return image.convert("RGBA" if "A" in image.getbands() or "transparency" in image.info else "RGB")


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)  # time 0 and owner 0, so that the bytes depend on the sample alone
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))

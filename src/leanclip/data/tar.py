"""Indexing a tar shard: one walk over its headers gives the position of every file. Contents are not read."""

import contextlib
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple
from zlib import adler32

import numpy as np

from leanclip.data.files import MAX_CAPTION_BYTES, MAX_IMAGE_BYTES, FileStat, OpenFiles, is_remote
from leanclip.errors import UserError, first_line
from leanclip.progress import ACTIVITY

BLOCK = 512  # bytes
DENSE_READ_BYTES, SPARSE_READ_BYTES = 1 << 20, 1 << 13  # read at once where files are small, and where they are large
SPARSE_GAP_BYTES = 1 << 15  # files are large when the next header lies this far behind the buffer
REMOTE_READ_BYTES = 8 << 20  # a request takes longer than the contents that a smaller one would skip
SEARCH_BYTES = 1 << 16  # looked through at once for the next valid header
MAX_METADATA_BYTES = 1 << 16  # of a long name, a pax header or a label file
MAX_USTAR_BYTES = 8**11 - 1  # a pax header gives the size of a larger file; of a smaller one it may lie
ADLER_MODULUS = 65521
_REGULAR = b"\x0007"
_NO_CONTENT = b"123456"  # links, devices and directories

IMAGE_ENDINGS = ("jpg", "jpeg", "png", "webp")
_ENDINGS = {ending.encode(): number for number, ending in enumerate((*IMAGE_ENDINGS, "txt", "json"))}
_TXT_NUMBER = len(IMAGE_ENDINGS)
_ANY_IMAGE, _ANY_CAPTION = (1 << _TXT_NUMBER) - 1, 3 << _TXT_NUMBER  # bits of the endings
SLASH = ord("/")
# Columns of the table, in pairs: the first block of the file (0: no such file) and its size in bytes.
IMAGE, TXT, JSON, COLUMNS = 0, 2, 4, 6
MAX_BYTES = (MAX_IMAGE_BYTES, MAX_CAPTION_BYTES, MAX_CAPTION_BYTES)  # of these three; a reader allocates them
_COLUMN = (*(IMAGE for _ in IMAGE_ENDINGS), TXT, JSON)  # by the number of the ending

Read = Callable[[int, int], bytes]  # offset, length


class Scan(NamedTuple):
    """The content of one shard."""

    table: np.ndarray  # (samples, COLUMNS) uint32
    broken: Counter[str]  # samples that cannot be used, by kind
    stamp: int  # a hash of all headers: names, sizes and times


class TarReader:
    """Buffered reads of a tar. Without `read_bytes`, more is read at once where headers are close together."""

    def __init__(self, read: Read, size: int, *, read_bytes: int | None = None) -> None:
        self.read, self.size, self.read_bytes = read, size, read_bytes
        self.start, self.buffer = 0, b""

    def get(self, position: int, length: int) -> bytes:
        offset = position - self.start
        if offset < 0 or offset + length > len(self.buffer):
            dense = offset - len(self.buffer) < SPARSE_GAP_BYTES
            read_bytes = self.read_bytes or (DENSE_READ_BYTES if dense else SPARSE_READ_BYTES)
            self.start, self.buffer, offset = position, self.read(position, max(length, read_bytes)), 0
        return self.buffer[offset : offset + length]


@contextlib.contextmanager
def open_tar(file: FileStat) -> Iterator[TarReader]:
    """A reader of one shard. A compressed or unreadable shard raises a UserError."""
    files = OpenFiles()

    def read(offset: int, length: int) -> bytes:
        content = files.read(file, offset, length)
        ACTIVITY.still_working()  # on a slow disk one shard takes long
        return content

    try:
        if command := _decompressor(read(0, BLOCK)):
            raise UserError(
                f"{file.path} is compressed and cannot be read by position; decompress it: {command} {file.path}",
                code="data.compressed",
            )
        yield TarReader(read, file.size, read_bytes=REMOTE_READ_BYTES if is_remote(file.path) else None)
    except OSError as error:
        raise UserError(f"cannot read {file.path} ({first_line(error)})", code="data.unreadable") from error
    finally:
        files.close()


def _decompressor(start: bytes) -> str | None:
    commands = {b"\x1f\x8b": "gunzip", b"BZh": "bunzip2", b"\xfd7zXZ\x00": "unxz", b"\x28\xb5\x2f\xfd": "unzstd --rm"}
    return next((command for magic, command in commands.items() if start.startswith(magic)), None)


def scan(reader: TarReader) -> Scan:
    """Index the samples of a tar."""
    samples: dict[bytes, list[int]] = {}  # by key: the bits of the endings found, then a row of the table
    broken: Counter[str] = Counter()
    duplicates: set[bytes] = set()
    escaping: set[bytes] = set()
    walk = _Walk(reader, broken)
    for name, position, size in walk:
        directory, slash, base = name.rpartition(b"/")
        stem, _, ending = base.partition(b".")
        number = _ENDINGS.get(ending.lower())
        if number is None:
            continue
        key = directory + slash + stem
        if slash and (not directory or directory[0] == SLASH or b".." in directory.split(b"/")):
            escaping.add(key)
            continue
        sample = samples.get(key) or samples.setdefault(key, [0] * (1 + COLUMNS))
        bit = 1 << number
        if sample[0] & bit:
            duplicates.add(key)
            continue
        if number >= _TXT_NUMBER or not sample[0] & (bit - 1):  # of several images, the first in IMAGE_ENDINGS
            column = 1 + _COLUMN[number]
            sample[column], sample[column + 1] = position // BLOCK, size
        sample[0] |= bit
    values: list[int] = []
    for sample in samples.values():
        if not sample[0] & _ANY_IMAGE:
            broken["no image"] += 1
        elif not sample[0] & _ANY_CAPTION:
            broken["no caption"] += 1
        elif max(sample) >= 1 << 32 or any(map(int.__gt__, sample[2::2], MAX_BYTES)):
            broken["huge"] += 1
        else:
            values += sample[1:]
    broken["duplicate key"] += len(duplicates)
    broken["escaping path"] += len(escaping)
    return Scan(np.array(values, np.uint32).reshape(-1, COLUMNS), +broken, walk.stamp)


def files_in(reader: TarReader, *, contents_of: str) -> Iterator[tuple[str, int, int, bytes]]:
    """(name, offset, size, content) of every regular file; the content only of small files with this ending."""
    for name, position, size in _Walk(reader, Counter()):
        text = name.decode("utf-8", "replace")
        with_content = text.endswith(contents_of) and size <= MAX_METADATA_BYTES
        yield text, position, size, reader.get(position, size) if with_content else b""


def name_before(read: Read, block: int) -> str:
    """The key of the sample whose file begins at a block, from the header before it."""
    directory, slash, base = _name(read((block - 1) * BLOCK, BLOCK)).rpartition(b"/")
    return (directory + slash + base.partition(b".")[0]).decode("utf-8", "replace")


class _Walk:
    """(name, offset, size) of every regular file. After damage it continues at the next valid header."""

    def __init__(self, reader: TarReader, broken: Counter[str]) -> None:
        self.reader, self.size, self.broken = reader, reader.size, broken
        self.stamp = 0

    def __iter__(self) -> Iterator[tuple[bytes, int, int]]:
        position, name, size = 0, None, None  # an extension header sets the name or the size of the next file
        get, stamp = self.reader.get, 0
        while position < self.size:
            header = get(position, BLOCK)
            if len(header) < BLOCK:
                break
            adler = adler32(header)
            content_size = _size(header, adler)
            kind, start = header[156], position + BLOCK
            if content_size is not None:
                self.stamp = stamp = (stamp * 1_000_003 ^ adler) & 0xFFFF_FFFF_FFFF_FFFF
                if kind in _NO_CONTENT:
                    content_size = 0
                elif kind in _REGULAR and size is not None:
                    needed = size > MAX_USTAR_BYTES and start + size <= self.size
                    content_size = size if needed or not content_size else content_size
            if content_size is None or start + content_size > self.size:
                following = self._next_header(start)
                if content_size is not None and following in (None, self.size):
                    break
                # Zeros before the end are a hole, or concatenated tars.
                self.broken["header"] += following is not None or any(header) or name is not None
                if following is None:
                    return
                position, name, size = following, None, None
                continue
            if kind in _REGULAR:
                yield name or _name(header), start, content_size
            if kind in _REGULAR or kind in _NO_CONTENT:
                name, size = None, None
            elif kind in b"xL" and content_size <= MAX_METADATA_BYTES:
                content = get(start, content_size)
                if kind == ord("L"):
                    name = content.rstrip(b"\0")
                elif b"path=" in content or b"size=" in content:
                    fields = _pax_fields(content)
                    name, digits = fields.get(b"path", name), fields.get(b"size", b"")
                    size = int(digits) if digits.isdigit() and len(digits) < 20 else size
            position = start + (content_size + BLOCK - 1) // BLOCK * BLOCK
        self.broken["truncated"] += 1  # no end marker was found

    def _next_header(self, position: int) -> int | None:
        """The first valid header from here on, or the end. None if only zeros follow: the end marker."""
        magic, only_zeros = np.frombuffer(b"ustar", np.uint8), True
        for start in range(position, self.size, SEARCH_BYTES):
            content = self.reader.get(start, SEARCH_BYTES)
            blocks = np.frombuffer(content[: len(content) // BLOCK * BLOCK], np.uint8).reshape(-1, BLOCK)
            for number in np.flatnonzero((blocks[:, 257:262] == magic).all(axis=1)):
                header = blocks[number].tobytes()
                if _size(header, adler32(header)) is not None:
                    return start + int(number) * BLOCK
            only_zeros = only_zeros and not blocks.any()
        return None if only_zeros else self.size


@functools.lru_cache(1 << 16)
def _expected_sum(field: bytes) -> int:
    """The sum of the bytes of a header with this checksum, which counts its own field as spaces."""
    return int(field.rstrip(b" \0"), 8) + sum(field) - 8 * ord(" ")


def _size(header: bytes, adler: int) -> int | None:
    """The size in a header; None if the checksum does not match."""
    try:
        expected, size = _expected_sum(header[148:156]), header[124:136]
        number = int.from_bytes(size[1:], "big") if size[0] == 0x80 else int(size.rstrip(b" \0") or b"0", 8)
    except ValueError:
        return None
    # The low half of Adler-32 is 1 plus the sum of the bytes modulo 65521, computed at the speed of C.
    matches = not ((adler & 0xFFFF) - 1 - expected) % ADLER_MODULUS
    return number if matches and number >= 0 else None


def _name(header: bytes) -> bytes:
    name = header[:100].partition(b"\0")[0]
    if header[257:263] == b"ustar\0" and header[345]:
        return header[345:500].partition(b"\0")[0] + b"/" + name
    return name


def _pax_fields(content: bytes) -> dict[bytes, bytes]:
    """Records of the form `LENGTH KEY=VALUE\\n`, up to the first that does not parse."""
    fields: dict[bytes, bytes] = {}
    while record := re.match(rb"(\d{1,9}) ([^=]+)=", content):
        length = max(int(record[1]), record.end())
        fields[record[2]] = content[record.end() : length].rstrip(b"\n")
        content = content[length:]
    return fields

"""One walk over the headers of a tar shard: where the files of each sample lie. Payloads are skipped, not read."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple
from zlib import adler32

import numpy as np

BLOCK = 512
NEAR, FAR = 1 << 20, 1 << 13  # bytes read ahead where headers stand close together, and where they do not
FAR_APART = 1 << 15
LONGEST_NAME = 1 << 16
ADLER = 65521
MOST_CHECKSUMS = 1 << 16
_REGULAR = b"\x0007"
_NO_DATA = b"123456"  # links, devices and directories

IMAGE_ENDINGS = ("jpg", "jpeg", "png", "webp")
TEXT_ENDINGS = ("txt", "json")
_ENDINGS = {ending.encode(): number for number, ending in enumerate(IMAGE_ENDINGS + TEXT_ENDINGS)}
_TXT = len(IMAGE_ENDINGS)
_IMAGES, _TEXTS = (1 << _TXT) - 1, 3 << _TXT
SLASH = ord("/")
# Columns of the table, in pairs: the block where the file begins (0: there is none) and its bytes.
IMAGE, TXT, JSON, COLUMNS = 0, 2, 4, 6
_COLUMN = (*(IMAGE for _ in IMAGE_ENDINGS), TXT, JSON)


class Scan(NamedTuple):
    """What one shard holds."""

    table: np.ndarray  # (samples, COLUMNS) uint32
    broken: Counter[str]  # samples that cannot be used, by kind
    stamp: int  # of all headers: names, sizes and times


class _Damaged(Exception):  # noqa: N818 - carries no message
    """A block that should be a header and is none."""


class _Window:
    """Reads of a file through a buffer that grows where headers stand close together."""

    def __init__(self, read: Callable[[int, int], bytes], size: int, *, ahead: int | None) -> None:
        self.read, self.size, self.ahead = read, size, ahead
        self.start, self.buffer = 0, b""

    def get(self, at: int, length: int) -> bytes:
        offset = at - self.start
        if offset < 0 or offset + length > len(self.buffer):
            near = at - self.start - len(self.buffer) < FAR_APART
            ahead = self.ahead or (NEAR if near else FAR)
            self.start, self.buffer, offset = at, self.read(at, max(length, ahead)), 0
        return self.buffer[offset : offset + length]


def compression_of(start: bytes) -> str | None:
    """The command that unpacks a compressed file, by its first bytes."""
    magic = {b"\x1f\x8b": "gunzip", b"BZh": "bunzip2", b"\xfd7zXZ\x00": "unxz", b"\x28\xb5\x2f\xfd": "unzstd --rm"}
    return next((command for first, command in magic.items() if start.startswith(first)), None)


def scan(read: Callable[[int, int], bytes], size: int, *, ahead: int | None = None) -> Scan:
    """Index the samples of a tar given by `read(offset, length)`; `ahead` fixes how much is read at once."""
    samples: dict[bytes, list[int]] = {}
    broken: Counter[str] = Counter()
    repeated: set[bytes] = set()
    escaping: set[bytes] = set()
    walk = _Walk(_Window(read, size, ahead=ahead), size, broken)
    last_key, sample = None, []
    for name, at, length in walk:
        directory, slash, base = name.rpartition(b"/")
        stem, _, ending = base.partition(b".")
        number = _ENDINGS.get(ending)
        if number is None and (number := _ENDINGS.get(ending.lower())) is None:
            continue
        key = directory + slash + stem
        if slash and (not directory or directory[0] == SLASH or b".." in directory.split(b"/")):
            escaping.add(key)
            continue
        if key != last_key:
            last_key, sample = key, samples.get(key)
            if sample is None:
                samples[key] = sample = [0] * (1 + COLUMNS)
        bit = 1 << number
        if sample[0] & bit:
            repeated.add(key)
            continue
        if number >= _TXT or not sample[0] & (bit - 1):  # of several images, the ending that is named first
            column = 1 + _COLUMN[number]
            sample[column], sample[column + 1] = at // BLOCK, length
        sample[0] |= bit
    flat: list[int] = []
    for sample in samples.values():
        if not sample[0] & _IMAGES:
            broken["no image"] += 1
        elif not sample[0] & _TEXTS:
            broken["no caption"] += 1
        elif max(sample) >= 1 << 32:
            broken["huge"] += 1
        else:
            flat += sample[1:]
    broken["duplicate key"] += len(repeated)
    broken["escaping path"] += len(escaping)
    table = np.array(flat, np.uint32).reshape(-1, COLUMNS)
    return Scan(table, +broken, walk.stamp)


def files_in(
    read: Callable[[int, int], bytes], size: int, *, contents_of: str, ahead: int | None = None
) -> Iterator[tuple[str, int, int, bytes]]:
    """(name, offset, length, content) of every regular file; the content only of those with this ending."""
    window = _Window(read, size, ahead=ahead)
    for name, at, length in _Walk(window, size, Counter()):
        text = name.decode("utf-8", "replace")
        small = text.endswith(contents_of) and length <= LONGEST_NAME
        yield text, at, length, window.get(at, length) if small else b""


def name_before(read: Callable[[int, int], bytes], block: int) -> str:
    """The key of the sample whose file begins at a block, from the header before it."""
    name = _name(read((block - 1) * BLOCK, BLOCK))
    directory, slash, base = name.rpartition(b"/")
    return (directory + slash + base.partition(b".")[0]).decode("utf-8", "replace")


class _Walk:
    """(name, offset, length) of every regular file. After damage it goes on at the next header it finds."""

    def __init__(self, window: _Window, size: int, broken: Counter[str]) -> None:
        self.window, self.size, self.broken = window, size, broken
        self.stamp = 0

    def __iter__(self) -> Iterator[tuple[bytes, int, int]]:
        position: int | None
        position, name, length = 0, None, None  # the latter two from a header that speaks of the next one
        get, size, stamp = self.window.get, self.size, 0
        while position < size:
            header = get(position, BLOCK)
            if len(header) < BLOCK:
                self.broken["truncated"] += 1
                return
            total, declared = adler32(header), 0
            try:
                checksum, field = _CHECKSUMS[header[148:156]]
                declared = int(header[124:135], 8)
                # The low half of Adler-32 is 1 plus the sum of the bytes, modulo 65521, at the speed of C.
                sound = not ((total & 0xFFFF) - field - checksum) % ADLER and declared >= 0 and header[135] in b"\0 "
            except ValueError:
                sound = False  # or written in another way
            if not sound:
                if not header[0] and not any(header):
                    position = self._after_zeros(position)
                    if position is not None or name is not None:
                        self.broken["header"] += 1  # a hole, or tars strung together: nobody can tell
                    if position is None:
                        return
                    name, length = None, None
                    continue
                try:
                    declared = _check(header)
                except _Damaged:
                    self.broken["header"] += 1
                    position, name, length = self._next_header(position + BLOCK), None, None
                    continue
            self.stamp = stamp = (stamp * 1_000_003 ^ total) & 0xFFFF_FFFF_FFFF_FFFF
            kind, data = header[156], position + BLOCK
            if kind in _REGULAR:
                actual = declared if length is None else length
                if data + actual > size:
                    self.broken["truncated"] += 1
                    return
                yield name or _name(header), data, actual
                position, name, length = data + (actual + BLOCK - 1) // BLOCK * BLOCK, None, None
            elif kind in _NO_DATA:
                position, name, length = data, None, None
            else:
                if data + declared > size:
                    self.broken["truncated"] += 1
                    return
                if kind in b"xL" and declared <= LONGEST_NAME:
                    body = get(data, declared)
                    if kind == ord("L"):
                        name = body.rstrip(b"\0")
                    elif b"path=" in body or b"size=" in body:
                        fields = _pax(body)
                        name = fields.get(b"path", name)
                        length = _number(fields.get(b"size", b""), length)
                position = data + (declared + BLOCK - 1) // BLOCK * BLOCK
        self.broken["truncated"] += 1  # there was no end marker: the file was cut between two members

    def _after_zeros(self, position: int) -> int | None:
        """Where the zeros of an end marker stop, if anything stands behind them."""
        for start, blocks in self._blocks(position):
            filled = blocks.any(axis=1)
            if filled.any():
                return start + int(filled.argmax()) * BLOCK
        return None

    def _next_header(self, position: int) -> int:
        for start, blocks in self._blocks(position):
            for number in np.flatnonzero((blocks[:, 257:262] == np.frombuffer(b"ustar", np.uint8)).all(axis=1)):
                try:
                    _check(blocks[number].tobytes())
                except _Damaged:
                    continue
                return start + int(number) * BLOCK
        return self.size

    def _blocks(self, position: int) -> Iterator[tuple[int, np.ndarray]]:
        for start in range(position, self.size, NEAR):
            piece = self.window.read(start, NEAR)
            yield start, np.frombuffer(piece[: len(piece) // BLOCK * BLOCK], np.uint8).reshape(-1, BLOCK)


class _Checksums(dict[bytes, tuple[int, int]]):
    """The number in a checksum field, and by how much the field itself makes the sum of a header differ from it."""

    def __missing__(self, field: bytes) -> tuple[int, int]:
        found = int(field.rstrip(b" \0"), 8), 1 + sum(field) - 8 * ord(" ")
        if len(self) < MOST_CHECKSUMS:
            self[field] = found
        return found


_CHECKSUMS = _Checksums()


def _check(header: bytes) -> int:
    """The size in a header whose checksum holds."""
    try:
        stored, field = _CHECKSUMS[header[148:156]]
        size = header[124:136]
        length = int.from_bytes(size[1:], "big") if size[0] == 0x80 else int(size.rstrip(b" \0") or b"0", 8)
    except ValueError:
        raise _Damaged from None
    if ((adler32(header) & 0xFFFF) - field - stored) % ADLER or length < 0:
        raise _Damaged
    return length


def _name(header: bytes) -> bytes:
    name = header[:100].partition(b"\0")[0]
    if header[257:263] == b"ustar\0" and header[345]:
        return header[345:500].partition(b"\0")[0] + b"/" + name
    return name


def _pax(body: bytes) -> dict[bytes, bytes]:
    """Records of the form `LENGTH KEY=VALUE\\n`; what does not parse ends the list."""
    fields: dict[bytes, bytes] = {}
    while body:
        digits, _, _ = body.partition(b" ")
        length = _number(digits, 0)
        key, equals, value = body[len(digits) + 1 : length].partition(b"=")
        if not equals:
            break
        fields[key] = value.rstrip(b"\n")
        body = body[length:]
    return fields


def _number(digits: bytes, otherwise: int | None) -> int | None:
    return int(digits) if digits.isdigit() and len(digits) < 20 else otherwise

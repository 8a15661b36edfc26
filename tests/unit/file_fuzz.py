"""Damaged files: how to damage one, and what may come of reading it."""

import contextlib
import random
import re
import resource
import signal
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path

from leanclip.data import BrokenSample
from leanclip.data.source import Packable, Source
from leanclip.errors import UserError

CPU_SECONDS = 20
EXTRA_MEMORY = 2 << 30  # bytes of address space beyond what the process has
SCALAR = re.compile(rb'"(?:[^"\\\n]|\\.)*"|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null')
PLANTED = (
    b"-1", b"0", b"1", b"2.5", b"1e400", b"-1e400", b"9" * 400, b"9" * 5000, b"9223372036854775808", b"1e18", b"NaN",
    b"Infinity", b"nan", b"null", b"true", b'""', b'"x"', b"[]", b"{}", b"[[1]]", b'"\\ud800"', b'"\\u0000"',
    b'"../../../../etc/passwd"', b'"/dev/zero"', b"[" * 50_000, b'{"a":' * 50_000, b'"' + b"y" * 200_000 + b'"',
    b"\xe2\x80\xa8", b"\x00", b"\xff\xfe", b'"', b"'", b"\r", b"\n\n",
)  # fmt: skip


def flip(content: bytearray, draw: random.Random) -> None:
    for _ in range(draw.choice((1, 1, 3, 20))):
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)


def truncate(content: bytearray, draw: random.Random) -> None:
    del content[draw.randrange(len(content)) :]


def drop(content: bytearray, draw: random.Random) -> None:
    start = draw.randrange(len(content))
    del content[start : start + draw.choice((1, 8, 64, 512))]


def repeat(content: bytearray, draw: random.Random) -> None:
    start, at = draw.randrange(len(content)), draw.randrange(len(content))
    content[at:at] = content[start : start + draw.choice((1, 40, 400))]


def overwrite(content: bytearray, draw: random.Random) -> None:
    start = draw.randrange(len(content))
    length = min(len(content) - start, draw.choice((1, 4, 8, 40)))
    content[start : start + length] = draw.choice((draw.randbytes(length), bytes(length), b"\xff" * length))


def plant(content: bytearray, draw: random.Random) -> None:
    """An extreme value in the place of a number, a word or a string."""
    if scalars := list(SCALAR.finditer(content)):
        start, stop = draw.choice(scalars).span()
    else:
        start = stop = draw.randrange(len(content))
    content[start:stop] = draw.choice(PLANTED)


def swap_lines(content: bytearray, draw: random.Random) -> None:
    lines = bytes(content).split(b"\n")
    one, other = draw.randrange(len(lines)), draw.randrange(len(lines))
    lines[one], lines[other] = lines[other], lines[one]
    content[:] = b"\n".join(lines)


BINARY = (flip, truncate, drop, repeat, overwrite)
TEXT = (*BINARY, swap_lines, *[plant] * 8)


@dataclass(frozen=True)
class Target:
    """A file that a command reads: `read` returns what it holds, as a value that can be compared."""

    path: Path
    read: Callable[[], Hashable]
    exact: bool = False  # a damaged file must give the data of the sound one: leanclip wrote it, with a checksum
    damages: tuple[Callable[[bytearray, random.Random], None], ...] = TEXT


def fuzz(target: Target, *, cases: int, seed: int) -> Counter[str]:
    """How many damaged files gave the `same` data, `other` data or an `error`. Anything else is raised."""
    original, sound = target.path.read_bytes(), target.read()
    outcomes: Counter[str] = Counter()
    for case in range(seed, seed + cases):
        draw = random.Random(case)
        content = bytearray(original)
        damages = draw.choices(target.damages, k=draw.choice((1, 1, 1, 2, 4)))
        for damage in damages:
            if content:
                damage(content, draw)
        target.path.write_bytes(content)
        try:
            outcome = _outcome(target, sound)
        except BaseException as error:
            names = ", ".join(damage.__name__ for damage in damages)
            raise AssertionError(f"case {case} of {target.path.name}: {names}") from error
        assert outcome != "other" or not target.exact, f"case {case} of {target.path.name} gave other data"
        outcomes[outcome] += 1
    target.path.write_bytes(original)
    assert target.read() == sound
    return outcomes


def _outcome(target: Target, sound: Hashable) -> str:
    try:
        with limits():
            return "same" if target.read() == sound else "other"
    except UserError as error:
        if not error.code or not _readable(error):
            raise AssertionError("an error without a code, or of more than one line") from error
        return "error"


def _readable(error: Exception) -> bool:
    return len(str(error).splitlines()) == 1 and len(str(error)) < 2000


@contextlib.contextmanager
def limits() -> Iterator[None]:
    """Inside, the process may use 20 s of CPU time and 2 GiB more memory. pytest's own time limit ends a wait."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"{CPU_SECONDS} s of CPU time")

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGPROF, stop)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + EXTRA_MEMORY, hard))
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGPROF, handler)


def samples(source: Source | Packable) -> tuple[Hashable, ...]:
    """Every sample of a source: what packing reads of it, or the kind of damage under which it is counted."""
    reads = [source.image_bytes, lambda index: tuple(source.captions(index))]
    if isinstance(source, Packable):
        reads.append(lambda index: str(source.fields(index)))
    return tuple(tuple(_part(read, index) for read in reads) for index in range(len(source)))


def _part(read: Callable[[int], Hashable], index: int) -> Hashable:
    try:
        return read(index)
    except BrokenSample as broken:
        if not _readable(broken):
            raise AssertionError("a broken sample is described in one line") from broken
        return broken.kind

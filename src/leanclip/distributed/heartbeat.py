"""A watch over the other ranks: who died or hangs is named, and nobody waits for him longer than the time-out.

Every process tells the store every other second that it lives and how far its main thread has come. A thread of
its own reads what the others say, because the main thread may be waiting inside a collective for the very rank that
is gone.
"""

import contextlib
import multiprocessing
import os
import socket
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import Store


class Progress:
    """How far the main thread has come: the collectives that it began and the steps that it finished.

    All ranks go through the same ones in the same order, so one with fewer is the one that the others wait for.
    """

    def __init__(self) -> None:
        self.count, self.worked, self.moved = 0, 0, time.monotonic()

    def __call__(self) -> None:
        self.count += 1
        self.moved = time.monotonic()

    def still_at_it(self) -> None:
        """No further, but at work on something that takes long, such as a slow disk: the others wait on."""
        self.worked += 1
        self.moved = time.monotonic()


PROGRESS = Progress()  # of this process
LOST = 3  # exit code: another rank died or hangs
WORKING, DONE, FAILED = "working", "done", "failed"


@dataclass
class _Seen:
    """The last sign of a rank, and when it changed, by this process's clock."""

    beat: int = -1
    progress: int = -1
    worked: int = -1
    beat_at: float = 0.0
    progress_at: float = 0.0
    ending: str = "working"
    where: str = "?"

    @property
    def finished(self) -> bool:
        return self.ending != WORKING


class Watch:
    """Looks after the other ranks, from `start` to `stop`, in a thread."""

    def __init__(self, store: Store | None, rank: int, size: int, timeout: float) -> None:
        self.store, self.rank, self.size, self.timeout = store, rank, size, timeout
        self._own: Store | None = None
        self.interval = min(2.0, timeout / 8)
        self._seen = {other: _Seen() for other in range(size) if other != rank}
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._ending = DONE

    def start(self) -> None:
        if self.store is None or self.size == 1:
            return
        now = time.monotonic()
        for seen in self._seen.values():
            seen.beat_at = seen.progress_at = now
        # A connection of its own: the main thread's may be blocked in a wait.
        self._own = self.store.clone()  # pyright: ignore[reportAttributeAccessIssue]
        assert self._own is not None
        self._own.set_timeout(timedelta(seconds=self.timeout))
        self._thread = threading.Thread(target=self._run, name="leanclip-watch", daemon=True)
        self._thread.start()

    def stop(self, *, failed: bool = False) -> None:
        """This rank is done, or gives up, and says so."""
        if self._thread is None:
            return
        self._ending = FAILED if failed else DONE
        self._stopping.set()
        self._thread.join(timeout=self.interval * 2)
        self._thread = None

    def explain(self, error: BaseException) -> None:
        """A collective failed here: wait until it shows whose fault it is, and leave with that message."""
        if self._thread is None:
            return
        deadline = time.monotonic() + max(6 * self.interval, 2.0)
        while time.monotonic() < deadline:
            lost = self._lost(patience=3 * self.interval)
            if lost:
                self._leave(lost)
            if gone := self._gone():
                self._leave(gone)
            time.sleep(self.interval / 4)

    def _run(self) -> None:
        beat = 0
        while not self._stopping.wait(self.interval):
            beat += 1
            try:
                self._tell(_sign(beat, WORKING))
                self._listen()
            except Exception as error:  # whatever a broken connection raises
                if not self._stopping.is_set():
                    self._leave(f"the store of the process group does not answer ({_first_line(error)}): rank 0 or"
                                " its host is gone")  # fmt: skip
                return
            moved = [PROGRESS.moved, *(seen.progress_at for seen in self._seen.values() if not seen.finished)]
            stuck = time.monotonic() - max(moved) > self.timeout
            if lost := self._lost(patience=self.timeout):
                self._leave(lost)
            elif gave_up := self._gone(FAILED):
                self._leave(gave_up)
            elif stuck:
                self._leave(self._behind())
        try:
            self._tell(_sign(beat + 1, self._ending))
        except Exception:
            return  # the others are gone already

    def _tell(self, sign: str) -> None:
        assert self._own is not None
        self._own.set(f"watch/{self.rank}", sign)

    def _listen(self) -> None:
        assert self._own is not None
        if self._own.check(["watch/verdict"]):
            self._leave(self._own.get("watch/verdict").decode())
        now = time.monotonic()
        for other, seen in self._seen.items():
            if seen.finished or not self._own.check([f"watch/{other}"]):
                continue
            sign = self._own.get(f"watch/{other}").decode().split(" ", 4)
            (beat, progress, worked), (seen.ending, seen.where) = map(int, sign[:3]), sign[3:]
            if beat != seen.beat:
                seen.beat, seen.beat_at = beat, now
            if (progress, worked) != (seen.progress, seen.worked):
                seen.progress, seen.worked, seen.progress_at = progress, worked, now

    def _lost(self, *, patience: float) -> str | None:
        """Ranks that gave no sign of life for a while."""
        now = time.monotonic()
        silent = {r: now - s.beat_at for r, s in self._seen.items() if not s.finished and now - s.beat_at > patience}
        if not silent:
            return None
        names = ", ".join(f"rank {r} ({self._seen[r].where})" for r in silent)
        return f"{names} gave no sign of life for {max(silent.values()):.0f} s: it died or its host hangs"

    def _gone(self, *endings: str) -> str | None:
        """Ranks that ended while this one goes on."""
        ended = [str(r) for r, s in self._seen.items() if s.ending in (endings or (DONE, FAILED))]
        return f"rank {', '.join(ended)} ended early; its own message says why" if ended else None

    def _behind(self) -> str:
        """Ranks that live but have not come as far as this one, while this one waits."""
        behind = [r for r, s in self._seen.items() if not s.finished and s.progress < PROGRESS.count]
        if not behind:
            everyone = [s.progress for s in self._seen.values() if not s.finished]
            if any(progress > PROGRESS.count for progress in everyone):
                return (
                    f"rank {self.rank} hangs: it has not come further for {self.timeout:.0f} s"
                    " while the others wait for it"
                )
            return f"nobody has come further for {self.timeout:.0f} s: all ranks wait inside the same operation"
        names = ", ".join(f"rank {r} ({self._seen[r].where})" for r in behind)
        return f"{names} hangs: it has not come further for {self.timeout:.0f} s while the others wait for it"

    def _leave(self, message: str) -> None:
        """Tell everybody why, and end this process. Rank 0 may keep the store, so it waits until the others know."""
        print(f"leanclip: rank {self.rank} stops: {message}", file=sys.stderr, flush=True)
        with contextlib.suppress(Exception):  # the store may be what is gone
            assert self._own is not None
            if not self._own.check(["watch/verdict"]):
                self._own.set("watch/verdict", message)
            if self.rank == 0:
                time.sleep(3 * self.interval)
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(LOST)


def _sign(beat: int, state: str) -> str:
    return f"{beat} {PROGRESS.count} {PROGRESS.worked} {state} {socket.gethostname()}:{os.getpid()}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:160]

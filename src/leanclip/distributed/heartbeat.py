"""Detects ranks that died or hang, names them, and ends the other ranks within the timeout.

Every process writes to the store every other second that it is alive and how far its main thread has come. A separate
thread reads what the others wrote, because the main thread may wait inside a collective for the lost rank.
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
from typing import Any

from torch._C._distributed_c10d import Store

from leanclip.errors import first_line
from leanclip.progress import ACTIVITY

LOST_RANK_EXIT = 3  # exit code: another rank died or hangs
WORKING, DONE, FAILED = "working", "done", "failed"
REASON_KEY = "heartbeat/reason"


@dataclass
class _Peer:
    """The last heartbeat of another rank, and when it changed, by this process's clock."""

    beat: int = -1
    count: int = -1
    ticks: int = -1
    beat_at: float = 0.0
    active_at: float = 0.0
    status: str = WORKING
    host: str = "?"

    @property
    def ended(self) -> bool:
        return self.status != WORKING


class Heartbeat:
    """Watches the other ranks in a thread, from `start` to `stop`."""

    def __init__(self, store: Store | None, rank: int, size: int, timeout: float) -> None:
        self.store, self.rank, self.size, self.timeout = store, rank, size, timeout
        self._connection: Any = None  # a second one, because the main thread's may be blocked in a wait
        self.interval = min(2.0, timeout / 8)
        self._peers = {other: _Peer() for other in range(size) if other != rank}
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._final_status = DONE

    def start(self) -> None:
        if self.store is None or self.size == 1:
            return
        for peer in self._peers.values():
            peer.beat_at = peer.active_at = time.monotonic()
        self._connection = self.store.clone()  # pyright: ignore[reportAttributeAccessIssue]
        self._connection.set_timeout(timedelta(seconds=self.timeout))
        self._thread = threading.Thread(target=self._run, name="leanclip-heartbeat", daemon=True)
        self._thread.start()

    def stop(self, *, failed: bool = False) -> None:
        if self._thread is None:
            return
        self._final_status = FAILED if failed else DONE
        self._stopping.set()
        self._thread.join(timeout=self.interval * 2)

    def exit_if_rank_lost(self) -> None:
        """After a failed collective: wait until a lost rank shows, and exit with the message that names it."""
        if self._thread is None:
            return
        deadline = time.monotonic() + max(6 * self.interval, 2.0)
        while time.monotonic() < deadline:
            if message := self._silent(3 * self.interval) or self._ended(DONE, FAILED):
                self._exit(message)
            time.sleep(self.interval / 4)

    def _run(self) -> None:
        beat = 0
        while not self._stopping.wait(self.interval):
            beat += 1
            try:
                self._write(beat, WORKING)
                self._read()
            except Exception as error:  # whatever a broken connection raises
                if not self._stopping.is_set():
                    self._exit(
                        f"the store of the process group does not answer ({first_line(error)}): rank 0 or its host"
                        " is lost"
                    )
                return
            active_at = [ACTIVITY.changed_at, *(peer.active_at for peer in self._peers.values() if not peer.ended)]
            stuck = time.monotonic() - max(active_at) > self.timeout
            if message := self._silent(self.timeout) or self._ended(FAILED) or (self._hanging() if stuck else None):
                self._exit(message)
        with contextlib.suppress(Exception):  # the others may have ended already
            self._write(beat + 1, self._final_status)

    def _write(self, beat: int, status: str) -> None:
        host = f"{socket.gethostname()}:{os.getpid()}"
        self._connection.set(f"heartbeat/{self.rank}", f"{beat} {ACTIVITY.count} {ACTIVITY.ticks} {status} {host}")

    def _read(self) -> None:
        if self._connection.check([REASON_KEY]):
            self._exit(self._connection.get(REASON_KEY).decode())
        now = time.monotonic()
        for rank, peer in self._peers.items():
            if peer.ended or not self._connection.check([f"heartbeat/{rank}"]):
                continue
            *numbers, peer.status, peer.host = self._connection.get(f"heartbeat/{rank}").decode().split(" ", 4)
            beat, count, ticks = map(int, numbers)
            if beat != peer.beat:
                peer.beat, peer.beat_at = beat, now
            if (count, ticks) != (peer.count, peer.ticks):
                peer.count, peer.ticks, peer.active_at = count, ticks, now

    def _silent(self, seconds: float) -> str | None:
        now = time.monotonic()
        silent = {r: now - p.beat_at for r, p in self._peers.items() if not p.ended and now - p.beat_at > seconds}
        message = f"sent no heartbeat for {max(silent.values(), default=0):.0f} s: it died or its host hangs"
        return f"{self._names(*silent)} {message}" if silent else None

    def _ended(self, *statuses: str) -> str | None:
        ended = [str(rank) for rank, peer in self._peers.items() if peer.status in statuses]
        return f"rank {', '.join(ended)} ended early; see its message" if ended else None

    def _hanging(self) -> str:
        """A message about the ranks that have a heartbeat but made less progress than the others."""
        running = {rank: peer.count for rank, peer in self._peers.items() if not peer.ended}
        behind = [rank for rank, count in running.items() if count < ACTIVITY.count]
        if not behind and all(count == ACTIVITY.count for count in running.values()):
            return f"no progress on any rank for {self.timeout:.0f} s: all ranks wait inside the same operation"
        names = self._names(*behind) if behind else f"rank {self.rank}"
        return f"{names} hangs: no progress for {self.timeout:.0f} s while the others wait for it"

    def _names(self, *ranks: int) -> str:
        return ", ".join(f"rank {rank} ({self._peers[rank].host})" for rank in ranks)

    def _exit(self, message: str) -> None:
        """Share the reason and end this process. Rank 0 may host the store, so it waits until the others read it."""
        print(f"leanclip: rank {self.rank} stops: {message}", file=sys.stderr, flush=True)
        with contextlib.suppress(Exception):  # the store itself may be lost
            if not self._connection.check([REASON_KEY]):
                self._connection.set(REASON_KEY, message)
            if self.rank == 0:
                time.sleep(3 * self.interval)
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(LOST_RANK_EXIT)

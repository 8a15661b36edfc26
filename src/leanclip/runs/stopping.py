"""Stops a run before its last step, with a checkpoint: after a signal, or when --max-hours is over.

SLURM and spot instances announce the end with SIGTERM or SIGUSR1. All processes stop after the same step: the one
with the signal writes the number of the step to the store, which all of them read after each step.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from torch._C._distributed_c10d import Store

from leanclip.errors import stopped_code

INTERRUPTED = 130  # exit code: stopped by Ctrl-C, and saved
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
KEY = "leanclip/stop"
REPEAT_SECONDS = 10.0  # a signal that comes later than this after the first is a second one
REPEAT_CTRL_C_SECONDS = 0.5  # the same for Ctrl-C, which a terminal and a launcher may both send
CTRL_C = "Ctrl-C was pressed"


class Stopping:
    """Decides when a run stops. A single process needs no store."""

    def __init__(self, store: Store | None = None, *, hours: float | None = None, began: float | None = None) -> None:
        self.store, self.hours = store, hours
        self.signal: signal.Signals | None = None
        began = time.monotonic() if began is None else began
        self.deadline = None if hours is None else began + 3600 * hours
        self.notify: Callable[[str], None] | None = None  # set as soon as there is something to save
        self._process = os.getpid()
        self._received: dict[int, float] = {}  # when each signal came first

    def after(self, step: int) -> str | None:
        """The reason to stop after this step, the same on all processes, which call it after every step.

        `step` counts the steps of this process, so that repeated steps have different numbers."""
        reason = self._reason()
        if self.store is None:
            return reason
        if reason is not None:
            # The others cannot finish the next step without this process, so they read the key by then.
            self.store.compare_set(KEY, "", f"{step + 1} {reason}")
            self.deadline, self.signal = None, None
        if not self.store.check([KEY]):
            return None
        last, _, reason = self.store.get(KEY).decode().partition(" ")
        return reason if step >= int(last) else None

    def _reason(self) -> str | None:
        if self.signal is not None:
            return CTRL_C if self.signal == signal.SIGINT else f"{self.signal.name} was received"
        if self.deadline is not None and time.monotonic() >= self.deadline:
            return f"its {self.hours:g} hours are over"
        return None

    @contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Install the signal handlers. A second signal ends the process at once."""
        if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
            yield
            return
        foreground = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not a background job
        numbers = (*SIGNALS, signal.SIGINT) if foreground else SIGNALS
        previous = {number: signal.signal(number, self._handle) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if os.getpid() != self._process:
            return  # a loader worker that was just forked
        again = self._seconds_since(signal.SIGINT) > REPEAT_CTRL_C_SECONDS
        if (again and number != signal.SIGUSR1) or (number == signal.SIGINT and self.notify is None):
            raise KeyboardInterrupt  # torchrun turns a second Ctrl-C into SIGTERM
        if number != signal.SIGINT and self.notify is None and self.store is None:
            # Features of locked towers may take long; several processes stop after their first step.
            os.write(2, f"leanclip: {signal.Signals(number).name} before the first step\n".encode())
            raise SystemExit(stopped_code())
        if number == signal.SIGINT and number not in self._received and self.notify is not None:
            line = "Ctrl-C: the run stops after this step and saves; press it again to end at once, without saving"
            # In a thread, because this one may have been interrupted while it printed.
            threading.Thread(target=self.notify, args=(line,), daemon=True).start()
        self._received.setdefault(number, time.monotonic())
        self.signal = signal.Signals(number)
        if number != signal.SIGINT and self._seconds_since(number) > REPEAT_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _seconds_since(self, number: int) -> float:
        return time.monotonic() - self._received.get(number, time.monotonic())


def exit_code(reason: str) -> int:
    code = stopped_code()
    return INTERRUPTED if code and reason == CTRL_C else code

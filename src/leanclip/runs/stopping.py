"""Ending a run before its last step, with a checkpoint: a signal came, or its hours are over.

SLURM and spot instances announce the end with SIGTERM or SIGUSR1, a person with Ctrl-C. All processes stop after the
same step, whoever got the signal: it writes the number of the step to the store, and everybody looks there after each
step.
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

INTERRUPTED = 130  # exit code: saved, since a person pressed Ctrl-C
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
KEY = "leanclip/stop"
AGAIN = 10.0  # seconds after which a signal is a second one
AGAIN_BY_HAND = 0.5  # the same for Ctrl-C, which a terminal and a launcher may both send
CTRL_C = "Ctrl-C was pressed"


class Stopping:
    """Whether to stop now. One process alone needs no store."""

    def __init__(self, store: Store | None = None, *, hours: float | None = None, began: float | None = None) -> None:
        self.store = store
        self.signal: signal.Signals | None = None
        began = time.monotonic() if began is None else began
        self.deadline = None if hours is None else began + 3600 * hours
        self.hours = hours
        self.tell: Callable[[str], None] | None = None  # while there is something to save
        self._process = os.getpid()
        self._first: dict[int, float] = {}  # when each signal came first

    def after(self, step: int) -> str | None:
        """Why the run ends after this step, if it does. All processes ask after every step and hear the same.

        Steps are counted as they are taken, so that one which is repeated has another number."""
        reason = self._reason()
        if self.store is None:
            return reason
        if reason is not None:
            # The others cannot finish the next step without this process, so they see it by then.
            self.store.compare_set(KEY, "", f"{step + 1} {reason}")
            self.deadline, self.signal = None, None
        if not self.store.check([KEY]):
            return None
        last, _, reason = self.store.get(KEY).decode().partition(" ")
        return reason if step >= int(last) else None

    def _reason(self) -> str | None:
        if self.signal is not None:
            return CTRL_C if self.signal == signal.SIGINT else f"{self.signal.name} came"
        if self.deadline is not None and time.monotonic() >= self.deadline:
            return f"its {self.hours:g} hours are over"
        return None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take the signals. One that comes again after a while ends the process at once; sooner, it is the same one,
        from a launcher that got it too."""
        if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
            yield
            return
        by_hand = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else in the background of a script
        taken = (*SIGNALS, signal.SIGINT) if by_hand else SIGNALS
        before = {number: signal.signal(number, self._came) for number in taken}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _came(self, number: int, _: FrameType | None) -> None:
        if os.getpid() != self._process:
            return  # a worker of the loader, which was forked just now: not for it
        if number == signal.SIGINT:
            self._interrupt()
        else:
            self._note(number)

    def _note(self, number: int) -> None:
        if number == signal.SIGTERM and self._since(signal.SIGINT) > AGAIN_BY_HAND:
            raise KeyboardInterrupt  # what torchrun makes of the second Ctrl-C
        self.signal = signal.Signals(number)
        self._first.setdefault(number, time.monotonic())
        if self._since(number) > AGAIN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _interrupt(self) -> None:
        if self.tell is None or self._since(signal.SIGINT) > AGAIN_BY_HAND:
            raise KeyboardInterrupt
        if signal.SIGINT not in self._first:
            self._first[signal.SIGINT] = time.monotonic()
            self.signal = signal.SIGINT
            line = "Ctrl-C: the run stops after this step and saves; press it again to end at once, without saving"
            # In a thread, since this one may have been interrupted while it printed.
            threading.Thread(target=self.tell, args=(line,), daemon=True).start()

    def _since(self, number: int) -> float:
        """Seconds since a signal came first; none where it did not."""
        return time.monotonic() - self._first.get(number, time.monotonic())


def exit_code(reason: str) -> int:
    """Of a run that was stopped, and has saved."""
    code = stopped_code()
    return INTERRUPTED if code and reason == CTRL_C else code

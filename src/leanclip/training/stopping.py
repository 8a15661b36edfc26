"""Ending a run before its last step, with a checkpoint: a signal came, or its hours are over.

SLURM and spot instances announce the end with SIGTERM or SIGUSR1. All processes stop after the same step, whoever got
the signal: it writes the number of the step to the store, and everybody looks there after each step.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from torch._C._distributed_c10d import Store

STOPPED = 75  # exit code: saved, and to be started again (EX_TEMPFAIL)
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
KEY = "leanclip/stop"
AGAIN = 10.0  # seconds after which a signal is a second one


class Stopping:
    """Whether to stop now. One process alone needs no store."""

    def __init__(self, store: Store | None = None, *, hours: float | None = None, began: float | None = None) -> None:
        self.store = store
        self.signal: signal.Signals | None = None
        began = time.monotonic() if began is None else began
        self.deadline = None if hours is None else began + 3600 * hours
        self.hours = hours

    def after(self, step: int) -> str | None:
        """Why the run ends after this step, if it does. All processes ask after every step and hear the same."""
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
            return f"{self.signal.name} came"
        if self.deadline is not None and time.monotonic() >= self.deadline:
            return f"its {self.hours:g} hours are over"
        return None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take the signals. One that comes again after a while ends the process at once; sooner, it is the same one,
        from a launcher that got it too."""
        first: dict[int, float] = {}

        def note(number: int, _: FrameType | None) -> None:
            self.signal = signal.Signals(number)
            if time.monotonic() - first.setdefault(number, time.monotonic()) > AGAIN:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)

        before = {number: signal.signal(number, note) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def exit_code() -> int:
    """STOPPED, but under a torchrun that would take it for a failure and start the processes again: 0."""
    return 0 if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0 else STOPPED

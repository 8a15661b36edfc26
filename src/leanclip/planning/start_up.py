"""Where the time before the first step goes."""

import os
import time
from pathlib import Path

from rich.table import Table


class StartUp:
    """Seconds of this process by part, from its start on. Each part begins where the one before ends."""

    def __init__(self) -> None:
        self.at = time.monotonic()
        age = process_age()
        self.seconds: dict[str, float] = {} if age is None else {"Python, imports": age}

    def end(self, part: str) -> None:
        now = time.monotonic()
        self.seconds[part], self.at = now - self.at, now

    def table(self) -> Table:
        table = Table(title="until the first step is done", title_justify="left")
        table.add_column("part")
        table.add_column("s", justify="right")
        for part, seconds in self.seconds.items():
            table.add_row(part, f"{seconds:.2f}")
        table.add_section()
        table.add_row("total", f"{sum(self.seconds.values()):.2f}")
        return table


def process_age() -> float | None:
    """Seconds since this process started; none where Linux's /proc does not say."""
    try:
        ticks = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")

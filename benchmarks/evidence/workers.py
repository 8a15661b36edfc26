"""Runs side by side: processes that stay for as long as the command does, fed with whatever can be trained next.

`Workers.rows` trains what is not in runs.csv yet and returns the rows; several threads may ask at once, so that the
seeds of one loss train while another is still being searched. A process prefers runs of the batch size that it has
compiled for.
"""

import atexit
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import runs
import table
import torch
from photos import MODEL, Photos
from rich.console import Console
from rich.progress import Progress
from runs import Rows, Run

AN_EPOCH = 7.5  # seconds, where no run of that batch size has been timed yet; of smaller batches than 128 more
START = 60.0  # seconds more that the first run of a process takes, to load and to compile
AT_ONCE = 32_768  # samples, in the batches of all processes together: they share the GPU's memory
THREADS = "2"  # that compile for each process: they all do it at the same time
Done = tuple[list[dict[str, float]], float]  # points and seconds
Given = TypeVar("Given")
Made = TypeVar("Made")


@dataclass
class Workers:
    """`until` is on the clock of `time.time()`: no run begins that would not be over by then, if it takes as long as
    most before it did. A run that fails is told and left out. `steps` cuts every run off, for trying."""

    photos: Path
    results: Path = table.RESULTS
    processes: int = 8
    until: float = float("inf")
    steps: int | None = None
    config: Path = MODEL
    waiting: list[tuple[Run, Future[None]]] = field(default_factory=list, init=False)
    asked: dict[str, Future[None]] = field(default_factory=dict, init=False)
    changed: threading.Condition = field(default_factory=threading.Condition, init=False)
    feeders: int = field(default=0, init=False)
    running: list[Run] = field(default_factory=list, init=False)
    progress: Progress = field(default_factory=lambda: Progress(transient=True), init=False)

    def __post_init__(self) -> None:
        self.recipe = runs.recipe_of(self.config, self.steps)
        self.bar = self.progress.add_task("runs", total=0)
        atexit.register(self.progress.stop)

    @property
    def path(self) -> Path:
        return self.results / "runs.csv"

    def rows(self, wanted: list[Run]) -> Rows:
        """The rows of these runs, as far as they are there when all that could be trained have been."""
        with self.changed:
            known = self._known()
            for key, run in {run.key(self.recipe): run for run in wanted}.items():
                if key not in known and key not in self.asked and self._in_time(run, warm=True):
                    self.asked[key] = Future()
                    self.waiting.append((run, self.asked[key]))
            ours = [self.asked[key] for run in wanted if (key := run.key(self.recipe)) in self.asked]
            self._start_feeders()
            self.changed.notify_all()
        with ending_all():
            for future in ours:
                future.result()
        with self.changed:
            known = self._known()
        return {run: known[key] for run in wanted if (key := run.key(self.recipe)) in known}

    def _known(self) -> dict[str, dict[str, str]]:
        return {row["run"]: row for row in table.rows(self.path)}

    def _in_time(self, run: Run, *, warm: bool) -> bool:
        same = {"batch": str(run.batch), "recipe": self.recipe}
        rows = [row for row in table.rows(self.path) if same.items() <= row.items()]
        epoch = sorted(float(row["seconds"]) / float(row["epochs"]) for row in rows)
        an_epoch = epoch[len(epoch) * 3 // 4] if epoch else AN_EPOCH * max(1.0, 128 / run.batch)
        return time.time() + run.epochs * an_epoch + (0.0 if warm else START) <= self.until

    def _start_feeders(self) -> None:
        """A thread for each process, once there is something to train."""
        if self.waiting and not self.feeders:
            Photos.of(self.photos)  # decodes them, if nobody has yet
            self.progress.start()
        while self.feeders < min(self.processes, len(self.running) + len(self.waiting)):
            self.feeders += 1
            threading.Thread(target=self._feed, daemon=True).start()
        self.progress.update(self.bar, total=len(self.asked))

    def _feed(self) -> None:
        """One process, one run after the other. After a run that failed, another process: the GPU may have, too."""
        process, batch = self._process(), 0
        while True:
            with self.changed:
                self.changed.wait_for(partial(self._next, batch))
                run, future = self._next(batch)[0]
                self.waiting.remove((run, future))
                self.running.append(run)
                begin, beside = self._in_time(run, warm=run.batch == batch), len(self.running)
            told: Done | str | None = None
            try:
                told = self._called(process, run) if begin else None
                with self.changed:
                    self._write(run, told, beside)
                future.set_result(None)
            except BaseException as error:  # whoever asked for the run hears of it
                future.set_exception(error)
            finally:
                with self.changed:
                    self.running.remove(run)
                    self.changed.notify_all()
            batch = run.batch if begin else batch
            if isinstance(told, str):
                process, batch = self._process(), 0

    def _next(self, batch: int) -> list[tuple[Run, Future[None]]]:
        """What may begin: of this batch size first, the longest first, then in the order they were asked for."""
        room = AT_ONCE - sum(run.batch for run in self.running)
        fitting = [each for each in self.waiting if each[0].batch <= room or not self.running]
        return sorted(fitting, key=lambda each: (each[0].batch != batch, -each[0].epochs / each[0].batch))

    def _called(self, process: Callable[..., Done | str], run: Run) -> Done | str:
        try:
            return process(_trained, run, self.photos, self.config, self.steps)
        except BrokenProcessPool:
            return f"{run}\nits process died"

    def _process(self) -> Callable[..., Done | str]:
        if self.processes == 1:
            return lambda function, *given: function(*given)  # this one will do
        context = multiprocessing.get_context("spawn")
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = THREADS  # read when torch is imported
        pool = ProcessPoolExecutor(1, mp_context=context, initializer=_prepare)
        return lambda function, *given: pool.submit(function, *given).result()

    def _write(self, run: Run, told: Done | str | None, beside: int) -> None:
        self.progress.advance(self.bar)
        if told is None:
            return
        if isinstance(told, str):
            self.progress.console.print(f"failed: {told}", markup=False)
            return
        points, seconds = told
        key = run.key(self.recipe)
        for point in points:  # before the row that says that the run is over
            rounded = {name: round(point[name], 5) for name in runs.CURVE[1:]}
            table.append(self.results / "curves.csv", runs.CURVE, {"run": key} | rounded)
        row = runs.row_of(run, self.recipe, points, seconds, beside) | table.provenance()
        table.append(self.path, runs.FIELDS, row)


def _prepare() -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command ends them
    threading.Thread(target=_end_with_the_command, daemon=True).start()


def _end_with_the_command() -> None:
    """Also where it was killed."""
    command = multiprocessing.parent_process()
    assert command is not None
    command.join()
    os._exit(1)


def _trained(run: Run, photos: Path, config: Path, steps: int | None) -> Done | str:
    """The points of a run and its seconds, or what went wrong."""
    began = time.time()
    try:
        return list(runs.train(run, runs.place(photos, config), steps)), time.time() - began
    except Exception:
        return f"{run}\n{traceback.format_exc()}"


def side_by_side(function: Callable[[Given], Made], given: Iterable[Given]) -> list[Made]:
    """The results in order; each waits in a thread of its own."""
    given = list(given)
    with ThreadPoolExecutor(max(1, len(given))) as threads, ending_all():
        return list(threads.map(function, given))


@contextlib.contextmanager
def ending_all() -> Iterator[None]:
    """Ctrl-C ends the command at once, with its threads and processes; the rows of runs that are over are there."""
    try:
        yield
    except KeyboardInterrupt:
        Console(stderr=True).show_cursor()
        print("stopped; the same command goes on", file=sys.stderr, flush=True)
        for child in multiprocessing.active_children():
            child.terminate()
        os._exit(130)

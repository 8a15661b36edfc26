"""Runs independent tasks in worker processes, with a progress count. No worker outlives the parent."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from leanclip.errors import UserError

Task = TypeVar("Task")
Result = TypeVar("Result")
Tick = Callable[[], None]
"""A task calls this once for each finished unit of its work."""

MOST_WORKERS = 512  # of one process: more is a mistake, and would exhaust memory
TICKS_AT_ONCE = 16
POLL_SECONDS = 0.2


def run_tasks(
    function: Callable[[Task, Tick], Result], tasks: Sequence[Task], *, workers: int, progress: Callable[[int], None]
) -> Iterator[Result]:
    """Yields results as they complete. `progress` gets the number of ticks since its last call.

    One worker or one task runs in this process; otherwise `function` is pickled once for each worker.
    """
    if workers <= 1 or len(tasks) <= 1:
        for task in tasks:
            yield function(task, lambda: progress(1))
        return
    workers = min(workers, len(tasks))
    context = multiprocessing.get_context("forkserver")  # a fork would copy threads that hold locks
    context.set_forkserver_preload([__name__])
    count, stop = context.Value("q", 0), context.Event()
    pool = ProcessPoolExecutor(workers, context, _start_worker, (function, count, stop))
    seen = 0
    waiting = iter(tasks)
    running: set[Future[Result]] = set()
    try:
        while True:
            while len(running) < 2 * workers and (task := next(waiting, None)) is not None:
                running.add(_submit(pool, task))
            if not running:
                return
            done, running = wait(running, POLL_SECONDS, FIRST_COMPLETED)
            progress(count.value - seen)
            seen = count.value
            for future in done:
                yield future.result()
    except BrokenProcessPool as error:
        raise UserError(
            "a worker process died, perhaps out of memory; run the command again with fewer --workers",
            code="data.worker_died",
        ) from error
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def _submit(pool: ProcessPoolExecutor, task: Any) -> Future[Any]:
    """A pool starts its workers on submission, which fails with an OSError while it breaks."""
    try:
        return pool.submit(_run_task, task)
    except OSError as error:
        raise BrokenProcessPool(f"no worker could be started: {error}") from error


class _Stopped(Exception):  # noqa: N818
    """The pool is being closed."""


_function: Callable[..., Any]
_tick: Tick


def _start_worker(function: Callable[..., Any], count: Any, stop: Any) -> None:
    global _function, _tick
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent receives it too and stops the workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    ticks = 0

    def tick() -> None:
        nonlocal ticks
        ticks += 1
        if ticks == TICKS_AT_ONCE:
            with count.get_lock():
                count.value += ticks
            ticks = 0
            if stop.is_set():
                raise _Stopped

    _function, _tick = function, tick


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)  # the parent was killed


def _run_task(task: Any) -> Any:
    return _function(task, _tick)

"""When a rank dies or hangs, the others stop within the timeout, name it, and leave no process behind."""

import os
import signal

import pytest
from kill_job import Job, Settings
from ranks_job import processes_where

from leanclip.distributed import LOST_RANK_EXIT
from machine import wait_until

SETTINGS = Settings(steps=10**6, epochs=10**6, save_every=0, loss="fastclip-v3", precision="fp32", timeout=6.0)
SLACK = 40.0  # seconds for a busy machine


def assert_stopped(job, rank, lost):
    job.processes[rank].join(4 * SETTINGS.timeout + SLACK)
    text = job.printed(rank)
    assert job.processes[rank].exitcode == LOST_RANK_EXIT, text[-2000:]
    message = text.partition(f"rank {rank} stops")[2].splitlines()[0]
    assert f"rank {lost}" in message, text[-2000:]
    wait_until(lambda: not processes_where(3, job.processes[rank].pid), 15, "orphans")  # loader workers
    return message


@pytest.mark.parametrize(
    ("size", "number", "lost"),
    [
        pytest.param(2, signal.SIGKILL, 1, marks=pytest.mark.slow),
        (3, signal.SIGSTOP, 2),
        (2, signal.SIGKILL, 0),
    ],
)
def test_the_other_ranks_stop_and_name_the_lost_one(size, number, lost, tmp_path):
    with Job(SETTINGS, size, tmp_path, tmp_path / "logs") as job:
        assert job.until(lambda: job.lines() >= 3), job.printed()
        os.kill(job.processes[lost].pid, number)
        for rank in set(range(size)) - {lost}:
            assert_stopped(job, rank, lost)


def test_a_rank_whose_main_thread_hangs_is_named(tmp_path):
    """Its heartbeat continues, but its steps do not."""
    with Job(SETTINGS, 2, tmp_path, tmp_path / "logs", hanging_rank=1) as job:
        assert job.until(lambda: job.lines() >= 2), job.printed()
        for rank in (0, 1):
            assert "hangs" in assert_stopped(job, rank, lost=1)

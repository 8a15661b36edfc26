"""A rank that dies or hangs: the others stop within the time-out, name it, and leave nothing behind."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from leanclip.distributed import LOST_RANK_EXIT

TIMEOUT = 6
COMMAND = [
    sys.executable, "-m", "leanclip", "train", "--epochs", "1000", "--global-batch-size", "64", "--workers", "1",
    "--eval-every", "0", "--log-every", "1", "--dist-timeout", str(TIMEOUT), "--device", "cpu", "--name", "lost",
]  # fmt: skip


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(size, folder, commands=None):
    """N ranks as a launcher would start them, but with nobody who looks after them."""
    port = free_port()
    ranks = []
    for rank in range(size):
        own = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = os.environ | {name: str(value) for name, value in own.items()} | {"OMP_NUM_THREADS": "1"}
        with (Path(folder) / f"rank-{rank}").open("w") as output:
            command = [*(commands or {}).get(rank, COMMAND), "--logs", str(folder)]
            ranks.append(
                subprocess.Popen(
                    command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
                )
            )
    return ranks


def output(folder, rank):
    return (Path(folder) / f"rank-{rank}").read_text()


def wait_for(condition, seconds):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.2)
    return False


def processes_of(session):
    """Live processes of a session: a rank and its loader workers."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


@pytest.fixture
def some_ranks(request, tmp_path):
    ranks = start(request.param, tmp_path)
    yield ranks, tmp_path
    for rank in ranks:
        for pid in processes_of(rank.pid):
            os.kill(pid, signal.SIGKILL)
        rank.wait()


@pytest.mark.parametrize(
    ("some_ranks", "what", "victim"),
    [
        pytest.param(2, signal.SIGKILL, 1, marks=pytest.mark.slow),
        (3, signal.SIGSTOP, 2),
        (2, signal.SIGKILL, 0),
    ],
    indirect=["some_ranks"],
)
def test_the_others_stop_and_name_it(some_ranks, what, victim):
    ranks, folder = some_ranks
    assert wait_for(lambda: "step 3/" in output(folder, 0), 180), output(folder, 0)[-2000:]
    os.kill(ranks[victim].pid, what)
    others = [rank for rank in range(len(ranks)) if rank != victim]
    # The time-out, and some seconds more in which a busy machine gets round to it.
    assert wait_for(lambda: all(ranks[rank].poll() is not None for rank in others), TIMEOUT + 40)
    for rank in others:
        text = output(folder, rank)
        assert ranks[rank].returncode == LOST_RANK_EXIT, text[-2000:]
        assert f"rank {rank} stops" in text
        assert f"rank {victim}" in text.partition("stops")[2].splitlines()[0], text[-2000:]
        assert wait_for(lambda rank=rank: not processes_of(ranks[rank].pid), 15), "orphans"


HANGING = """
import sys, time
from leanclip.cli import main
from leanclip.training import loop
step, taken = loop.training_step, []
def hanging(*arguments):
    taken.append(1)
    if len(taken) == 3:
        print("hangs", flush=True)
        time.sleep(300)
    return step(*arguments)
loop.training_step = hanging
main(sys.argv[1:])
"""


def test_a_rank_whose_main_thread_hangs_is_named(tmp_path):
    """Its other threads live and say so; it is only its steps that do not come."""
    ranks = start(2, tmp_path, {1: [sys.executable, "-c", HANGING, *COMMAND[3:]]})
    assert wait_for(lambda: "hangs" in output(tmp_path, 1), 120), output(tmp_path, 1)
    assert wait_for(lambda: ranks[0].poll() is not None, 4 * TIMEOUT + 40)
    text = output(tmp_path, 0)
    assert ranks[0].returncode == LOST_RANK_EXIT, text[-2000:]
    assert "rank 0 stops: rank 1 (" in text and "hangs" in text
    assert wait_for(lambda: ranks[1].poll() is not None, 4 * TIMEOUT + 40)
    assert ranks[1].returncode == LOST_RANK_EXIT, output(tmp_path, 1)[-2000:]

import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore

from leanclip.distributed import TrafficCounter, compare_traffic, detect_launch, device_for, process_group
from leanclip.distributed.heartbeat import REASON_KEY
from leanclip.distributed.launch import Launch, agree_on_round, first_host, join_store
from machine import is_alive, wait_until
from refusal import refuses

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "1234"}
SRUN = {
    "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "70001",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "launch"),
    [
        ({}, Launch(0, 1, 0, "alone")),
        (TORCHRUN, Launch(5, 8, 1, "torchrun", "node1", 1234)),
        (TORCHRUN | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, Launch(5, 8, 1, "torchrun", "node1", 1234)),
        (SRUN, Launch(3, 4, 1, "srun", "gpu07", 20000 + 10001)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "3"}, Launch(0, 1, 0, "alone")),  # a batch script
    ],
)
def test_launchers_are_detected_by_their_environment(environment, launch):
    assert detect_launch(environment) == launch


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("a1,b2", "a1"),
        ("n[03-05,09],m1", "n03"),
        ("r[1-2]-ib", "r1-ib"),
        ("gpu-7", "gpu-7"),
        ("r[1-2]n[3-4]", "r1n3"),
    ],
)
def test_first_host(nodes, first):
    assert first_host(nodes) == first


def test_a_broken_environment_is_refused():
    with refuses("launch.bad_environment", "RANK"):
        detect_launch({"RANK": "x", "WORLD_SIZE": "2"})


def test_device_of_each_process(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device_for(Launch(3, 4, 3, "torchrun"), None) == "cuda:1"
    assert device_for(Launch(0, 1, 0, "alone"), None) == "cuda"
    assert device_for(Launch(1, 2, 1, "torchrun"), "cpu") == "cpu"


def test_a_single_process_selects_its_gpu(monkeypatch):
    """Streams, events and CUDA graphs use the current device."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    with process_group(Launch(0, 1, 0, "alone"), torch.device("cuda:1"), timeout=1.0):
        assert chosen == [torch.device("cuda:1")]


def test_a_missing_rank_is_reported():
    launch = Launch(1, 2, 1, "torchrun", "127.0.0.1", 1)
    with (
        refuses("launch.no_connection", "rank 1 of 2", "127.0.0.1:1"),
        process_group(launch, torch.device("cpu"), timeout=1.0),
    ):
        pass


TIMEOUT = 10.0  # seconds; only a failing test waits so long


@pytest.fixture
def agent_store():
    """The store of a torchrun agent, which outlives the ranks."""
    return TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)


def start_ranks(agent_store, counts, delays=(0.0, 0.0, 0.0)):
    """The stores that the ranks get whose agents count `counts` restarts."""

    def join(rank):
        time.sleep(delays[rank])
        environment = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": str(counts[rank])}
        launch = Launch(rank, len(counts), 0, "torchrun", "127.0.0.1", agent_store.port)
        return join_store(launch, TIMEOUT, environment)

    with ThreadPoolExecutor(len(counts)) as pool:
        return list(pool.map(join, range(len(counts))))


def assert_joined(stores):
    """Every rank reads what every other wrote."""
    for rank, store in enumerate(stores):
        store.set(f"from/{rank}", str(rank))
    for store in stores:
        assert [store.get(f"from/{rank}") for rank in range(len(stores))] == [
            b"%d" % rank for rank in range(len(stores))
        ]


@pytest.mark.parametrize("counts", [(0, 1, 1), (1, 0, 0), (2, 0, 1)])
@pytest.mark.parametrize("delays", [(0.0, 0.0, 0.0), (0.3, 0.0, 0.0), (0.0, 0.3, 0.1)])
def test_hosts_with_different_restart_counts_meet(agent_store, counts, delays):
    assert_joined(start_ranks(agent_store, (0, 0, 0)))
    assert_joined(start_ranks(agent_store, counts, delays))


def test_a_round_sees_no_keys_of_an_earlier_one(agent_store):
    """A change of hosts restarts the ranks with the same count."""
    for size in (3, 2, 3):
        stores = start_ranks(agent_store, (0,) * size)
        assert not any(store.check([REASON_KEY]) for store in stores)
        stores[0].set(REASON_KEY, "rank 1 died")
        assert {store.get(REASON_KEY) for store in stores} == {b"rank 1 died"}


def test_ranks_that_died_while_they_joined_are_not_counted(agent_store):
    store = PrefixStore("leanclip", agent_store)
    store.set("asks/1", "of a rank that died")
    with pytest.raises(RuntimeError, match="rank 1 did not join"):
        agree_on_round(store, 0, 2, 0.3)
    assert_joined(start_ranks(agent_store, (0, 0), delays=(0.0, 0.3)))


def test_traffic_compared_with_other_implementations():
    counter = TrafficCounter()
    for purpose, size in (
        ("embeddings", 1000),
        ("embeddings", 1000),
        ("scalars", 20),
        ("state", 10),
        ("batch norm", 10**6),  # not the loss's
    ):
        counter.record(purpose, size)
    sent = compare_traffic(counter, ranks=4)
    assert sent.leanclip == pytest.approx(0.75 * (2000 + 20 + 2 * 10))
    assert (sent.openclip, sent.disco_clip) == (0.75 * 4000, 0.75 * 6000)
    assert counter.loss_total() == (4, 2030)


def test_a_rank_ends_with_its_torchrun():
    """Killed while the ranks still load: they would wait for each other until the timeout."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        environment = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": str(server.getsockname()[1])}
        start = (
            "import subprocess, sys; rank = subprocess.Popen(sys.argv[1:]); print(rank.pid, flush=True); rank.wait()"
        )
        torchrun = subprocess.Popen(
            [sys.executable, "-c", start, sys.executable, "-m", "leanclip", "train", "--device", "cpu"],
            env=os.environ | environment | {"TORCHELASTIC_RUN_ID": "x"}, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert torchrun.stdout is not None
        with torchrun.stdout:
            rank = int(torchrun.stdout.readline())
        server.settimeout(120)
        connection, _ = server.accept()  # the rank waits for an answer
        with connection:
            torchrun.kill()
            torchrun.wait()
            try:
                wait_until(lambda: not is_alive(rank), 20)
            except AssertionError:
                os.kill(rank, signal.SIGKILL)
                raise

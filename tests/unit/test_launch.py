import pytest
import torch

from leanclip.distributed import Ledger, device_for, joined, launched, traffic
from leanclip.distributed.launch import Launch, first_host
from leanclip.errors import UserError


def test_alone():
    assert launched({}) == Launch(0, 1, 0, "alone")


def test_torchrun():
    environment = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "1234"}
    assert launched(environment) == Launch(5, 8, 1, "torchrun", "node1", 1234)
    inside_slurm = environment | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
    assert launched(inside_slurm).by == "torchrun"


def test_srun():
    step = {
        "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "70001",
        "SLURM_STEP_NODELIST": "gpu[07-08]",
    }  # fmt: skip
    assert launched(step) == Launch(3, 4, 1, "srun", "gpu07", 20000 + 10001)


def test_a_batch_script_itself_is_alone():
    assert launched({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "3"}).size == 1


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


def test_a_broken_environment_is_named():
    with pytest.raises(UserError, match="RANK"):
        launched({"RANK": "x", "WORLD_SIZE": "2"})


def test_each_process_has_its_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device_for(Launch(3, 4, 3, "torchrun"), None) == "cuda:1"
    assert device_for(Launch(0, 1, 0, "alone"), None) == "cuda"
    assert device_for(Launch(1, 2, 1, "torchrun"), "cpu") == "cpu"


def test_one_process_alone_is_on_the_device_it_was_given(monkeypatch):
    """Streams, events and graphs that name none are of the current one."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    with joined(Launch(0, 1, 0, "alone"), torch.device("cuda:1"), timeout=1.0):
        assert chosen == [torch.device("cuda:1")]


def test_nobody_else_comes():
    launch = Launch(1, 2, 1, "torchrun", "127.0.0.1", 1)
    with (
        pytest.raises(UserError, match="rank 1 of 2 did not meet the others at 127"),
        joined(launch, torch.device("cpu"), timeout=1.0),
    ):
        pass


def test_traffic_beside_others():
    ledger = Ledger()
    ledger.record("embeddings", 1000)
    ledger.record("embeddings", 1000)
    ledger.record("scalars", 20)
    ledger.record("state", 10)
    ledger.record("batch norm", 10**6)  # not the loss's
    sent = traffic(ledger, ranks=4)
    assert sent.leanclip == pytest.approx(0.75 * (2000 + 20 + 2 * 10))
    assert (sent.openclip, sent.disco_clip) == (0.75 * 4000, 0.75 * 6000)
    assert ledger.of_loss() == (4, 2030)

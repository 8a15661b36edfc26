"""Training on one, two and three processes, with DDP and FSDP2, resumed from each other's checkpoints."""

import json
from pathlib import Path

import pytest
import torch
from ranks_job import run_ranks
from resume_worker import restart, train_part

from leanclip.checkpointing.storage import StoredTensors
from leanclip.distributed import Ranks
from run_records import records


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    train_part(Ranks(0, 1, None), folder, folder / "logs", stop=6)
    return read(folder / "logs")


def read(logs):
    last = Path(logs) / "run" / "checkpoints" / "step_00000006"
    state = StoredTensors.open(last / "state").read()
    losses = {line["step"]: line["loss"] for line in records(Path(logs) / "run", "train")}
    tables = {name: value for name, value in state.items() if name.startswith("loss.")}
    return tables, losses, json.loads((last / "state.json").read_text())["position"]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((2, {}), (1, {})),
        ((2, {"fsdp": True}), (3, {"micro_batch": 5})),
        ((1, {}), (2, {"fsdp": True})),
    ],
)
def test_resume_on_other_processes(first, second, uninterrupted, tmp_path):
    logs = tmp_path / "logs"
    for (size, parallel), stop, resume in ((first, 3, False), (second, 6, True)):
        run_ranks(train_part, size, tmp_path, logs, stop, resume, parallel)
    loss, losses, position = read(logs)
    expected_loss, expected_losses, expected_position = uninterrupted
    assert list(losses) == [1, 2, 3, 4, 5, 6]
    for step, value in losses.items():
        assert value == pytest.approx(expected_losses[step], rel=1e-8)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-8, atol=1e-8)
    assert {**position, "seconds": 0, "best": 0} == {**expected_position, "seconds": 0, "best": 0}


@pytest.mark.parametrize(
    ("host", "pid", "resume"), [(0, 1, "auto"), (0, None, None), (1, None, "auto"), (2, 1, None)]
)
def test_all_ranks_continue_what_their_torchruns_have_begun(host, pid, resume, tmp_path):
    """In other processes: after a failure, or because a host has joined, which counts no restart and may be first."""
    found = run_ranks(restart, 2, tmp_path, host, pid, timeout=60)
    assert [rank.pop("device") for rank in found] == ["cuda:0", "cuda:1"]
    assert found == [{"resume": resume, "overwrite": resume is None}] * 2

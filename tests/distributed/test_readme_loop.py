"""README's loop as it is written: two processes with DDP train as one."""

import pytest
import torch
from ranks_job import run_ranks
from readme_worker import train


@pytest.mark.parametrize("biased", [False, True])  # SigLIP's models return a bias, too
def test_two_processes_train_as_one(biased, tmp_path):
    (alone,) = run_ranks(train, 1, tmp_path, biased)
    first, second = run_ranks(train, 2, tmp_path, biased)
    assert torch.equal(first["weights"], second["weights"])
    torch.testing.assert_close(first["weights"], alone["weights"], rtol=0, atol=1e-6)  # of Adam steps of 1e-3
    torch.testing.assert_close(first["temperature"], alone["temperature"])

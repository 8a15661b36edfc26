import os

import pytest
import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start; the fixture is for this one


@pytest.fixture(autouse=True)
def one_thread():
    """The tensors are small, and a busy machine makes threads wait for each other."""
    torch.set_num_threads(1)

import os

import pytest
import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(autouse=True)
def one_thread():
    """The tensors are small, and a busy machine makes threads wait for each other."""
    torch.set_num_threads(1)

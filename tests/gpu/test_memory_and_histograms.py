"""What a run on a GPU logs beside its loss."""

import pytest
import torch
from histograms_worker import filled_loss

from leanclip.runs.histograms import state_histograms
from leanclip.runs.metrics import memory

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_memory_is_the_peak_since_the_last_call():
    device = torch.device("cuda")
    memory(device)
    before = torch.cuda.memory_allocated(device)
    block = torch.empty(2**28, dtype=torch.uint8, device=device)
    del block
    assert memory(device)["gpu_memory_gib"] == pytest.approx(before / 2**30 + 0.25, abs=0.01)
    assert memory(device)["gpu_memory_gib"] == pytest.approx(before / 2**30, abs=0.01)


def test_histograms_are_those_of_the_cpu():
    loss = filled_loss(samples=1000)
    expected = state_histograms(loss)
    assert state_histograms(loss.cuda()) == expected

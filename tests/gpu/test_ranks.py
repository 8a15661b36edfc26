"""Two gloo processes that share one GPU, with the Triton kernels, against one process."""

import pytest
import torch
from gpu_ranks_worker import NAMES, steps
from ranks_job import run_ranks

from leanclip.distributed import Ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    two = run_ranks(steps, 2, folder)
    return two, steps(Ranks(0, 1, None), folder)


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_on_one_gpu_equal_one(name, both):
    two, one = both
    right = one[name]
    for key, truth in right.items():
        found = [rank[name][key] for rank in two]
        found = [torch.cat(found) / 2] if key in ("image", "text") else found
        for value in found:
            finite = truth.isfinite()
            error = (value[finite] - truth[finite]).norm() / truth[finite].norm().clamp_min(1e-30)
            # bf16 rounds each gradient once at the end, after the factor N.
            assert error <= 2**-7, f"{key}: {error:.1e}"

"""N processes equal one on the concatenated batch: loss, every gradient, temperatures and state."""

import pytest
import torch
from losses_worker import BATCH, CASES, SAMPLES, STEPS, run, run_all
from ranks_job import run_ranks

from leanclip.distributed import Ranks


@pytest.fixture(scope="module", params=[2, 3])
def ranks_results(request, tmp_path_factory):
    """The results of N gloo processes; their shares are unequal."""
    size = request.param
    return size, run_ranks(run_all, size, tmp_path_factory.mktemp("ranks"))


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def assert_equal_to_one_process(ranks_results, key, alone):
    size, results = ranks_results
    for name, expected in alone.items():
        values = [result[key][name] for result in results]
        if name in ("image", "text"):
            # Each rank has the complete gradient of its own embeddings, times the number of ranks.
            values = [torch.cat(values) / size]
        assert all(torch.allclose(value, expected, rtol=1e-9, atol=1e-14) for value in values), name


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda index: "-".join([CASES[index][0], *CASES[index][1]]))
def test_ranks_equal_one_process(index, ranks_results, float64):
    name, hyper = CASES[index]
    alone = run(name, hyper, Ranks(0, 1, None))
    assert_equal_to_one_process(ranks_results, index, alone)
    if "pair_weights" in hyper:
        fit = alone["state pair_weights.fit"]
        assert fit[0] == 1 and fit[-1] == STEPS - 1  # so the last two steps had learned weights, of a fit each


def test_equal_shares_need_no_padding(ranks_results, float64):
    alone = run("fastclip-v3", {}, Ranks(0, 1, None), total=BATCH - BATCH % ranks_results[0])
    assert_equal_to_one_process(ranks_results, "even", alone)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 16])
def test_shares_cover_the_batch_once(size):
    shares = [Ranks(rank, size, None).share(SAMPLES) for rank in range(size)]
    assert [i for share in shares for i in range(share.start, share.stop)] == list(range(SAMPLES))
    lengths = [share.stop - share.start for share in shares]
    assert max(lengths) - min(lengths) <= 1

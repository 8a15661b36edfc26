"""The collectives of a step, recorded at the process group: embeddings, scalars, ids and state, no gradient of an
embedding, and DDP's average of the parameters' gradients."""

import pytest
from collectives_worker import DIM, LARGE, NAMES, observe
from ranks_job import run_ranks
from training_worker import BATCH


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return run_ranks(observe, 2, tmp_path_factory.mktemp("spied"), timeout=400)


def expected(name, size, dim, bytes_each):
    """The collectives of the loss for a batch, largest first."""
    floats = 4
    gathers = [("_allgather_base", size * dim * bytes_each)] * 2
    if name == "siglip":
        return [*gathers, ("allreduce", 3 * floats)]
    scalars = ("_allgather_base", size * 5 * floats)
    if name == "infonce":
        return [*gathers, scalars]
    tables = {"fastclip-v2": 4, "fastclip-v3": 2}[name]  # log u, and tau where it is per sample, for both sides
    return [*gathers, scalars, ("allreduce", size * tables * floats), ("_allgather_base", size * 4)]


@pytest.mark.parametrize("name", NAMES)
def test_a_step_sends_no_gradient_but_the_parameters(name, seen):
    for rank in seen:
        step = rank[name]["step"]
        of_loss = expected(name, BATCH - 1, 16, 4)
        assert sorted(call for call in step["seen"] if call in of_loss) == sorted(of_loss)
        rest = [call for call in step["seen"] if call not in of_loss]
        assert {operation for operation, _ in rest} == {"allreduce"}
        assert sum(size for _, size in rest) == step["parameters"]


@pytest.mark.parametrize("name", NAMES)
def test_scalars_are_few_compared_with_the_embeddings(name, seen):
    for rank in seen:
        separate = expected(name, LARGE, DIM, 2)
        together = [("_allgather_base", LARGE * 2 * DIM * 2), *separate[2:]]  # one gather without start_gather
        assert sorted(rank[name]["large"]) == sorted(together)
        embeddings, *others = sorted((size for _, size in rank[name]["large"]), reverse=True)
        assert sum(others) < 0.02 * embeddings


@pytest.mark.parametrize("name", NAMES)
def test_the_traffic_counter_agrees(name, seen):
    for rank in seen:
        calls = sum(calls for calls, _ in rank[name]["counted"].values())
        size = sum(size for _, size in rank[name]["counted"].values())
        assert (calls, size) == (len(rank[name]["large"]), sum(size for _, size in rank[name]["large"]))

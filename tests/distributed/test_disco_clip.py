"""DisCo-CLIP's decomposition: exact on N processes, equal to infonce, with three times its traffic."""

from functools import partial

import pytest
import torch
from disco_clip_worker import BATCH, DIM, TAU, batch, run_both
from ranks_job import run_ranks

from leanclip.distributed import Ranks
from leanclip.losses.disco_clip import anchors_loss

exactly = partial(torch.allclose, rtol=1e-12, atol=1e-15)


@pytest.fixture(scope="module", params=[2, 4])
def results(request, tmp_path_factory):
    """Of N gloo processes, in float64."""
    return run_ranks(run_both, request.param, tmp_path_factory.mktemp("disco"))


@pytest.fixture
def alone():
    """One process with the whole batch."""
    yield run_both(Ranks(0, 1, None))
    torch.set_default_dtype(torch.float32)


def test_one_process_equals_the_definition(alone):
    image, text = (rows.requires_grad_() for rows in batch())
    log_scale = torch.tensor(1 / TAU, dtype=torch.float64).log().requires_grad_()
    similarities, own = log_scale.exp() * image @ text.T, torch.arange(BATCH)
    loss = (similarities.logsumexp(0).mean() + similarities.logsumexp(1).mean()) / 2 - similarities[own, own].mean()
    gradients = torch.autograd.grad(loss, (image, text, log_scale))
    for name in ("disco", "infonce"):
        found = [alone[name][key] for key in ("image", "text", "scale")]
        assert all(exactly(*pair) for pair in zip(found, gradients, strict=True)), name
        assert exactly(alone[name]["loss"], loss)
        assert alone[name]["volumes"] == {}


@pytest.mark.parametrize("key", ["image", "text", "scale", "loss"])
def test_processes_equal_one_and_infonce(key, results, alone):
    """Gradients of embeddings are N times those of the batch's mean, because DDP averages over ranks."""
    disco, infonce = ([result[name][key] for result in results] for name in ("disco", "infonce"))
    expected = alone["disco"][key]
    if key in ("image", "text"):
        assert all(exactly(torch.cat(side) / len(results), expected) for side in (disco, infonce))
    else:  # each rank has a part; with infonce the whole
        assert exactly(torch.stack(disco).mean(0), expected)
        assert all(exactly(value, expected) for value in infonce)


def test_intra_and_inter_gpu_gradients(results):
    """Each rank's gradient is that of its own part of the loss plus those of the others' parts for its rows."""
    size, (images, texts) = len(results), (rows.requires_grad_() for rows in batch())
    scale = torch.tensor(1 / TAU, dtype=torch.float64)
    shares = [Ranks(rank, size, None).share(BATCH) for rank in range(size)]
    parts = [anchors_loss(images[s], texts[s], images, texts, scale, first=s.start) for s in shares]
    gradients = [torch.autograd.grad(part, (images, texts), retain_graph=True) for part in parts]
    for rank, share in enumerate(shares):
        for side, name in enumerate(("image", "text")):
            intra = gradients[rank][side][share]
            inter = sum(other[side][share] for number, other in enumerate(gradients) if number != rank)
            assert exactly(results[rank]["disco"][name], intra + inter)
            assert torch.as_tensor(inter).norm() > 0.01 * intra.norm()  # it cannot be left out


def test_traffic(results):
    """The counted bytes are the formulas of docs/algorithm.md, and those that the plan and the log compare with."""
    size, float64 = len(results), 8
    embeddings, share = 2 * BATCH * DIM * float64, (size - 1) / size
    for result in results:
        disco, infonce = result["disco"], result["infonce"]
        assert disco["volumes"] == {"embeddings": (2, embeddings), "gradients": (2, embeddings)}
        assert infonce["volumes"] == {"embeddings": (1, embeddings), "scalars": (1, 5 * BATCH * float64)}
        assert disco["received"][0] == 3 * embeddings * share == infonce["received"][2]
        assert infonce["received"][0] == (embeddings + 5 * BATCH * float64) * share

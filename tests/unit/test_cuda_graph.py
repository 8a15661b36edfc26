"""Steps as CUDA graphs, with a stand-in for the graph: the function is called again, and its result overwrites that
of the first call. tests/gpu has the real graphs."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tower_cases import FAMILIES, captions, model_of

import leanclip
from leanclip.data import Batch
from leanclip.losses.global_contrastive import GlobalContrastiveLoss
from leanclip.models.text_length import Texts
from leanclip.optim.loss_scale import LossScale
from leanclip.training.cuda_graph import WARM_UP, Captured, CudaGraphs
from leanclip.training.step import training_step
from leanclip.training.step_context import StepContext

SAMPLES, BATCH = 40, 11
FEW_SIZES: Any = partial(Texts.pack, few_sizes=True)  # as on a GPU


class FakeGraph:
    """Like a CUDA graph: the call that captures leaves no trace, and later ones overwrite its result."""

    def __init__(self, loss):
        self.state = getattr(loss, "state", None)

    def __call__(self, function, _):
        self.function, self.result = function, function()
        if self.state is not None:
            self.undo = self.state.undo
            self.state.rollback()
            self.state.undo = self.undo
        return Captured(self.result, self.replay)

    def replay(self):
        before = None if self.state is None else self.state.undo
        output, gradients = self.function()
        self.result[0].loss.detach().copy_(output.loss.detach())
        for place, gradient in zip(self.result[1], gradients, strict=True):
            if place is not None:
                place.copy_(gradient)
        if self.state is not None:
            found = self.state.undo
            self.undo.visited.copy_(found.visited)
            for name, (at, values) in found.replaced.items():
                for place, value in zip(self.undo.replaced[name], (at, values), strict=True):
                    place.copy_(value)
            self.state.undo = before  # nothing of Python runs again in a graph


def trained(name, *, graphed, broken=(), scale=None, **hyper):
    """A model, its loss and the values of it after some steps of changing gamma, ids and caption lengths."""
    model = model_of(*FAMILIES["clip"]).double().train()
    loss = leanclip.create_loss(name, num_samples=SAMPLES, **hyper).double()
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.05)
    autocast = torch.autocast("cpu", enabled=False)
    graphs = CudaGraphs(model, autocast, lambda *given: FakeGraph(loss)(*given)) if graphed else None
    context = StepContext(
        towers=model, loss=loss, optimizer=optimizer, global_batch=BATCH, cuda_graphs=graphs,
        scale=scale or LossScale(), grad_clip_norm=1.0,
    )  # fmt: skip
    draw, values = torch.Generator().manual_seed(3), []
    assert model.end_of_text is not None
    for step in range(3 * WARM_UP + 8):
        loss.set_epoch(step / 3, 7)
        pixels = torch.rand(BATCH, 3, 32, 32, dtype=torch.float64, generator=draw)
        if step in broken:
            pixels[2] = torch.nan
        tokens = captions(longest=(4, 9)[step % 2])
        ids = torch.randperm(SAMPLES, generator=draw)[:BATCH]
        batch = Batch(
            images=pixels, tokens=tokens, sample_ids=ids, lengths=model.end_of_text(tokens), groups=ids % 3,
            weights=(ids % 4).float(), caption_numbers=(ids + step) % 3,
        )  # fmt: skip
        result = training_step(context, batch.pack(FEW_SIZES))
        assert result.skipped == (step in broken)
        values.append(result.loss)
    if graphs is not None:
        assert len(graphs.graphs) == 2  # shapes
        for kept in graphs.graphs.values():  # no graph, whose nodes later steps would meet
            tensors = [kept.output.loss, *kept.output.metrics.values(), *kept.gradients]
            assert not any(isinstance(each, torch.Tensor) and each.requires_grad for each in tensors)
    return model, loss, values


CASES = [(name, {}) for name in leanclip.LOSSES]
CASES += [(name, {"pair_weights": "learned"}) for name in ("infonce", "siglip", "fastclip-v1")]
CASES += [("dcl", {"pair_weights": "learned", "captions_per_sample": 3})]


@pytest.mark.parametrize(("name", "hyper"), CASES)
def test_graphed_steps_equal_eager_ones(name, hyper):
    """Also after skipped steps, whose updates of the tables are undone."""
    broken = (WARM_UP * 2 + 4, WARM_UP * 2 + 5, WARM_UP * 2 + 8)
    plain, again = (trained(name, graphed=graphed, broken=broken, **hyper) for graphed in (False, True))
    for one, other in zip(plain[:2], again[:2], strict=True):
        right, found = dict(one.state_dict()), dict(other.state_dict())
        torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-12, equal_nan=True)
    right, found = (
        torch.stack(values)[[s for s in range(len(values)) if s not in broken]] for *_, values in (plain, again)
    )
    assert torch.allclose(found, right, rtol=1e-9)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["infonce", "siglip", "fastclip-v1", "fastclip-v3"])
def test_steps_on_features_are_graphed_whatever_the_towers(name, packed):
    """Of both towers, or of the image tower beside packed captions; a skipped step is undone."""
    results = []
    for graphed in (True, False):
        model = model_of(*FAMILIES["clip" if packed else "timm"]).double().train()
        model.lock("image")
        loss = leanclip.create_loss(name, num_samples=SAMPLES, pair_weights="learned").double()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD([*trained, *loss.parameters()], lr=0.05)
        autocast, fake = torch.autocast("cpu", enabled=False), FakeGraph(loss)
        graphs = CudaGraphs(model, autocast, fake) if graphed else None
        context = StepContext(towers=model, loss=loss, optimizer=optimizer, global_batch=BATCH, cuda_graphs=graphs)
        draw, losses = torch.Generator().manual_seed(3), []
        widths = model.image_features(torch.zeros(1, 3, 32, 32, dtype=torch.float64)).shape[1], 16
        for step in range(WARM_UP + 6):
            images, texts = (torch.randn(BATCH, width, generator=draw).half() for width in widths)
            images[0, 0] = torch.nan if step == WARM_UP + 3 else 0
            tokens = captions(longest=9) if packed else texts
            ids = torch.randperm(SAMPLES, generator=draw)[:BATCH]
            batch = Batch(images=images, tokens=tokens, sample_ids=ids)
            loss.set_epoch(step / 3, 7)
            result = training_step(context, batch.pack(model.texts))
            assert result.skipped == (step == WARM_UP + 3)
            losses.append(float("nan") if result.skipped else float(result.loss))
        assert graphs is None or len(graphs.graphs) == 1
        results.append((losses, [*trained, *loss.buffers()]))
    (found, state), (right, expected) = results
    assert found == pytest.approx(right, rel=1e-9, nan_ok=True)
    torch.testing.assert_close(state, expected, rtol=1e-9, atol=1e-12, equal_nan=True)


def test_tables_that_moved_are_captured_again():
    """A graph contains their addresses."""
    model = model_of(*FAMILIES["clip"]).train()
    loss = leanclip.create_loss("fastclip-v3", num_samples=SAMPLES)
    assert isinstance(loss, GlobalContrastiveLoss) and loss.state is not None
    graphs = CudaGraphs(model, torch.autocast("cpu", enabled=False), lambda *given: FakeGraph(loss)(*given))
    context = StepContext(
        towers=model, loss=loss, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), global_batch=BATCH,
        cuda_graphs=graphs,
    )  # fmt: skip
    tokens = captions(longest=9)
    assert model.end_of_text is not None
    images, lengths = torch.rand(BATCH, 3, 32, 32), model.end_of_text(tokens)
    batch = Batch(images=images, tokens=tokens, sample_ids=torch.arange(BATCH), lengths=lengths)
    for epoch in range(WARM_UP + 2):
        loss.set_epoch(epoch, 9)
        training_step(context, batch.pack(FEW_SIZES))
    (before,) = graphs.graphs.values()
    loss.resize(SAMPLES + 5)
    moved = replace(batch, sample_ids=torch.arange(BATCH) + SAMPLES + 5 - BATCH)
    training_step(context, moved.pack(FEW_SIZES))
    (after,) = graphs.graphs.values()
    assert after is not before and int(loss.state.visited) == 2 * BATCH


def test_a_graphed_step_follows_the_loss_scale():
    plain, again = (trained("fastclip-v3", graphed=r, scale=LossScale(256.0, grows=True)) for r in (False, True))
    found, right = (list(model.parameters()) for model, *_ in (again, plain))
    torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-12)

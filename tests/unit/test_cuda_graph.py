"""Recorded steps, with a stand-in for CUDA graphs: the function is called again, and what it makes goes to where the
first call's result lies. tests/gpu has the real ones."""

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
from leanclip.training.cuda_graph import WARM_UP, CudaGraphs
from leanclip.training.step import training_step
from leanclip.training.step_context import StepContext

SAMPLES, BATCH = 40, 11
FEW_SIZES: Any = partial(Texts.pack, few_sizes=True)  # as on a GPU


class Again:
    """As a CUDA graph: the call that records leaves no trace, and the later ones write where that one did."""

    def __init__(self, loss):
        self.state = getattr(loss, "state", None)

    def __call__(self, function, _):
        self.function, self.result = function, function()
        if self.state is not None:
            self.undo = self.state.undo
            self.state.rollback()
            self.state.undo = self.undo
        return self

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


def trained(name, *, recorded, broken=(), scale=None):
    """A model, its loss and the values of it after some steps of changing gamma, ids and caption lengths."""
    model = model_of(*FAMILIES["clip"]).double().train()
    loss = leanclip.create_loss(name, num_samples=SAMPLES if name not in ("infonce", "siglip") else None).double()
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.05)
    autocast = torch.autocast("cpu", enabled=False)
    recorder = CudaGraphs(model, autocast, lambda *given: Again(loss)(*given)) if recorded else None
    context = StepContext(
        towers=model, loss=loss, optimizer=optimizer, global_batch=BATCH, cuda_graphs=recorder,
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
        batch = Batch(images=pixels, tokens=tokens, sample_ids=ids, lengths=model.end_of_text(tokens))
        result = training_step(context, batch.pack(FEW_SIZES))
        assert result.skipped == (step in broken)
        values.append(result.loss)
    if recorder is not None:
        assert len(recorder.graphs) == 2  # shapes
        for kept in recorder.graphs.values():  # no graph, whose nodes later steps would meet
            tensors = [kept.output.loss, *kept.output.metrics.values(), *kept.gradients]
            assert not any(isinstance(each, torch.Tensor) and each.requires_grad for each in tensors)
    return model, loss, values


@pytest.mark.parametrize("name", leanclip.LOSSES)
def test_recorded_steps_train_as_the_others_do(name):
    """Also after steps that are skipped, whose updates of the tables are undone."""
    broken = (WARM_UP * 2 + 4, WARM_UP * 2 + 5, WARM_UP * 2 + 8)
    plain, again = (trained(name, recorded=recorded, broken=broken) for recorded in (False, True))
    for one, other in zip(plain[:2], again[:2], strict=True):
        right = dict(one.state_dict())
        for key, value in other.state_dict().items():
            assert torch.allclose(value, right[key], rtol=1e-9, atol=1e-12, equal_nan=True), key
    right, found = (
        torch.stack(values)[[s for s in range(len(values)) if s not in broken]] for *_, values in (plain, again)
    )
    assert torch.allclose(found, right, rtol=1e-9)


def test_tables_that_moved_are_recorded_anew():
    """A recording knows them by address."""
    model = model_of(*FAMILIES["clip"]).train()
    loss = leanclip.create_loss("fastclip-v3", num_samples=SAMPLES)
    assert isinstance(loss, GlobalContrastiveLoss) and loss.state is not None
    recorder = CudaGraphs(model, torch.autocast("cpu", enabled=False), lambda *given: Again(loss)(*given))
    context = StepContext(
        towers=model, loss=loss, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), global_batch=BATCH,
        cuda_graphs=recorder,
    )  # fmt: skip
    tokens = captions(longest=9)
    assert model.end_of_text is not None
    images, lengths = torch.rand(BATCH, 3, 32, 32), model.end_of_text(tokens)
    batch = Batch(images=images, tokens=tokens, sample_ids=torch.arange(BATCH), lengths=lengths)
    for epoch in range(WARM_UP + 2):
        loss.set_epoch(epoch, 9)
        training_step(context, batch.pack(FEW_SIZES))
    (before,) = recorder.graphs.values()
    loss.resize(SAMPLES + 5)
    moved = replace(batch, sample_ids=torch.arange(BATCH) + SAMPLES + 5 - BATCH)
    training_step(context, moved.pack(FEW_SIZES))
    (after,) = recorder.graphs.values()
    assert after is not before and int(loss.state.visited) == 2 * BATCH


def test_a_recorded_step_follows_the_loss_scale():
    plain, again = (trained("fastclip-v3", recorded=r, scale=LossScale(256.0, grows=True)) for r in (False, True))
    for value, right in zip(again[0].parameters(), plain[0].parameters(), strict=True):
        assert torch.allclose(value, right, rtol=1e-9, atol=1e-12)

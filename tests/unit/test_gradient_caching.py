"""Gradient caching against one graph over the same micro-batches."""

import pytest
import torch
from torch import nn
from training_worker import SAMPLES, batch, small_vit

import leanclip
from leanclip.data import Batch
from leanclip.models import ModelConfig, create_model
from leanclip.models.batch_norm import RunningAverages
from leanclip.optim.loss_scale import GROWTH_STEPS, LossScale
from leanclip.training.gradient_caching import cached
from leanclip.training.step import direct, training_step
from leanclip.training.step_context import StepContext


def context_of(model, name="fastclip-v3", parts=3, captions=0, **options):
    """With learned weights of pairs, which are not all 1, where `captions` of a sample are scored."""
    learned = {"pair_weights": "learned", "captions_per_sample": captions} if captions else {}
    loss = leanclip.create_loss(name, num_samples=SAMPLES, tau=0.1, **learned).double()
    loss.set_epoch(0, 1)
    if loss.pair_weights is not None and loss.state is not None:
        loss.pair_weights.fit.copy_(torch.tensor([1.0, -1.0, 0.5, 1.0, 0.5, 0.3, 0.3, 0.0]))
        loss.state.get_buffer("scored").fill_(2)
        loss.state.get_buffer("score").view(-1).copy_(torch.linspace(-2, 2, SAMPLES * captions))
    parameters = [*(p for p in model.parameters() if p.requires_grad), *loss.parameters()]
    return StepContext(
        towers=model,
        loss=loss,
        optimizer=torch.optim.SGD(parameters, lr=0.1),
        global_batch=13,
        micro_batches=parts,
        **options,
    )


def double_batch(step=0):
    images, tokens, ids = batch(step, torch.float64)
    return Batch(images=images, tokens=tokens, sample_ids=ids, caption_numbers=ids % 3)


def gradients(module):
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("name", "captions"), [("dcl", 0), ("fastclip-v2", 0), ("fastclip-v3", 0), ("dcl", 1), ("fastclip-v2", 2)]
)
def test_patch_dropout_drops_the_same_twice(name, captions, tmp_path):
    """The cached run equals the same micro-batches, with the same random numbers, in one graph."""
    model = small_vit(tmp_path, patch_dropout=0.5).double().train()
    once = context_of(model, name, captions=captions)
    data = double_batch()
    torch.manual_seed(5)
    pairs = [model(part.images, part.tokens) for part in data.split(3)]
    after = torch.get_rng_state()
    image, text = (torch.cat(side) for side in zip(*pairs, strict=True))
    right = once.loss(image, text, data.sample_ids, caption_numbers=data.caption_numbers)
    right.loss.backward()
    truth, tables = gradients(model), once.loss.state_dict()

    model.zero_grad()
    again = context_of(model, name, captions=captions)
    torch.manual_seed(5)
    found = cached(again, data)
    assert torch.equal(torch.get_rng_state(), after)  # the step consumed its random numbers once
    assert found.loss.item() == pytest.approx(right.loss.item(), rel=1e-12)
    torch.testing.assert_close(gradients(model), truth, rtol=1e-9, atol=1e-13)
    torch.testing.assert_close(dict(again.loss.state_dict()), dict(tables), rtol=1e-12, atol=1e-8)

    model.zero_grad()
    torch.manual_seed(6)
    other = cached(context_of(model, name, captions=captions), data)
    assert abs(other.loss.item() - right.loss.item()) > 1e-6  # or nothing was dropped at all


def test_a_locked_tower_gets_no_gradient(tmp_path):
    model = small_vit(tmp_path).double()
    model.lock("image")
    data = double_batch()
    model.train()
    direct(context_of(model), data)
    right = gradients(model)
    model.zero_grad()
    cached(context_of(model), data)
    assert [name for name in right if name.startswith("clip.visual")] == ["clip.visual.proj"]
    torch.testing.assert_close(gradients(model), right, rtol=1e-9, atol=1e-13)


def test_running_averages_move_once_by_the_mean_over_the_micro_batches():
    norm = nn.BatchNorm1d(4, momentum=0.2).double().train()
    parts = torch.randn(12, 4, dtype=torch.float64).tensor_split(3)
    assert norm.running_mean is not None and norm.running_var is not None
    mean, variance = norm.running_mean.clone(), norm.running_var.clone()
    averages = RunningAverages(norm)
    averages.remember()
    for part in averages.as_one_update(parts):
        norm(part)
    with averages.frozen():
        for part in parts:
            norm(part)
    assert norm.num_batches_tracked == 1
    assert torch.allclose(norm.running_mean, 0.8 * mean + 0.2 * torch.stack([p.mean(0) for p in parts]).mean(0))
    assert torch.allclose(norm.running_var, 0.8 * variance + 0.2 * torch.stack([p.var(0) for p in parts]).mean(0))
    averages.restore()
    assert torch.equal(norm.running_mean, mean) and norm.num_batches_tracked == 0
    norm(parts[0])
    assert norm.num_batches_tracked == 1  # thawed


def test_frozen_synchronised_layers_keep_their_count():
    norm = nn.SyncBatchNorm(4).train()
    averages = RunningAverages(norm)
    with averages.frozen():
        assert norm.num_batches_tracked is not None
        norm.num_batches_tracked.add_(1)  # as its forward pass does, which wants a GPU
    assert norm.num_batches_tracked == 0


def test_a_resnet_trains_in_micro_batches():
    torch.manual_seed(0)
    model = create_model(ModelConfig(model="leanclip-tiny")).train()
    loss = leanclip.create_loss("fastclip-v3", num_samples=20)
    loss.set_epoch(0, 1)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD([*parameters, *loss.parameters()], lr=0.1)
    counts = {name: b.clone() for name, b in model.named_buffers() if name.endswith("num_batches_tracked")}
    data = Batch(
        images=torch.randn(9, 3, 32, 32),
        tokens=model.tokenizer([f"number {n}" for n in range(9)]),
        sample_ids=torch.arange(9),
    )
    training_step(StepContext(towers=model, loss=loss, optimizer=optimizer, global_batch=9, micro_batches=3), data)
    after = {name: b for name, b in model.named_buffers() if name.endswith("num_batches_tracked")}
    assert counts and all(after[name] == count + 1 for name, count in counts.items())


def test_the_loss_scale_leaves_no_trace_and_halves_on_overflow(tmp_path):
    model = small_vit(tmp_path).double().train()
    data = double_batch()
    results, norms = [], []
    for scale in (LossScale(), LossScale(1024.0, grows=True)):
        context = context_of(small_vit(tmp_path).double().train(), scale=scale, grad_clip_norm=0.5)
        norms.append(training_step(context, data).grad_norm)
        results.append([p.detach().clone() for p in context.towers.parameters()])
    assert torch.allclose(norms[0], norms[1], rtol=1e-12)
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-8)

    scale = LossScale(1024.0, grows=True)
    context = context_of(model, scale=scale)
    broken = Batch(images=data.images * torch.inf, tokens=data.tokens, sample_ids=data.sample_ids)
    assert training_step(context, broken).skipped
    assert scale.value == 512.0
    scale.good_steps = GROWTH_STEPS - 1
    assert not training_step(context, data).skipped
    assert scale.value == 1024.0 and scale.good_steps == 0


def test_packed_micro_batches_are_those_that_the_step_takes():
    """Packed before the split, so that the prefetch thread can do it."""
    data = Batch(images=torch.zeros(7, 1), tokens=torch.arange(14).view(7, 2), sample_ids=torch.arange(7))
    parts = data.pack(lambda tokens, lengths: tokens.sum(), 3).split(3)
    assert [int(part.captions) for part in parts] == [int(part.tokens.sum()) for part in data.split(3)]
    assert all(torch.equal(part.captions, part.tokens) for part in data.split(3))
    with pytest.raises(ValueError):
        data.pack(lambda tokens, lengths: tokens.sum(), 2).split(3)

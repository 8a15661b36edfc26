import pytest
import torch

import leanclip
from leanclip.data import Batch
from leanclip.models import ModelConfig, create_model
from leanclip.optim import OptimConfig, create_optimizer, weight_decay_groups
from leanclip.training.step import training_step
from leanclip.training.step_context import StepContext


def test_a_step_with_a_broken_gradient_is_skipped_and_leaves_the_estimates_alone():
    torch.manual_seed(0)
    model = create_model(ModelConfig(model="leanclip-tiny"))
    loss = leanclip.create_loss("fastclip-v3", num_samples=20)
    loss.set_epoch(0, 1)
    config = OptimConfig(lr=1e-3, wd=0.1, beta1=0.9, beta2=0.98, eps_opt=1e-6)
    optimizer = create_optimizer(config, [*weight_decay_groups(model, 0.1), *loss.param_groups()])
    tokens = model.tokenizer([f"number {n}" for n in range(8)])
    context = StepContext(towers=model, loss=loss, optimizer=optimizer, global_batch=8)

    def step(images):
        batch = Batch(images=images, tokens=tokens, sample_ids=torch.arange(8))
        return training_step(context, batch)

    assert not step(torch.randn(8, 3, 32, 32)).skipped
    before = {name: value.clone() for name, value in (loss.state_dict() | model.state_dict()).items()}
    broken = torch.randn(8, 3, 32, 32)
    broken[3] = float("nan")
    assert step(broken).skipped
    after = dict(loss.state_dict() | model.state_dict())  # weights, tables, and statistics of batch norms
    torch.testing.assert_close(after, before, rtol=0, atol=0)


@pytest.mark.parametrize("share", [0.5, 0.999, 1.001, 2.0])
def test_gradients_are_clipped_as_torch_does(share):
    """A limit below and above the norm: where nothing is to be clipped, nothing is multiplied."""

    def weights(limit):
        torch.manual_seed(0)
        model = create_model(ModelConfig(model="leanclip-tiny"))
        loss = leanclip.create_loss("infonce")
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        images, tokens = torch.randn(8, 3, 32, 32), model.tokenizer([f"number {n}" for n in range(8)])
        batch = Batch(images=images, tokens=tokens, sample_ids=torch.arange(8))
        if limit is None:  # the plain way
            loss(*model(batch.images, batch.tokens)).loss.backward()
            norm = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
            torch.nn.utils.clip_grad_norm_(model.parameters(), share * norm)
            optimizer.step()
            return norm, list(model.parameters())
        context = StepContext(towers=model, loss=loss, optimizer=optimizer, global_batch=8, grad_clip_norm=limit)
        return float(training_step(context, batch).grad_norm), list(model.parameters())

    norm, plain = weights(None)
    again, ours = weights(share * norm)
    assert again == norm
    assert all(torch.equal(one, other) for one, other in zip(plain, ours, strict=True))

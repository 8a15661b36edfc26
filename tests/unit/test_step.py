import torch

import leanclip
from leanclip.data import Batch
from leanclip.models import ModelConfig, create_model
from leanclip.optim import OptimConfig, create_optimizer, weight_decay_groups
from leanclip.training.pieces import Pieces
from leanclip.training.step import training_step


def test_a_step_with_a_broken_gradient_is_skipped_and_leaves_the_estimates_alone():
    torch.manual_seed(0)
    model = create_model(ModelConfig(model="leanclip-tiny"))
    loss = leanclip.create_loss("fastclip-v3", num_samples=20)
    loss.set_epoch(0, 1)
    config = OptimConfig(lr=1e-3, wd=0.1, beta1=0.9, beta2=0.98, eps_opt=1e-6)
    optimizer = create_optimizer(config, [*weight_decay_groups(model, 0.1), *loss.param_groups()])
    tokens = model.tokenizer([f"number {n}" for n in range(8)])
    pieces = Pieces(towers=model, loss=loss, optimizer=optimizer, batch=8)

    def step(images):
        batch = Batch(images=images, tokens=tokens, sample_ids=torch.arange(8))
        return training_step(pieces, batch)

    assert not step(torch.randn(8, 3, 32, 32)).skipped
    weights = [parameter.detach().clone() for parameter in (*model.parameters(), *loss.parameters())]
    tables = {name: table.clone() for name, table in (loss.state_dict() | model.state_dict()).items()}
    broken = torch.randn(8, 3, 32, 32)
    broken[3] = float("nan")
    assert step(broken).skipped
    for before, after in zip(weights, (*model.parameters(), *loss.parameters()), strict=True):
        assert torch.equal(before, after)
    for name, table in (loss.state_dict() | model.state_dict()).items():  # batch-norm statistics are among them
        assert torch.equal(table, tables[name]), name

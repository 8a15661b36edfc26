"""The losses on a GPU: right, and without waiting for the device."""

import pytest
import torch
from torch.nn.functional import normalize

import leanclip
from leanclip.data import Batch
from leanclip.losses.gradient_check import check_implementations
from leanclip.models import ModelConfig, create_model
from leanclip.optim import OptimConfig, create_optimizer, weight_decay_groups
from leanclip.training.step import training_step
from leanclip.training.step_context import StepContext

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]


@pytest.mark.parametrize("batch", [127, 1000])
@pytest.mark.parametrize("dense_pairs", [0, 2**24])
def test_every_implementation_agrees_with_float64(batch, dense_pairs, monkeypatch):
    from leanclip.ops.triton import launch

    monkeypatch.setattr(launch, "DENSE_PAIRS", dense_pairs)
    checks = list(check_implementations(list(leanclip.LOSSES), device=torch.device("cuda"), batch=batch, dim=96))
    assert {check.implementation for check in checks} == {"tiled", "triton"}
    assert [check for check in checks if not check.passed] == []


@pytest.fixture
def no_waiting():
    """Any wait for the device is an error until the fixture's own `allow` is called."""
    yield lambda mode: torch.cuda.set_sync_debug_mode(mode)
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", leanclip.LOSSES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fifty_calls_never_wait(name, dtype, no_waiting):
    loss = leanclip.create_loss(name, num_samples=10_000).cuda()
    image, text = (
        normalize(torch.randn(512, 128, device="cuda"), dim=1).to(dtype).requires_grad_() for _ in range(2)
    )
    ids = torch.randint(10_000, (512,)).pin_memory()
    optimizer = torch.optim.AdamW([{"params": [image, text]}, *loss.param_groups()], lr=1e-4, fused=True)
    loss.set_epoch(0, 5)
    loss(image, text, ids).loss.backward()  # compiles the kernels, which may wait
    optimizer.step()
    torch.cuda.synchronize()
    no_waiting("error")
    for step in range(50):
        loss.set_epoch(step // 10, 5)
        optimizer.zero_grad()
        loss(image, text, ids).loss.backward()
        optimizer.step()
    no_waiting("default")
    assert torch.isfinite(image).all() and torch.isfinite(loss.temperature())


def test_a_training_step_waits_once(no_waiting):
    """For the finite check, and nowhere else. Captions are packed from lengths on the host, as a run's are."""
    model = create_model(ModelConfig(model="leanclip-tiny")).cuda()
    loss = leanclip.create_loss("fastclip-v3", num_samples=1000).cuda()
    loss.set_epoch(0, 1)
    config = OptimConfig(lr=1e-3, wd=0.1, beta1=0.9, beta2=0.98, eps_opt=1e-6)
    optimizer = create_optimizer(config, [*weight_decay_groups(model, 0.1), *loss.param_groups()])
    context = StepContext(
        towers=model,
        loss=loss,
        optimizer=optimizer,
        global_batch=64,
        autocast=torch.autocast("cuda", torch.bfloat16),
        grad_clip_norm=1.0,
    )
    assert model.end_of_text is not None
    tokens = model.tokenizer(["a cat"] * 64)
    host = Batch(
        images=torch.randn(64, 3, 32, 32).pin_memory(),
        tokens=tokens.pin_memory(),
        sample_ids=torch.arange(64).pin_memory(),
        lengths=model.end_of_text(tokens),
    )

    def step() -> None:
        training_step(context, host.to(torch.device("cuda")).pack(model.texts))

    step()
    step()
    torch.cuda.synchronize()
    import warnings

    no_waiting("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step()
    no_waiting("default")
    waits = [warning for warning in caught if "synchronizing" in str(warning.message)]
    assert len(waits) == 1, [str(warning.message) for warning in waits]

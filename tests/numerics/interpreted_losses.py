"""Run by `test_ops_triton.py` in a process of its own, where TRITON_INTERPRET=1 was set before Triton was imported.

Steps of each loss whose scalars the kernels compute, against the same steps in plain PyTorch. float32 only.
"""

import copy
from typing import Any

import pytest
import torch
from torch.nn.functional import normalize

import leanclip
from leanclip import ops

SAMPLES, DIM = 60, 24
TOLERANCE = 3e-5  # of the largest entry: float32, in two orders, at temperatures of 0.02 and more
LOSSES: list[tuple[str, dict[str, Any]]] = [
    ("infonce", {}),
    ("infonce", {"learn_tau": False}),
    ("dcl", {}),
    ("siglip", {}),
    ("sogclr", {}),
    ("fastclip-v0", {}),
    ("fastclip-v1", {"gamma_per_step": True}),
    ("dcl", {"tau": 0.1, "tau_min": 0.099, "tau_max": 0.101, "lr_tau": 1.0}),  # reaches both bounds
    ("fastclip-v3", {"tau": 0.025, "lr_tau": 0.1}),  # where the optimizer's step shrinks
    ("fastclip-v3", {"tau_gradient": "exact", "gamma_min": 0.5, "gamma_schedule": "constant"}),
    ("fastclip-v2", {"tau_weight": "exact"}),  # only the products: its scalars are plain PyTorch
]


def run_steps(name: str, hyper: dict[str, Any], *, implementation: str, batch: int) -> list[dict[str, torch.Tensor]]:
    """Everything that two training steps, an evaluation and a third step leave; ids occur again, and twice."""
    learned = any(key in name for key in ("infonce", "dcl", "siglip"))
    loss = leanclip.create_loss(
        name, num_samples=None if learned else SAMPLES, implementation=implementation, **hyper
    )
    optimizer = torch.optim.SGD(groups, lr=0.2) if (groups := loss.param_groups()) else None
    draw, results = torch.Generator().manual_seed(0), []
    for step in range(4):
        loss.set_epoch(step, 4)
        loss.train(step != 2)
        image = normalize(torch.randn(batch, DIM, generator=draw), dim=1)
        text = normalize(image + torch.randn(batch, DIM, generator=draw), dim=1)
        image, text = image.requires_grad_(), text.requires_grad_()
        ids = torch.randint(SAMPLES, (batch,), generator=draw)
        ids = ids[:, None].repeat(1, 2)[:, 0]  # as a caller may have them, not contiguous
        # Not the state_dict, which would settle the temperature.
        before = {key: value.clone() for key, value in loss.named_buffers() if "state." in key}
        loss.zero_grad()
        output = loss(image, text, ids)
        (3 * output.loss).backward()
        found = {"value": output.loss.detach(), "image": image.grad, "text": text.grad}
        found |= {key: value for key, value in output.metrics.items() if isinstance(value, torch.Tensor)}
        found |= {f"gradient of {key}": parameter.grad for key, parameter in loss.named_parameters()}
        found |= {f"state {key}": value.clone() for key, value in loss.state_dict().items()}
        undone = copy.deepcopy(loss)
        undone.rollback()
        for key, value in before.items():
            assert torch.equal(undone.get_buffer(key), value) or not loss.training, key
        if optimizer is not None:
            optimizer.step()
        results.append({key: value for key, value in found.items() if value is not None})
    return results


@pytest.mark.parametrize("batch", [2, 19, 37])
@pytest.mark.parametrize(("name", "hyper"), LOSSES, ids=lambda value: value if isinstance(value, str) else "")
def test_the_kernels_equal_the_steps(name: str, hyper: dict[str, Any], batch: int):
    expected = run_steps(name, hyper, implementation="tiled", batch=batch)
    found = run_steps(name, hyper, implementation="triton", batch=batch)
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for key, value in other.items():
            assert one[key].dtype == value.dtype and one[key].shape == value.shape, key
            largest = max(1e-3, value[value.isfinite()].abs().max().item()) if value.isfinite().any() else 1.0
            torch.testing.assert_close(one[key], value, rtol=0, atol=TOLERANCE * largest, msg=f"{key}: {{}}".format)


def test_calls_that_need_more_take_the_steps(monkeypatch: pytest.MonkeyPatch):
    """Weights, groups, ids of their own for the captions, another precision of the state."""
    from leanclip.ops.triton import scalars

    calls = []
    monkeypatch.setattr(scalars, "prepare", lambda *_, **__: calls.append(1))
    image, ids = normalize(torch.randn(6, 8), dim=1), torch.arange(6)
    loss = leanclip.create_loss("fastclip-v3", num_samples=90, implementation="triton")
    loss.set_epoch(0, 1)
    loss(image, image, ids, weights=torch.ones(6))
    loss(image, image, ids, groups=ids)
    loss(image, image, ids, text_ids=ids + 1)
    loss(image[:1], image[:1], ids[:1])
    leanclip.create_loss("siglip", implementation="triton")(image, image, weights=torch.ones(6))
    loss.double()(image, image, ids)
    assert not calls


@pytest.mark.parametrize("name", ["infonce", "fastclip-v3", "siglip"])
def test_an_embedding_that_is_not_a_number_shows(name: str):
    loss = leanclip.create_loss(name, num_samples=None if name != "fastclip-v3" else 9, implementation="triton")
    loss.set_epoch(0, 1)
    image = normalize(torch.randn(6, 8), dim=1)
    text = image.clone().requires_grad_()
    image[2, 3] = torch.nan
    output = loss(image, text, torch.arange(6))
    output.loss.backward()
    assert output.loss.isnan() and text.grad is not None and text.grad.isnan().any()


def test_ids_on_a_device_are_checked_by_the_kernel():
    """Here the ids are on the host, where they were checked: the kernel gets them directly."""
    from leanclip.ops.triton import scalars

    loss: Any = leanclip.create_loss("fastclip-v1", num_samples=5)
    state = loss.state
    side = normalize(torch.randn(4, 8), dim=1)
    prepared = scalars.prepare(side, side, loss.temperature_rule.stored(), ids=torch.tensor([0, 7, -1, 3]))
    by_side = ops.Statistics(torch.zeros(4), torch.zeros(4))
    tables = state.get_buffer("log_u_image"), state.get_buffer("log_u_text")
    estimates = ops.Estimates(torch.tensor([0.0, 1.0], dtype=torch.float64), *tables, state.visited, True)
    scalars.anchors(prepared, by_side, by_side, loss.form, estimates)
    assert not prepared.valid and state.visited == 2
    for table in tables:
        assert table.isfinite().tolist() == [True, False, False, True, False]

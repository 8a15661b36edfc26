"""The state of the losses: properties of the per-sample tables, the temperature and the inner rate."""

import math
import pickle
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import normalize

import leanclip
from leanclip.losses import LossConfig
from leanclip.losses.global_contrastive import GlobalContrastiveLoss
from leanclip.losses.normalizer import inner_rate
from leanclip.losses.sample_state import SampleState
from leanclip.losses.temperature import GlobalTemperature
from refusal import refuses

GLOBAL = ("sogclr", "isogclr", "fastclip-v0", "fastclip-v1", "fastclip-v2", "fastclip-v3")
SAMPLES = 30


def num_samples(name):
    return SAMPLES if name in GLOBAL else None


def create(name, **hyper) -> GlobalContrastiveLoss:
    loss = leanclip.create_loss(name, num_samples=SAMPLES, **hyper).double()
    loss.set_epoch(0, 4)
    assert isinstance(loss, GlobalContrastiveLoss)
    return loss


def batch(seed, size=8, dim=5):
    draw = torch.Generator().manual_seed(seed)
    image, text = (normalize(torch.randn(size, dim, generator=draw, dtype=torch.float64), dim=1) for _ in range(2))
    return image.requires_grad_(), text.requires_grad_(), torch.randperm(SAMPLES, generator=draw)[:size]


def state(loss: GlobalContrastiveLoss) -> SampleState:
    assert loss.state is not None
    return loss.state


def tables(loss, dims=1):
    return {name: table.clone() for name, table in loss.state_dict().items() if table.ndim >= dims}


def equal(before, after):
    return before.keys() == after.keys() and all(torch.equal(value, after[key]) for key, value in before.items())


def log_u(loss, ids: Any = slice(None), side="image"):
    return state(loss).get_buffer(f"log_u_{side}")[ids]


def step(loss, image, text, ids, **more):
    output = loss(image, text, ids, **more)
    return output, torch.autograd.grad(output.loss, (image, text))


names = st.sampled_from(GLOBAL)
seeds = st.integers(0, 10_000)


@settings(max_examples=30, deadline=None)
@given(names, seeds, st.randoms(use_true_random=False))
def test_permuting_the_batch_permutes_the_result(name, seed, draw):
    order = torch.tensor(draw.sample(range(8), 8))
    first, second = create(name), create(name)
    for epoch in (0, 1):
        image, text, ids = batch(seed + epoch)
        one, gradient = step(first, image, text, ids)
        shuffled = [side.detach()[order].requires_grad_() for side in (image, text)]
        first.set_epoch(epoch + 1, 4)
        two, permuted = step(second, shuffled[0], shuffled[1], ids[order])
        second.set_epoch(epoch + 1, 4)
        assert two.loss.item() == pytest.approx(one.loss.item(), rel=1e-10)
        torch.testing.assert_close([side[order] for side in gradient], list(permuted), rtol=1e-9, atol=1e-13)
    torch.testing.assert_close(tables(first), tables(second), rtol=1e-10, atol=1e-8)


@settings(max_examples=30, deadline=None)
@given(names, seeds)
def test_ids_outside_the_batch_stay_untouched(name, seed):
    loss = create(name)
    step(loss, *batch(seed))
    loss.set_epoch(1, 4)
    before = tables(loss)
    image, text, ids = batch(seed + 1)
    step(loss, image, text, ids)
    others = torch.ones(SAMPLES, dtype=torch.bool)
    others[ids] = False
    changed = 0
    for key, table in tables(loss).items():
        assert torch.equal(table[others], before[key][others])
        changed += not torch.equal(table, before[key])
    assert changed


@settings(max_examples=20, deadline=None)
@given(names, seeds)
def test_gamma_one_forgets_and_gamma_zero_freezes(name, seed):
    image, text, ids = batch(seed)
    fresh, used, frozen = create(name), create(name), create(name)
    for loss in (used, frozen):
        step(loss, *batch(seed + 1)[:2], ids)
        for table in {"tau_image", "tau_text"} & state(loss).initial.keys():
            state(loss).get_buffer(table).copy_(state(fresh).get_buffer(table))  # all have the same temperatures
    before = log_u(frozen, ids)
    frozen.shares.set(1 - 1e-90, 1e-90)
    for loss in (fresh, used, frozen):
        step(loss, image, text, ids)
    assert torch.equal(log_u(fresh, ids), log_u(used, ids))
    assert torch.allclose(log_u(frozen, ids), before, atol=1e-6)
    assert not torch.allclose(log_u(used, ids), before, atol=1e-6)


@settings(max_examples=20, deadline=None)
@given(names, seeds)
def test_evaluation_changes_nothing(name, seed):
    loss = create(name)
    step(loss, *batch(seed))
    before = tables(loss, dims=0)
    loss.eval()
    loss.set_epoch(2, 4)
    output, _ = step(loss, *batch(seed + 1))
    assert math.isfinite(output.loss.item())
    assert equal(before, tables(loss, dims=0))


@pytest.mark.parametrize("name", GLOBAL)
def test_rollback_undoes_one_step(name):
    loss = create(name)
    step(loss, *batch(0))
    before = tables(loss, dims=0)
    loss.set_epoch(1, 4)
    image, text, ids = batch(1)
    ids[3] = ids[0]  # a duplicate as well
    step(loss, image, text, ids)
    assert not equal(before, tables(loss, dims=0))
    for _ in range(2):
        loss.rollback()
        assert equal(before, tables(loss, dims=0))


def test_of_an_id_twice_in_a_batch_the_last_is_stored():
    loss, alone = create("fastclip-v1"), create("fastclip-v1")
    image, text, _ = batch(2)
    ids = torch.tensor([5, 1, 5, 2, 3, 5, 4, 0])
    step(loss, image, text, ids)
    step(alone, image, text, torch.tensor([10, 1, 11, 2, 3, 5, 4, 0]))
    assert log_u(loss, 5) == log_u(alone, 5)
    assert int(state(loss).visited) == 6 and int(state(alone).visited) == 8


def test_captions_may_have_a_state_of_their_own():
    loss = create("fastclip-v1")
    image, text, ids = batch(3)
    step(loss, image, text, ids, text_ids=(ids + 1) % SAMPLES)
    visited = (~log_u(loss, side="text").isneginf()).nonzero().ravel()
    assert set(visited.tolist()) == set(((ids + 1) % SAMPLES).tolist())


def test_resize_keeps_what_was_learned():
    loss = create("fastclip-v2")
    step(loss, *batch(4))
    before = tables(loss)
    loss.resize(50)
    for key, table in tables(loss).items():
        assert len(table) == 50 and torch.equal(table[:SAMPLES], before[key])
    assert float(state(loss).get_buffer("tau_image")[49]) == pytest.approx(0.03)
    with refuses("loss.bad_num_samples", "resize to 10"):
        loss.resize(10)


@pytest.mark.parametrize(
    ("ids", "code", "words"),
    [
        (None, "loss.no_ids", "call loss(image, text, sample_ids)"),
        (torch.arange(8) + 25, "loss.bad_ids", "sample id 32 lies outside [0, 30)"),
        (torch.arange(8) - 1, "loss.bad_ids", "sample id -1 lies outside"),
        (torch.arange(7), "loss.bad_ids", "7 ids for 8 embeddings"),
        (torch.tensor(14.3), "loss.bad_ids", "leave logit_scale out"),
        (torch.rand(8), "loss.bad_ids", "vector of integers"),
    ],
)
def test_bad_ids_are_refused(ids, code, words):
    image, text, _ = batch(7)
    with refuses(code, words):
        create("fastclip-v3")(image, text, ids)


@pytest.mark.parametrize("weights", [torch.ones(7), torch.tensor(1.0), -torch.ones(8), torch.full((8,), math.nan)])
def test_bad_weights_are_refused(weights):
    image, text, _ = batch(7)
    with refuses("loss.bad_weights", "weights"):
        leanclip.create_loss("infonce")(image, text, weights=weights)


@pytest.mark.parametrize(
    ("name", "arguments", "code", "words"),
    [
        ("fastclip-v3", {}, "loss.bad_num_samples", "give num_samples"),
        ("sogclr", {"num_samples": 0}, "loss.bad_num_samples", "num_samples is 0"),
        ("infonce", {"rhoo": 1}, "loss.unknown_hyper_parameter", "infonce has no hyper-parameter 'rhoo'"),
        ("fastclip-v3", {"num_samples": 3, "roh": 1}, "loss.unknown_hyper_parameter", "did you mean rho"),
        ("fastclip-v3", {"num_samples": 3, "gamma_min": 2.0}, "loss.bad_value", "gamma_min is 2.0"),
        ("infonce", {"tau": -1.0}, "loss.bad_value", "tau is -1.0"),
        ("infonce", {"tau_min": 0.5, "tau_max": 0.1}, "loss.bad_value", "tau_min 0.5"),
        ("infonce", {"tau": 2.0}, "loss.bad_value", "tau_max 1.0"),
        ("dcl", {"learn_tau": False, "lr_tau": 1e-3}, "loss.bad_value", "leave lr_tau out"),
        ("fastclip-v3", {"num_samples": 3, "learn_tau": False}, "loss.unknown_hyper_parameter", "'learn_tau'"),
    ],
)
def test_bad_arguments_are_refused(name, arguments, code, words):
    with refuses(code, words):
        leanclip.create_loss(name, **arguments)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("clip", "infonce"), ("openclip", "infonce"), ("cliploss", "infonce"), ("CLIP_loss", "infonce"),
        ("softmax", "infonce"), ("InfoNCE", "infonce"), ("fastclip", "fastclip-v3"), ("fastclipv3", "fastclip-v3"),
        ("FastCLIP-v1", "fastclip-v1"), ("sigmoid", "siglip"), ("isogclrr", "isogclr"),
    ],
)  # fmt: skip
def test_other_names_of_a_loss_are_refused_with_a_hint(written, meant):
    with refuses("loss.unknown", f"'{written}'; did you mean {meant}?"):
        leanclip.create_loss(written)


def test_an_argument_error_is_a_value_error():
    with pytest.raises(ValueError, match="unknown loss"):
        leanclip.create_loss("triplet")


def test_a_forgotten_set_epoch_is_warned_about_once():
    loss = leanclip.create_loss("fastclip-v3", num_samples=SAMPLES).double()
    with pytest.warns(UserWarning, match="set_epoch") as caught:
        step(loss, *batch(8))
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(loss, *batch(9))


def test_a_set_epoch_that_is_not_repeated_is_warned_about():
    loss = create("fastclip-v3")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(6):  # 6 x 8 samples of 30
            step(loss, *batch(8))
    with pytest.warns(UserWarning, match="set_epoch"):
        step(loss, *batch(9))


@pytest.mark.parametrize("name", leanclip.LOSSES)
@pytest.mark.parametrize("case", ["alone", "one group"])
def test_anchors_without_negatives_teach_nothing_infinite(name, case):
    loss = leanclip.create_loss(name, num_samples=num_samples(name)).double()
    image, text, ids = batch(10, size=1 if case == "alone" else 8)
    groups = None if case == "alone" else torch.zeros(8, dtype=torch.int64)
    for epoch in range(3):
        loss.set_epoch(epoch, 3)
        loss.zero_grad()
        output = loss(image, text, ids, groups=groups)
        gradients = torch.autograd.grad(output.loss, (image, text, *loss.parameters()))
        assert all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
        assert all(math.isfinite(float(value)) for value in output.metrics.values() if not isinstance(value, str))


@pytest.mark.parametrize("name", leanclip.LOSSES)
def test_a_loss_can_be_pickled(name):
    loss = leanclip.create_loss(name, num_samples=num_samples(name))
    assert pickle.loads(pickle.dumps(loss)).temperature() == loss.temperature()


@pytest.mark.parametrize(("schedule", "gamma_min"), [("constant", 0.6), ("cosine", 0.2), ("auto", None)])
def test_the_inner_rate(schedule, gamma_min):
    config = LossConfig(gamma_schedule=schedule, gamma_min=gamma_min, gamma_decay_epochs=18)
    values = [inner_rate(config, epoch, 37) for epoch in range(38)]
    assert values[0] == 1.0
    assert values == sorted(values, reverse=True)
    expected = {"constant": (0.6, 0.6, 0.6), "cosine": (0.6, 0.2, 0.2), "auto": (None, None, 4.177 * 37**-0.7265)}
    for epoch, value in zip((9, 18, 37), expected[schedule], strict=True):
        assert value is None or values[epoch] == pytest.approx(value)
    assert inner_rate(config, 3.7, 37) == inner_rate(config, 3, 37)


def test_the_inner_rate_per_step():
    config = LossConfig(gamma_schedule="cosine", gamma_min=0.2, gamma_decay_epochs=10, gamma_per_step=True)
    first, *rest = (inner_rate(config, epoch, 20) for epoch in (0.0, 0.5, 1.0, 1.5))
    assert first == 1.0 > rest[0] > rest[1] > rest[2]


def test_the_temperature_is_clamped_whatever_the_optimizer_does():
    rule = GlobalTemperature(0.07, 0.01, 1.0, drops=False)
    with torch.no_grad():
        rule.log_inv_tau.fill_(50.0)
    assert float(rule.mean()) == pytest.approx(0.01)
    with torch.no_grad():
        rule.log_inv_tau.fill_(-50.0)
    assert float(rule.state_dict()["log_inv_tau"]) == pytest.approx(0.0)


@pytest.mark.parametrize(("tau", "share"), [(0.031, 1.0), (0.03, 1 / 3), (0.02, 1 / 3)])
def test_below_the_threshold_the_step_drops_to_a_third(tau, share):
    rule = GlobalTemperature(tau, 0.01, 1.0, drops=True)
    start = float(rule.log_inv_tau.detach())
    optimizer = torch.optim.AdamW(rule.parameters(), lr=0.01, weight_decay=0)
    rule.log_inv_tau.grad = torch.tensor(3.0)
    optimizer.step()
    for _ in range(3):  # looking again changes nothing
        rule.settle()
    assert float(rule.log_inv_tau.detach()) == pytest.approx(start - 0.01 * share, abs=1e-6)


def test_the_temperature_has_its_own_group():
    for name, rate, follows in (("infonce", None, True), ("fastclip-v0", None, True), ("fastclip-v3", 2e-4, False)):
        loss = leanclip.create_loss(name, num_samples=None if name == "infonce" else 5)
        (group,) = loss.param_groups()
        assert group.get("lr") == rate and group["weight_decay"] == 0 and group["follows_schedule"] is follows
        assert [p.numel() for p in group["params"]] == [1]
    for name in ("sogclr", "fastclip-v1", "fastclip-v2"):
        assert leanclip.create_loss(name, num_samples=5).param_groups() == []

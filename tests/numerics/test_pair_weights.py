"""Learned weights of pairs: they find wrong pairs, are off on clean data, and are part of the state."""

import pytest
import torch
from torch.nn.functional import normalize

import leanclip
from leanclip.distributed import Ranks
from leanclip.losses.base import ContrastiveLoss, Local
from leanclip.losses.pair_weights import Fit, Mode, count_scores, gate, null_score
from leanclip.losses.similarities import Similarities
from leanclip.ops import reference
from refusal import refuses

SAMPLES, BATCH, DIM = 1200, 100, 32


def pairs(wrong: float, samples: int = SAMPLES) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Embeddings of a trained model: texts near their images, but for a share that was exchanged."""
    draw = torch.Generator().manual_seed(1)
    image = normalize(torch.randn(samples, DIM, generator=draw), dim=1)
    text = normalize(image + 0.13 * torch.randn(samples, DIM, generator=draw), dim=1)
    exchanged = torch.randperm(samples, generator=draw)[: round(wrong * samples)]
    text[exchanged] = text[exchanged.roll(1)]
    is_wrong = torch.zeros(samples, dtype=torch.bool)
    is_wrong[exchanged] = True
    return image, text, is_wrong


def create(name: str, samples: int = SAMPLES, mode: Mode = "auto", captions: int = 1) -> ContrastiveLoss:
    return leanclip.create_loss(name, num_samples=samples, tau=0.1, pair_weights=mode, captions_per_sample=captions)


def run(loss: ContrastiveLoss, image: torch.Tensor, text: torch.Tensor, epochs: range, steps: range | None = None):
    """Gradients and loss values of all steps."""
    results = []
    for epoch in epochs:
        order = torch.randperm(len(text), generator=torch.Generator().manual_seed(epoch))
        for step in steps or range(len(text) // BATCH):
            loss.set_epoch(epoch, 9)
            ids = order[step * BATCH : (step + 1) * BATCH]
            sides = [side[ids].requires_grad_() for side in (image, text)]
            value = loss(*sides, ids, caption_numbers=(ids + epoch) % 3).loss
            results += [value.detach(), *torch.autograd.grad(value, sides)]
    return results


def weights_of(loss: ContrastiveLoss) -> torch.Tensor:
    """Of every sample, or (samples, captions)."""
    assert loss.state is not None and loss.pair_weights is not None
    stored, captions = {n: loss.state.table(n) for n in ("score", "scored")}, loss.pair_weights.captions_per_sample
    if captions == 1:
        return loss.pair_weights.weights(stored)
    columns = torch.arange(captions).expand(loss.state.num_samples, -1).T
    return torch.stack([loss.pair_weights.weights(stored, column) for column in columns], 1)


def auroc(score: torch.Tensor, is_wrong: torch.Tensor) -> float:
    return float((score[is_wrong][:, None] > score[~is_wrong][None, :]).double().mean())


@pytest.mark.parametrize("name", leanclip.LOSSES)
@pytest.mark.parametrize("share", [0.0, 0.05, 0.2])
def test_wrong_pairs_lose_their_weight_and_clean_data_keeps_all(name, share):
    image, text, is_wrong = pairs(share)
    loss = create(name)
    run(loss, image, text, range(2))
    assert weights_of(loss).eq(1).all()  # before the first fit
    loss.set_epoch(2, 9)
    assert loss.state is not None and loss.pair_weights is not None
    weights, estimate = weights_of(loss), float(loss.pair_weights.fit[6])
    if share == 0:
        assert estimate < 0.01 and weights.eq(1).all()
    else:
        assert auroc(loss.state.table("score"), is_wrong) > 0.97
        assert abs(estimate - share) < 0.04
        assert weights[is_wrong].mean() < 0.15 and weights[~is_wrong].mean() > 0.95


@pytest.mark.parametrize(("name", "captions"), [*((name, 1) for name in leanclip.LOSSES), ("dcl", 2), ("siglip", 2)])
def test_on_clean_data_the_gradients_are_those_without_weights(name, captions):
    image, text, _ = pairs(0.0)
    modes: tuple[Mode, ...] = ("learned", "auto", "off")
    learned, auto, plain = (run(create(name, SAMPLES, mode, captions), image, text, range(4)) for mode in modes)
    assert all(torch.equal(one, other) for one, other in zip(auto, plain, strict=True))
    assert not all(torch.equal(one, other) for one, other in zip(learned, plain, strict=True))


@pytest.mark.parametrize("captions", [1, 2])
@pytest.mark.parametrize("name", ["dcl", "siglip", "fastclip-v2"])
def test_a_run_continues_from_its_state(name, captions):
    """Inside an epoch too: the fit is that of the epoch's start."""
    image, text, _ = pairs(0.2)
    whole, half, rest = (create(name, captions=captions) for _ in range(3))
    expected = run(whole, image, text, range(3)) + run(whole, image, text, range(3, 5))
    run(half, image, text, range(3))
    run(half, image, text, range(3, 4), range(5))
    rest.load_state_dict(half.state_dict())
    found = run(rest, image, text, range(3, 4), range(5, SAMPLES // BATCH)) + run(rest, image, text, range(4, 5))
    assert all(torch.equal(one, other) for one, other in zip(found, expected[-len(found) :], strict=True))
    assert weights_of(whole).ne(1).any() and torch.equal(weights_of(whole), weights_of(rest))


@pytest.mark.parametrize("captions", [1, 2])
def test_rollback_undoes_a_visit(captions):
    image, text, _ = pairs(0.2)
    loss = create("infonce", captions=captions)
    run(loss, image, text, range(1), range(3))
    before = {name: value.clone() for name, value in loss.state_dict().items()}
    run(loss, image, text, range(1), range(3, 4))
    assert any(not torch.equal(value, before[name]) for name, value in loss.state_dict().items())
    loss.rollback()
    assert all(torch.equal(value, before[name]) for name, value in loss.state_dict().items())


def test_an_id_twice_in_a_batch_counts_once_and_evaluation_not_at_all():
    image, text, _ = pairs(0.0, 8)
    loss = create("infonce", 8)
    loss.set_epoch(0, 1)
    loss(image, text, torch.tensor([0, 1, 2, 3, 4, 5, 6, 6]))
    assert loss.state is not None and loss.state.table("scored").tolist() == [1, 1, 1, 1, 1, 1, 1, 0]
    counted = loss.state.table("score")[:7]
    assert counted.mean().item() == pytest.approx(0, abs=1e-6)
    loss.eval()
    loss(image, text, torch.arange(8))
    assert loss.state.table("scored").sum() == 7


def five_captions() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Embeddings by caption, and which captions are wrong: one of every fifth image."""
    draw = torch.Generator().manual_seed(2)
    images = normalize(torch.randn(SAMPLES // 5, DIM, generator=draw), dim=1).repeat_interleave(5, 0)
    _, noise, _ = pairs(0.0)
    texts = normalize(images + 0.13 * DIM**0.5 * noise, dim=1)
    wrong = torch.arange(SAMPLES) % 25 == 0
    texts[wrong] = texts[wrong].roll(1, 0)
    return images, texts, wrong


def test_one_wrong_caption_of_five_is_found_by_ids_of_texts():
    (images, texts, wrong), draw = five_captions(), torch.Generator().manual_seed(2)
    loss = create("fastclip-v1")
    for epoch in range(2):
        loss.set_epoch(epoch, 9)
        for ids in torch.randperm(SAMPLES, generator=draw).split(BATCH):
            loss(images[ids], texts[ids], ids // 5, text_ids=ids, groups=ids // 5)
    loss.set_epoch(2, 9)
    weights = weights_of(loss)
    assert weights[wrong].mean() < 0.2 and weights[~wrong].mean() > 0.95


@pytest.mark.parametrize("name", ["dcl", "siglip", "fastclip-v2"])
def test_one_wrong_caption_of_five_is_found_by_their_numbers(name):
    """As a run visits them: of every image one caption in each epoch, drawn at random. By sample it is not found."""
    (images, texts, wrong), draw = five_captions(), torch.Generator().manual_seed(3)
    by_caption, by_sample = create(name, SAMPLES // 5, captions=5), create(name, SAMPLES // 5)
    for epoch in range(16):
        drawn = torch.randint(5, (SAMPLES // 5,), generator=draw)
        for loss in (by_caption, by_sample):
            loss.set_epoch(epoch, 17)
            for ids in torch.randperm(SAMPLES // 5, generator=draw).split(120):
                pair = 5 * ids + drawn[ids]
                loss(images[pair], texts[pair], ids, caption_numbers=drawn[ids])
    for loss in (by_caption, by_sample):
        loss.set_epoch(16, 17)
    assert by_caption.state is not None and by_caption.pair_weights is not None
    weights, score = weights_of(by_caption).flatten(), by_caption.state.table("score").flatten()
    visited = by_caption.state.table("scored").flatten() > 1
    assert auroc(score[visited], wrong[visited]) > 0.99
    assert weights[wrong & visited].mean() < 0.2 and weights[~wrong].mean() > 0.95
    assert 0.02 < by_caption.pair_weights.fit[6] < 0.08  # 4% are wrong
    assert weights_of(by_sample).repeat_interleave(5)[wrong].mean() > 0.5


def test_a_caption_with_few_visits_is_judged_by_all_captions_of_its_sample():
    loss = create("infonce", 4, "learned", captions=3)
    assert loss.state is not None and loss.pair_weights is not None
    loss.state.get_buffer("score").copy_(torch.tensor([[3.0, 3, 0], [0, 3, 0], [0, 3, 0], [0, 0, 3]]))
    loss.state.get_buffer("scored").copy_(torch.tensor([[2.0, 2, 0], [2, 1, 0], [9, 1, 0], [0, 0, 1]]))
    loss.pair_weights.fit.copy_(torch.tensor([1.0, *Fit(0.0, 0.5, 3.0, 0.5, 0.2), 0.2, 2.0]))
    expected = [[0, 0, 0], [1, 1, 1], [1, 1, 1], [1, 1, 1]]  # the mean of the second sample is 1
    assert weights_of(loss).round(decimals=2).tolist() == expected
    columns = loss.pair_weights.columns(torch.tensor([0, 4, 2]), 3)
    assert columns is not None and columns.tolist() == [0, 1, 2]


def test_fits_go_on_in_a_table_that_grew_or_was_filled_from_elsewhere():
    """Epochs are counted anew in more data; a checkpoint is loaded in place, without load_state_dict."""
    image, text, _ = pairs(0.2)
    loss = create("infonce")
    run(loss, image, text, range(4))
    weights = loss.pair_weights
    assert loss.state is not None and weights is not None and weights.fit[-1] == 3
    loss.resize(SAMPLES + 5)
    loss.set_epoch(1, 4)
    assert weights.fit[-1] == 1
    with torch.no_grad():
        weights.fit[-1] = 0
    weights.loaded()
    loss.set_epoch(1, 4)
    assert weights.fit[-1] == 1


def test_tables_of_captions_grow_and_are_refused_where_they_do_not_fit():
    image, text, _ = pairs(0.2)
    loss, other, single = (create("infonce", captions=captions) for captions in (3, 3, 1))
    run(loss, image, text, range(1))
    before = loss.state_dict()["state.score"].clone()
    loss.resize(SAMPLES + 5)
    assert loss.state is not None and loss.state.table("score").shape == (SAMPLES + 5, 3)
    assert torch.equal(loss.state.table("score")[:SAMPLES], before) and before.any()
    assert not loss.state.table("score")[SAMPLES:].any()
    other.resize(SAMPLES + 5)
    other.load_state_dict(loss.state_dict())
    single.resize(SAMPLES + 5)
    with pytest.raises(RuntimeError, match="score"):
        single.load_state_dict(loss.state_dict())


def test_a_null_score_takes_no_other_caption_of_the_same_image():
    image, text, _ = pairs(0.0, 8)
    images = torch.arange(8) // 2
    for extra in ({}, {"groups": images}):
        loss = create("infonce", 8)
        loss.set_epoch(0, 1)
        loss(image, text, images, text_ids=torch.arange(8), **extra)
        assert loss.state is not None and loss.state.get_buffer("null")[1] == 4


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("individual", [False, True])
def test_the_score_with_a_neighbours_caption_is_the_written_one(individual, grouped):
    draw = torch.Generator().manual_seed(3)
    image, text = (normalize(torch.randn(9, 5, generator=draw).double(), dim=1) for _ in range(2))
    groups = torch.tensor([0, 0, 1, 2, 3, 4, 4, 5, 6]) if grouped else None
    tau = 0.1 + torch.rand(2, 9, generator=draw).double() if individual else torch.tensor(0.2).double()
    matrix = Similarities(reference, Local(image, text, Ranks(0, 1, None), 9, groups=groups), tau.reciprocal())
    log_sum = matrix.statistics()[0]
    score, there = null_score(matrix.comparison(tau, log_sum, log_sum))
    own, similarity = tau.expand(2, 9), image @ text.T
    for i in range(9):
        k = (i + 1) % 9
        assert there[i] == (groups is None or groups[i] != groups[k])
        if not there[i]:
            continue
        expected = 0.0
        for anchor, side, row in ((i, 0, similarity[i]), (k, 1, similarity[:, k])):
            others = [j for j in range(9) if j not in (i, k) and (groups is None or groups[j] != groups[anchor])]
            terms = [((row[j] - similarity[i, k]) / own[side, anchor]).exp() for j in others]
            expected += own[side, anchor] * torch.stack(terms).mean().log()
        assert score[i].item() == pytest.approx(float(expected), rel=1e-9)


def test_bad_settings_are_refused():
    with refuses("loss.bad_value", "captions_per_sample is 0"):
        create("infonce", captions=0)
    image, text, _ = pairs(0.0, 8)
    for numbers in (None, torch.zeros(7, dtype=torch.int64)):
        with refuses("loss.no_caption_numbers", "5 captions", "8 integers"):
            create("infonce", 8, captions=5)(image, text, torch.arange(8), caption_numbers=numbers)
    with refuses("loss.bad_value", "off, learned, auto"):
        leanclip.create_loss("infonce", num_samples=9, pair_weights="lerned")  # pyright: ignore[reportArgumentType]
    with refuses("loss.bad_num_samples", "num_samples"):
        leanclip.create_loss("infonce", pair_weights="learned")


@pytest.mark.parametrize("captions", [1, 3])
@pytest.mark.parametrize("name", leanclip.LOSSES)
def test_the_score_and_the_weights_are_the_written_ones(name, captions):
    """Of two visits in float64, and the gradients are those of a loss that is called with these weights."""
    draw = torch.Generator().manual_seed(4)
    batch, samples = 7, 10
    learning, given = (create(name, samples, mode, captions).double() for mode in ("learned", "off"))
    scores = torch.zeros(samples, captions).double()
    visits = torch.zeros(samples, captions)
    images, texts = (normalize(torch.randn(3, batch, 5, generator=draw).double(), dim=2) for _ in range(2))
    ids_of_steps = torch.stack([torch.arange(batch), *(torch.randperm(samples, generator=draw)[:batch],) * 2])
    for step, (image, text, ids) in enumerate(zip(images[:2], texts, ids_of_steps, strict=False)):
        tau = tau_of(learning, ids)
        score = torch.zeros(batch).double()
        for side, similarity in enumerate((image @ text.T, text @ image.T)):
            for i in range(batch):
                terms = [(similarity[i, j] - similarity[i, i]) / tau[side, i] for j in range(batch) if j != i]
                score[i] += tau[side, i] * torch.stack(terms).exp().mean().log()
        numbers = (ids + step * (ids < 5)) % 4  # those of the first five samples change
        scores[ids, numbers % captions] += (score - score.mean()) / score.std(correction=0)
        visits[ids, numbers % captions] += 1
        for loss in (learning, given):
            loss.set_epoch(step, 3)
            loss(image, text, ids, caption_numbers=numbers)
    assert learning.state is not None and learning.pair_weights is not None
    expected = scores / visits.clamp_min(1)
    assert torch.allclose(learning.state.table("score").view_as(expected), expected, rtol=1e-9, atol=1e-12)
    assert torch.equal(learning.state.table("scored").view_as(visits), visits.double())

    fit = Fit(-0.5, 0.5, 0.875, 0.625, 0.3)
    learning.pair_weights.fit.copy_(torch.tensor([1.0, *fit, 0.3, 2.0], dtype=torch.float64))
    ids, numbers = ids_of_steps[2], ids_of_steps[2] % 3
    own, few = (ids, numbers % captions), visits[ids, numbers % captions] < 2
    pair_score = torch.where(few, scores[ids].sum(1) / visits[ids].sum(1).clamp_min(1), expected[own])
    at = pair_score.clamp(fit.low, fit.high)
    right = 0.7 / fit.low_spread * (-((at - fit.low) ** 2) / (2 * fit.low_spread**2)).exp()
    wrong = 0.3 / fit.high_spread * (-((at - fit.high) ** 2) / (2 * fit.high_spread**2)).exp()
    weights = torch.where(visits[ids].sum(1) < 2, 1.0, right / (right + wrong))
    assert captions == 1 or (few & (visits[ids].sum(1) > 1)).any()
    found = weights_of(learning)[ids].view(len(ids), -1)[torch.arange(len(ids)), numbers % captions]
    assert torch.allclose(found, weights, rtol=1e-9, atol=0)
    results = []
    for loss, extra in ((learning, {}), (given, {"weights": weights})):
        loss.set_epoch(2, 3)
        sides = [side[2].clone().requires_grad_() for side in (images, texts)]
        loss(*sides, ids, caption_numbers=numbers, **extra).loss.backward()
        results.append([each.grad for each in (*sides, *loss.parameters())])
    assert all(torch.allclose(*both, rtol=1e-9, atol=1e-15) for both in zip(*results, strict=True))


def tau_of(loss: ContrastiveLoss, ids: torch.Tensor) -> torch.Tensor:
    """(2, B) each anchor's own temperature."""
    if loss.state is not None and "tau_image" in loss.state.initial:
        return loss.state.read(["tau"], (ids, ids))["tau"]
    return loss.temperature().detach().expand(2, len(ids))


def test_long_epochs_have_several_fits_that_a_resumed_run_repeats(monkeypatch):
    monkeypatch.setattr("leanclip.losses.pair_weights.VISITS_PER_FIT", SAMPLES // 3)
    image, text, _ = pairs(0.2)
    steps = SAMPLES // BATCH

    def run_steps(loss: ContrastiveLoss, first: int, last: int) -> list[int]:
        fits = []
        for step in range(first, last):
            loss.set_epoch(step / steps, 3)
            assert loss.pair_weights is not None
            if loss.pair_weights.take_refit() is not None:
                fits.append(step)
            ids = (torch.arange(BATCH) + step * BATCH) % SAMPLES
            loss(image[ids], text[ids], ids)
        return fits

    whole, half, rest = (create("infonce", mode="learned") for _ in range(3))
    expected = [steps + 4, steps + 8, 2 * steps, 2 * steps + 4, 2 * steps + 8]  # the first with second visits
    assert run_steps(whole, 0, 3 * steps) == expected
    run_steps(half, 0, 2 * steps + 6)
    rest.load_state_dict(half.state_dict())
    assert run_steps(rest, 2 * steps + 6, 3 * steps) == expected[-1:]
    assert all(torch.equal(value, whole.state_dict()[name]) for name, value in rest.state_dict().items())


def test_a_fit_of_an_earlier_state_is_made_again():
    """A run that reloads a checkpoint is back before the fit."""
    image, text, _ = pairs(0.2)
    loss = create("dcl")
    run(loss, image, text, range(2))
    before = {name: value.clone() for name, value in loss.state_dict().items()}
    loss.set_epoch(2, 9)
    expected = weights_of(loss)
    loss.load_state_dict(before)
    assert weights_of(loss).eq(1).all()
    loss.set_epoch(2, 9)
    assert expected.ne(1).any() and torch.equal(weights_of(loss), expected)


@pytest.mark.parametrize("noise", [0.8, 2.0, 100.0])
def test_a_model_that_cannot_tell_right_from_wrong_turns_no_weights_on(noise):
    """As at the start of a run from scratch: right pairs then score like wrong ones."""
    draw = torch.Generator().manual_seed(6)
    image = normalize(torch.randn(SAMPLES, DIM, generator=draw), dim=1)
    text = normalize(image + noise * torch.randn(SAMPLES, DIM, generator=draw), dim=1)
    loss = create("infonce")
    run(loss, image, text, range(2))
    loss.set_epoch(2, 9)
    assert loss.pair_weights is not None
    refit = loss.pair_weights.take_refit()
    assert refit is not None and refit.wrong_pairs > 0.1 and not refit.on and weights_of(loss).eq(1).all()
    assert "off, the model does not tell" in refit.described and "look wrong" not in refit.described


@pytest.mark.parametrize(
    ("groups", "wrong_mean", "is_open"),
    [
        (((0.6, -0.61, 0.6), (0.4, 0.87, 0.55)), 0.87, True),  # as many move the median
        (((0.6, -0.61, 0.6), (0.4, 0.87, 0.55)), 1.25, True),  # and some of them are learned by heart
        (((0.6, -0.61, 0.5), (0.4, 0.92, 0.5)), 2.3, False),  # right pairs of two kinds
        (((1.0, 0.0, 1.0),), 0.9, False),  # of a model that cannot tell
    ],
)
def test_the_gate_opens_where_two_groups_are_seen_and_wrong_pairs_score_like_the_upper_one(
    groups, wrong_mean, is_open
):
    draw, number = torch.Generator().manual_seed(5), 20_000
    parts = [mean + spread * torch.randn(round(share * number), generator=draw) for share, mean, spread in groups]
    counts = count_scores(torch.cat(parts), torch.full((number,), 2)).double()
    result = gate(counts, torch.tensor([wrong_mean * 100, 100.0]))
    assert result is not None and result.open == is_open

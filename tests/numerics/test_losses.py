"""The losses against straightforward autograd transcriptions of their formulas, in float64."""

import math

import pytest
import torch
from open_clip.loss import ClipLoss, SigLipLoss
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import normalize

import leanclip
from leanclip.losses.global_contrastive import GlobalContrastiveLoss

SAMPLES, BATCH, DIM = 20, 9, 6
GLOBAL = ("sogclr", "isogclr", "fastclip-v0", "fastclip-v1", "fastclip-v2", "fastclip-v3")
EPS = 1e-3  # large, so that a forgotten eps shows


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def embeddings(seed, batch=BATCH, dim=DIM):
    draw = torch.Generator().manual_seed(seed)
    image, text = (normalize(torch.randn(batch, dim, generator=draw), dim=1) for _ in range(2))
    return image.requires_grad_(), text.requires_grad_(), torch.randperm(SAMPLES, generator=draw)[:batch]


def create(name: str, **hyper) -> GlobalContrastiveLoss:
    loss = leanclip.create_loss(name, num_samples=SAMPLES, eps=EPS, **hyper)
    assert isinstance(loss, GlobalContrastiveLoss)
    return loss


class Transcription:
    """The formulas, in linear space and written out, with Python dictionaries as the per-sample state."""

    def __init__(self, name, *, tau=0.2, rho=2.0, lr_tau=0.05, gamma=0.3, exact=False, visits=False, by_tau=False):
        self.name, self.rho, self.lr_tau, self.gamma = name, rho, lr_tau, gamma
        self.exact, self.visits, self.by_tau = exact, visits, by_tau or name == "fastclip-v3"
        self.u = ({}, {})
        self.taus = ({}, {})
        self.moments = ({}, {})
        self.individual = name in ("isogclr", "fastclip-v2")
        self.tau = tau

    def step(self, image: Tensor, text: Tensor, ids: Tensor, epoch: int, groups: Tensor, weights: Tensor):
        batch, relative = len(ids), (weights / weights.mean().clamp_min(1e-6)).tolist()
        gamma = 1.0 if epoch == 0 else self.gamma
        tau = torch.tensor(self.tau, requires_grad=True)
        surrogate, penalty, slope = 0 * (image + text).sum(), 0.0, 0 * tau
        for side, (anchors, others) in enumerate(((image, text), (text, image))):
            similarity = anchors @ others.T
            for i, sample in enumerate(ids.tolist()):
                own = torch.tensor(self.taus[side].get(sample, self.tau)) if self.individual else tau
                negatives = [j for j in range(batch) if groups[j] != groups[i]]
                if not negatives:
                    continue
                exponent = torch.stack([(similarity[i, j] - similarity[i, i]) / own for j in negatives])
                g = exponent.exp().mean()
                old = self.u[side].get(sample)
                value = g.item()
                u = value if old is None else (1 - gamma) * old + gamma * value
                self.u[side][sample] = u
                c = own.item() if self.by_tau else 1.0
                surrogate = surrogate + 0.5 * c * relative[i] * g / (EPS + u) / batch
                slope = slope + relative[i] * g / (EPS + u) / batch
                penalty += relative[i] * (self.rho + math.log(EPS + u if self.exact else u)) / (2 * batch)
                if self.individual and relative[i] > 0:
                    weighted = (exponent.exp() * exponent).mean().item()
                    gradient = -weighted / (EPS + u) + math.log(EPS + u) + self.rho
                    self.adam(side, sample, min(max(gradient, -5), 5), own.item(), epoch)
        grads = torch.autograd.grad(surrogate, (image, text), retain_graph=True)
        return grads, self.temperature_gradient(slope, tau, penalty)

    def temperature_gradient(self, slope, tau, penalty):
        if self.name not in ("fastclip-v0", "fastclip-v3"):
            return None
        (prime,) = torch.autograd.grad(slope, tau)
        factor = {"fastclip-v0": 1.0, "fastclip-v3": 0.5 * self.tau if self.exact else self.tau}[self.name]
        return -self.tau * (factor * prime + (penalty if self.name == "fastclip-v3" else 0.0))  # for log(1/tau)

    def adam(self, side, sample, gradient, tau, epoch):
        first, second = (0.9, 0.99)
        m, v, visits = self.moments[side].get(sample, (0.0, 0.0, 0))
        exponent = visits + 1
        if not self.visits:
            first, second, exponent = (0.0, 0.0, 1) if epoch == 0 else (first, second, epoch + 1)
        m, v = first * m + (1 - first) * gradient, second * v + (1 - second) * gradient**2
        self.moments[side][sample] = (m, v, visits + 1)
        step = m / (1 - first**exponent) / (math.sqrt(v / (1 - second**exponent)) + 1e-8)
        self.taus[side][sample] = min(max(tau - self.lr_tau * step, 0.01), 1.0)


FORMS = [(name, {}) for name in GLOBAL]
FORMS += [("fastclip-v3", {"tau_gradient": "exact"}), ("fastclip-v2", {"tau_adam": "visits"})]
FORMS += [(name, {"tau_weight": "exact"}) for name in ("isogclr", "fastclip-v2")]


def some_groups(step: int, batch: int = BATCH) -> Tensor:
    """Few, so that anchors have different numbers of negatives; in every fourth step nobody has one."""
    return torch.zeros(batch, dtype=torch.int64) if step % 4 == 3 else torch.arange(batch) ** 2 % (4 + step)


def some_weights(step: int, batch: int = BATCH) -> Tensor:
    """Some are 0; in every fifth step all are."""
    return torch.rand(batch, generator=torch.Generator().manual_seed(step)).sub(0.3).clamp_min(0) * (step % 5 != 4)


@pytest.mark.parametrize("extra", [(), ("groups",), ("weights",), ("groups", "weights")])
@pytest.mark.parametrize("implementation", ["reference", "tiled"])
@pytest.mark.parametrize(("name", "form"), FORMS)
def test_gradients_equal_the_transcription_over_revisits(name, form, implementation, extra):
    plain = Transcription(name, exact="tau_gradient" in form, visits="tau_adam" in form, by_tau="tau_weight" in form)
    hyper = {"tau": 0.2, "gamma_schedule": "constant", "gamma_min": 0.3, "implementation": implementation} | form
    if plain.individual:
        hyper |= {"rho": 2.0, "lr_tau": 0.05, "tau_betas": (0.9, 0.99)}
    if name == "fastclip-v3":
        hyper |= {"rho": 2.0}
    loss = create(name, **hyper)
    assert loss.state is not None
    for step in range(8):
        image, text, ids = embeddings(step)
        epoch = step // 3
        loss.set_epoch(epoch, 3)
        groups = some_groups(step) if "groups" in extra else torch.arange(BATCH)
        weights = some_weights(step) if "weights" in extra else torch.ones(BATCH)
        loss.zero_grad()
        values = {"groups": groups, "weights": weights}
        loss(image, text, ids, **{name: values[name] for name in extra}).loss.backward()
        expected, slope = plain.step(image, text, ids, epoch, groups, weights)
        assert_close((image.grad, text.grad), expected, rtol=1e-9, atol=1e-12)
        if slope is not None:
            found = next(loss.parameters()).grad
            assert found is not None and found.item() == pytest.approx(float(slope), rel=1e-8)
        for number, side in enumerate(("image", "text")):
            u = torch.tensor([plain.u[number].get(i, 0.0) for i in range(SAMPLES)])
            assert torch.allclose(loss.state.get_buffer(f"log_u_{side}"), u.log(), rtol=1e-8)
            if plain.individual:
                tau = torch.tensor([plain.taus[number].get(i, plain.tau) for i in range(SAMPLES)])
                assert torch.allclose(loss.state.get_buffer(f"tau_{side}"), tau, rtol=1e-8)
        assert int(loss.state.visited) == len(plain.u[0])
    assert len(plain.u[0]) > 0.9 * SAMPLES  # so many of them were visited twice


@pytest.mark.parametrize("name", ["infonce", "dcl"])
def test_a_constant_temperature_changes_no_other_gradient(name):
    image, text, _ = embeddings(1)
    learned, constant = (leanclip.create_loss(name, tau=0.05, learn_tau=learn) for learn in (True, False))
    gradients, expected = (torch.autograd.grad(loss(image, text).loss, (image, text)) for loss in (constant, learned))
    assert_close(gradients, expected, rtol=1e-12, atol=1e-15)
    assert constant.param_groups() == [] and list(constant.parameters()) == [] and len(learned.param_groups()) == 1
    assert constant.temperature().item() == 0.05
    restored = leanclip.create_loss(name, learn_tau=False)
    restored.load_state_dict(constant.state_dict())
    assert restored.temperature().item() == 0.05


def assert_close(tensors, expected, rtol=1e-9, atol=1e-14):
    torch.testing.assert_close(list(tensors), list(expected), rtol=rtol, atol=atol)


@pytest.mark.parametrize("batch", [1, 2, 33])
@pytest.mark.parametrize("name", ["infonce", "siglip"])
def test_value_and_gradients_equal_open_clips(name, batch):
    image, text, _ = embeddings(1, batch=batch)
    loss = leanclip.create_loss(name, tau=0.05)
    log_scale = torch.tensor(math.log(20.0), requires_grad=True)
    bias = torch.tensor(-10.0, requires_grad=True)
    siglip = name == "siglip"
    scalars = (log_scale.exp(), bias) if siglip else (log_scale.exp(),)
    theirs = (SigLipLoss() if siglip else ClipLoss())(image, text, *scalars)
    ours = loss(image, text).loss
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-12)
    parameters = dict(loss.named_parameters())
    names = ["temperature_rule.log_inv_tau", "bias"][: len(parameters)]
    gradients = torch.autograd.grad(ours, (image, text, *(parameters[name] for name in names)))
    assert_close(gradients, torch.autograd.grad(theirs, (image, text, log_scale, bias)[: 2 + len(names)]))


def written_objective(
    name: str, image: Tensor, text: Tensor, scale: Tensor, bias: Tensor, groups: Tensor, weights: Tensor
) -> Tensor:
    """The objective of a loss without state, term by term."""
    batch, scores, terms = len(groups), image @ text.T * scale, []
    weights = weights / weights.mean().clamp_min(1e-6)
    for i in range(batch):
        others = [j for j in range(batch) if groups[j] != groups[i]]
        if name == "siglip":
            negatives = [-F.logsigmoid(-(scores[i, j] + bias)) * (weights[i] + weights[j]) / 2 for j in others]
            terms.append(sum(negatives) - weights[i] * F.logsigmoid(scores[i, i] + bias))
        for row in (scores[i], scores[:, i]) if name != "siglip" and others else ():
            total = torch.stack([(row[j] - row[i]).exp() for j in others]).sum()
            terms.append(0.5 * weights[i] * (total if name == "dcl" else 1 + total).log())
    return torch.stack(terms).sum() / batch if terms else 0 * scores.sum()


@pytest.mark.parametrize("step", range(5))
@pytest.mark.parametrize("implementation", ["reference", "tiled"])
@pytest.mark.parametrize("name", ["infonce", "dcl", "siglip"])
def test_losses_without_state_equal_their_written_objective(name, implementation, step):
    image, text, _ = embeddings(step)
    loss, groups = leanclip.create_loss(name, tau=0.1, implementation=implementation), some_groups(step)
    weights = some_weights(step)
    scale, bias = torch.tensor(10.0, requires_grad=True), torch.tensor(-10.0, requires_grad=True)
    right = written_objective(name, image, text, scale, bias, groups, weights)
    found = loss(image, text, groups=groups, weights=weights).loss
    assert found.item() == pytest.approx(right.item(), rel=1e-12, abs=1e-15)
    by_embedding = torch.autograd.grad(right, (image, text, scale), retain_graph=True)
    expected = (*by_embedding[:2], by_embedding[2] * 10)  # for log(1/tau)
    if name == "siglip":
        expected = (*expected, *torch.autograd.grad(right, bias))
    parameters = sorted(loss.parameters(), key=lambda parameter: -parameter.item())  # log(1/tau) > bias
    assert_close(torch.autograd.grad(found, (image, text, *parameters)), expected, atol=1e-13)


def run_with(weights, name, implementation, dtype):
    """Loss, gradients and state of three steps, and the tensors that they leave."""
    loss, results = leanclip.create_loss(name, num_samples=SAMPLES, implementation=implementation), []
    for step in range(3):
        loss.set_epoch(step, 3)
        loss.zero_grad()
        image, text, ids = embeddings(step)
        image, text = (side.detach().to(dtype).requires_grad_() for side in (image, text))
        value = loss(image, text, ids, weights=weights).loss
        value.backward()
        gradients = [image.grad, text.grad, *(parameter.grad for parameter in loss.parameters())]
        results += [value.detach(), *gradients, *(table.clone() for table in loss.state_dict().values())]
    return results


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("implementation", ["reference", "tiled"])
@pytest.mark.parametrize("name", leanclip.LOSSES)
def test_weights_of_one_change_no_bit(name, implementation, dtype):
    torch.set_default_dtype(torch.float64 if dtype == torch.float64 else torch.float32)
    plain, ones = (run_with(weights, name, implementation, dtype) for weights in (None, torch.ones(BATCH)))
    assert all(torch.equal(one, other) for one, other in zip(plain, ones, strict=True))


@pytest.mark.parametrize("name", leanclip.LOSSES)
def test_weights_count_by_their_ratio_and_a_pair_of_weight_zero_stays_a_negative(name):
    image, text, ids = embeddings(0)
    weights = torch.ones(BATCH)
    weights[0] = 0
    half, whole, zero = (leanclip.create_loss(name, num_samples=SAMPLES, tau=0.1) for _ in range(3))
    gradients = []
    for loss, scale in ((half, 0.5), (whole, 1.0), (zero, 0.0)):
        loss.set_epoch(0, 1)
        value = loss(image, text, ids, weights=scale * weights).loss
        gradients.append(torch.autograd.grad(value, (image, text, *loss.parameters())))
    assert_close(gradients[0], gradients[1], rtol=1e-12)
    assert all(bool((gradient == 0).all()) for gradient in gradients[2])
    assert all(bool((side[0] != 0).any()) for side in gradients[1][:2])  # as a negative of the others
    tables = zip(half.state_dict().items(), zero.state_dict().values(), strict=True)
    assert all(torch.equal(table, other) for (key, table), other in tables if "log_u" in key)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", leanclip.LOSSES)
def test_the_lowest_temperature_with_antipodal_embeddings_stays_finite(name, dtype):
    torch.set_default_dtype(torch.float32)
    axis = normalize(torch.ones(8), dim=0)
    signs = torch.tensor([1.0, -1.0] * 8)[:, None]
    batches = [(signs * axis, -signs * axis), (signs * axis, signs * axis), (-signs * axis, axis.expand(16, 8))]
    loss = leanclip.create_loss(name, num_samples=16, tau=0.01)
    for step, (image, text) in enumerate(batches * 2):
        image, text = image.to(dtype).requires_grad_(), text.to(dtype).contiguous().requires_grad_()
        loss.set_epoch(step // 2, 3)
        loss.zero_grad()
        output = loss(image, text, torch.arange(16))
        output.loss.backward()
        numbers = [output.loss, image.grad, text.grad, *(p.grad for p in loss.parameters()), *loss.buffers()]
        assert all(number is not None and bool(torch.isfinite(number).all()) for number in numbers)
        assert all(math.isfinite(float(value)) for value in output.metrics.values() if not isinstance(value, str))


def test_a_second_backward_is_torchs_own_error():
    image, text, _ = embeddings(5)
    value = leanclip.create_loss("infonce")(image, text).loss
    value.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        value.backward()


def test_without_gradients_nothing_is_kept():
    image, text, _ = embeddings(6)
    with torch.no_grad():
        assert not leanclip.create_loss("infonce")(image, text).loss.requires_grad
    only_text = leanclip.create_loss("siglip")(image.detach(), text).loss
    only_text.backward()
    assert image.grad is None and text.grad is not None


@pytest.mark.parametrize("name", ["infonce", "siglip", "fastclip-v3"])
def test_autocast_around_the_call(name):
    torch.set_default_dtype(torch.float32)
    image, text, ids = embeddings(7)
    image, text = (side.detach().float().requires_grad_() for side in (image, text))
    loss = leanclip.create_loss(name, num_samples=SAMPLES if name == "fastclip-v3" else None)
    loss.set_epoch(0, 1)
    with torch.autocast("cpu", torch.bfloat16):
        value = loss(image, text, ids).loss
    value.backward()
    rounded = [side.detach().bfloat16().double().requires_grad_() for side in (image, text)]
    other = leanclip.create_loss(name, num_samples=SAMPLES if name == "fastclip-v3" else None).double()
    other.set_epoch(0, 1)
    truth = torch.autograd.grad(other(*rounded, ids).loss, rounded)
    for found, right in zip((image.grad, text.grad), truth, strict=True):
        assert found is not None and found.dtype == torch.float32
        assert (found - right).abs().max() <= 2**-8 * right.abs().max()  # rounded to bf16 on its way back


def test_a_compiled_caller_gets_the_same():
    torch.set_default_dtype(torch.float32)
    image, text, ids = embeddings(8)
    image, text = (side.detach().float().requires_grad_() for side in (image, text))
    loss = leanclip.create_loss("fastclip-v3", num_samples=SAMPLES)
    loss.set_epoch(0, 1)

    def call(image: Tensor, text: Tensor) -> Tensor:
        return loss(normalize(image, dim=1), normalize(text, dim=1), ids).loss * 2

    plain = torch.autograd.grad(call(image, text), (image, text))
    compiled = torch.autograd.grad(torch.compile(call, backend="aot_eager")(image, text), (image, text))
    assert_close(plain, compiled, rtol=1e-5, atol=1e-6)

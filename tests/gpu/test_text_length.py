"""Captions at their true length on a GPU: packed attention, compiled blocks and CUDA graphs, against open_clip."""

import copy
import json

import pytest
import torch
from tower_cases import FAMILIES, both_ways, captions, model_of

import leanclip
from leanclip.cli.train import run
from leanclip.data import Batch
from leanclip.training.cuda_graph import WARM_UP, CudaGraphs
from leanclip.training.step import training_step
from leanclip.training.step_context import StepContext
from run_records import losses

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def relative(found, right):
    """The error of all gradients and of both embeddings, each relative to their size."""
    errors = {}
    for group in ("image", "text", "gradients"):
        names = [group] if group in right else [name for name in right if name not in ("image", "text")]
        gap = torch.cat([(found[name].double() - right[name].double()).ravel() for name in names]).norm()
        errors[group] = float(gap / torch.cat([right[name].double().ravel() for name in names]).norm())
    return errors


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, compiling
@pytest.mark.parametrize(
    ("family", "wide", "compiled"),  # wide: heads of 32; the short kernel does not take those of 8
    [(family, wide, False) for family in FAMILIES for wide in (False, True)] + [("clip", True, True)],
)
def test_in_bf16_the_error_is_the_padded_runs(family, wide, compiled):
    base, vision, text = FAMILIES[family]
    heads = ({"width": 64, "head_width": 32}, {"width": 64, "heads": 2}) if wide else ({}, {})
    model = model_of(base, vision | heads[0], text | heads[1]).cuda().train()
    images, tokens = torch.randn(11, 3, 32, 32).cuda(), captions(eos=2 if "number" in family else 96).cuda()
    truth = both_ways(copy.deepcopy(model).double(), images.double(), tokens, ours=False)
    with torch.autocast("cuda", torch.bfloat16):
        padded = both_ways(model, images, tokens, ours=False)
        if compiled:
            model.compile_towers()
        found = both_ways(model, images, tokens, ours=True)
    allowed = relative(padded, truth)
    for group, error in relative(found, truth).items():
        assert error <= 2 * allowed[group], group


def test_in_float32_it_is_the_padded_run():
    model = model_of(*FAMILIES["clip"]).cuda().train()
    images, tokens = torch.randn(11, 3, 32, 32).cuda(), captions().cuda()
    right, found = (both_ways(model, images, tokens, ours=ours) for ours in (False, True))
    assert max(relative(found, right).values()) < 2e-6


def losses_of(name="fastclip-v3", *, graphed, patch_dropout=0.0, same_batch=False):
    """Of steps from the same weights, with captions of different lengths."""
    model = model_of({}, {"patch_dropout": patch_dropout}, {}).cuda().train()
    loss = leanclip.create_loss(name, num_samples=99).cuda()
    parameters = [*(p for p in model.parameters() if p.requires_grad), *loss.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0.0 if same_batch else 1e-3)
    autocast = torch.autocast("cuda", torch.bfloat16, enabled=False)
    graphs = CudaGraphs(model, autocast) if graphed else None
    context = StepContext(
        towers=model,
        loss=loss,
        optimizer=optimizer,
        global_batch=11,
        autocast=autocast,
        cuda_graphs=graphs,
    )
    generator = torch.Generator().manual_seed(7)
    first = torch.randint(256, (11, 3, 32, 32), dtype=torch.uint8, generator=generator)
    losses = []
    for number in range(3 * WARM_UP + 12):
        loss.set_epoch(number / 4, 6)
        pixels = first if same_batch else torch.randint(256, first.shape, dtype=torch.uint8, generator=generator)
        tokens = captions(longest=9 if same_batch else (4, 9, 17)[number % 3])
        assert model.end_of_text is not None
        ids = torch.arange(11) + 7 * (number % 5)
        batch = Batch(images=pixels, tokens=tokens, sample_ids=ids, lengths=model.end_of_text(tokens))
        losses.append(float(training_step(context, batch.to(torch.device("cuda")).pack(model.texts)).loss))
    if graphs is not None:
        assert len(graphs.graphs) == (1 if same_batch else 3)  # shapes
    return losses


@pytest.mark.parametrize("name", leanclip.LOSSES)
def test_graphed_steps_equal_eager_ones(name):
    assert losses_of(name, graphed=True) == pytest.approx(losses_of(name, graphed=False), rel=1e-3)


def test_a_graph_draws_new_random_numbers():
    found = losses_of(graphed=True, patch_dropout=0.5, same_batch=True)[WARM_UP:]
    assert len(set(found)) == len(found)


def test_a_graph_is_captured_while_the_prefetch_thread_copies(tmp_path):
    """The thread copies batches during the capture."""
    config = {
        "embed_dim": 32,
        "vision_cfg": {"image_size": 32, "layers": 2, "width": 64, "head_width": 32, "patch_size": 8},
        "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 64, "heads": 2, "layers": 2},
    }
    (tmp_path / "vit.json").write_text(json.dumps(config))
    found = {}
    for graph in ("on", "off"):
        run(
            f"--model {tmp_path}/vit.json --max-steps 12 --global-batch-size 96 --workers 2 --eval-every 0"
            f" --log-every 1 --name {graph} --graph {graph} --precision fp32 --loss fastclip-v3"
            f" --logs {tmp_path}".split()
        )
        found[graph] = losses(tmp_path / graph)
    assert len(found["on"]) == 12 and found["on"] == pytest.approx(found["off"], rel=1e-3)

"""Low-rank adapters: what they compute, what they learn, how they are saved, merged, resumed and refused."""

import json
from typing import Any

import open_clip
import pytest
import timm
import torch
from checkpoint_runs import assert_train_refused, train
from safetensors.torch import load_file, save_file
from timm.models.eva import EvaAttention
from torch import nn
from torch.nn import functional as F
from tower_cases import FAMILIES, both_ways, captions, model_of

import leanclip
from leanclip.checkpointing.storage import StoredTensors
from leanclip.models import ModelConfig, create_model
from leanclip.models.towers.layers import BLOCK
from leanclip.models.towers.lora import ADAPTED, A, B, add_adapters, is_adapter, merged
from leanclip.models.transformer_towers import Block
from refusal import assert_refused, refuses
from refusal import exit_code as command

SIDES = ("image", "text")
SQUARE = ({}, {"mlp_ratio": 1.0}, {"mlp_ratio": 1.0})  # every A can be square
CASES = ["clip", "custom blocks", "average pooling", "a text tower of its own", "attends to padding", "towers"]
MORE = {"attends to padding": ({"custom_text": True}, {}, {"no_causal_mask": True, "pool_type": "last"})}


@pytest.fixture
def built(bert):
    """A model by the name of a case; the last is a timm ViT with a text tower of transformers."""

    def build(case):
        if case != "towers":
            return model_of(*(FAMILIES | MORE | {"square": SQUARE})[case])
        torch.manual_seed(0)
        config = ModelConfig(
            model="leanclip-tiny", image_tower="timm:test_vit", text_tower=f"hf:{bert}", force_image_size=32
        )
        return create_model(config)

    return build


def adapted(model, rank=4, *, sides=SIDES):
    """With adapters that change what the model computes."""
    for side in sides:
        model.add_adapters(side, rank)
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64))
    return model


def inputs(model, rows=5):
    torch.manual_seed(2)
    tokens = (
        model.tokenizer(["a cat", "two", "a red dog a red dog", "", "a"]) if model.padding == 0 else captions(rows)
    )
    return torch.randn(rows, 3, 32, 32), tokens


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_merged_weights_compute_what_adapters_do(case, built):
    """In our pass through open_clip's blocks and in the libraries' own."""
    model, plain = built(case).eval(), built(case).eval()
    images, tokens = inputs(model)
    before = model(images, tokens)
    for side in SIDES:
        model.add_adapters(side, 4)
    torch.testing.assert_close(model(images, tokens), before, rtol=1e-5, atol=1e-6)
    model = adapted(built(case)).eval()
    plain.clip.load_state_dict(merged(model.clip.state_dict()))
    ours, right = model(images, tokens), plain(images, tokens)
    theirs = model.clip.encode_image(images, normalize=True), model.clip.encode_text(tokens, normalize=True)
    for embedding, other, truth, start in zip(ours, theirs, right, before, strict=True):
        assert torch.allclose(embedding, truth, atol=1e-5) and torch.allclose(other, truth, atol=1e-5)
        assert float((truth - start).abs().max()) > 0.01


@pytest.mark.parametrize("case", CASES)
def test_adapters_and_projections_are_trained_and_nothing_else(case, built):
    model = adapted(built(case)).train()
    model.text_features(inputs(model)[1])  # the projections can still be left out
    gradients = both_ways(model, *inputs(model), ours=True)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name in gradients if "." in name}
    plain = {name for name in trained if not is_adapter(name)}
    assert plain and all("proj" in name and "resblocks" not in name and "blocks" not in name for name in plain)
    layers = [module for module in model.modules() if type(module) in ADAPTED.values()]
    matrices = [name for name in trained if name.endswith(A)]
    assert len(layers) == len(matrices) == {"towers": 6 * 4 + 3 * 6}.get(case, 4 * 4)
    for tower in model.summary():
        assert "adapters of rank 4" in str(tower) and 0 < tower.trained < tower.parameters


@pytest.mark.parametrize("case", ["square", "towers"])
def test_a_step_on_b_is_a_step_along_the_gradient(case, built):
    """With an orthogonal A: W - r G A' A = W - r G. Matrices with more columns than rows cannot have such an A."""
    plain, model = built(case).double(), built(case).double()
    images, tokens = inputs(model)
    images = images.double()
    rank = 16
    for side in SIDES:
        model.add_adapters(side, rank)
    if case == "square":
        model = built(case).double()
        model.add_adapters("image", 24)
        model.add_adapters("text", 16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(A):
                nn.init.orthogonal_(parameter)
    gradients = both_ways(plain.train(False), images, tokens, ours=True)
    both_ways(model.train(False), images, tokens, ours=True)
    named = dict(model.named_parameters())
    torch.optim.SGD([named[name] for name in named if name.endswith(B)], lr=0.1).step()
    before, after, compared = plain.clip.state_dict(), merged(model.clip.state_dict()), 0
    for name in (name for name in before if not torch.equal(before[name], after[name])):
        if before[name].shape[1] == named[f"clip.{name.rpartition('.')[0]}.{A}"].shape[0]:
            step, gradient = before[name] - after[name], gradients[f"clip.{name}"]
            assert F.cosine_similarity(step.flatten(), gradient.flatten(), dim=0) > 1 - 1e-6, name
            assert torch.allclose(step, 0.1 * gradient, atol=1e-12), name
            compared += 1
    assert compared == {"square": 16, "towers": 3 * 5}[case]  # of the text tower all but the last of an MLP


@torch.no_grad()
def test_timm_calls_a_layer_whose_bias_is_in_parts():
    """Else it reads the matrix, and the adapters would have no effect."""
    attention: Any = EvaAttention(32, num_heads=2, qkv_fused=True, norm_layer=nn.LayerNorm).eval()
    nn.init.normal_(attention.q_bias)
    clip = nn.ModuleDict({"visual": nn.ModuleDict({"blocks": nn.ModuleList([attention])})})
    x = torch.randn(2, 5, 32)
    before = attention(x)
    add_adapters(clip, "image", 4)
    assert torch.allclose(attention(x), before, atol=1e-6)
    nn.init.normal_(attention.qkv.lora_b)
    after = attention(x)
    attention.load_state_dict(merged(attention.state_dict()) | {
        name: torch.zeros_like(value) for name, value in attention.state_dict().items() if is_adapter(name)
    })  # fmt: skip
    assert torch.allclose(attention(x), after, atol=1e-5) and not torch.allclose(before, after, atol=1e-2)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # torch's, on tracing; the next one, too
@pytest.mark.parametrize("case", ["clip", "towers"])
def test_recomputed_and_compiled_towers(case, built, monkeypatch):
    model = adapted(built(case)).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    batch = inputs(model)
    right = both_ways(model, *batch, ours=True)
    model.checkpoint_activations()
    again = both_ways(model, *batch, ours=True)
    model.checkpoint_activations(0)
    traced = lambda function: torch.compile(function, backend="eager", fullgraph=True)  # noqa: E731
    monkeypatch.setattr("leanclip.models.transformer_towers.compiled", traced)  # as it does, without a compiler
    model.compile_towers(whole=False)
    if not model.blockwise_image:
        model.clip.visual.compile(backend="eager", fullgraph=True)
    assert case == "towers" or any(isinstance(module, Block) and module.compiled for module in model.modules())
    compiled = both_ways(model, *batch, ours=True)
    for found in (again, compiled):
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)


def blocks_of(model):
    visual = model.clip.visual
    return visual.transformer.resblocks if model.blockwise_image else visual.trunk.blocks


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["clip", "custom blocks", "attends to padding", "towers"])
def test_a_step_keeps_no_copy_of_a_matrix(case, precision, built):
    model = adapted(built(case)).train()
    parameters = {parameter.data_ptr() for parameter in model.parameters()}
    named = {name: tuple(p.shape) for name, p in model.named_parameters() if "weight" in name and BLOCK.search(name)}
    shapes = {side for shape in named.values() if len(shape) == 2 for side in (shape, shape[::-1])}
    assert len(shapes) >= 4
    kept: list[tuple[int, ...]] = []

    def keep(tensor):
        if tensor.data_ptr() not in parameters:
            kept.append(tuple(tensor.shape))
        return tensor

    mixed = torch.autocast("cpu", torch.bfloat16, enabled=precision is torch.bfloat16)
    with mixed, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        image, text = model(*inputs(model))
    (image.sum() + text.sum()).backward()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)
    assert kept and not shapes & set(kept)
    hidden = {"clip": 96, "towers": 192}.get(case)  # of the image tower's MLPs: before the activation only
    assert hidden is None or sum(shape[-1] == hidden for shape in kept) == len(blocks_of(model))


def test_batch_norm_of_a_tower_with_adapters_keeps_its_averages(built):
    vision = {
        "timm_model_name": "test_vit",
        "timm_pool": "",
        "timm_proj": "linear",
        "layers": None,
        "image_size": 160,
    }
    model: Any = model_of({}, vision, {})
    model.clip.visual.trunk.fc_norm = nn.BatchNorm1d(64)
    model.add_adapters("image", 4)
    model.train()
    assert not model.clip.visual.trunk.fc_norm.training and model.clip.visual.trunk.blocks[0].training


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Of a small vision transformer, and of a text tower of one block."""
    folder = tmp_path_factory.mktemp("weights")
    assert train(folder, max_steps=1, save_every=1) == 0
    return folder / "logs/run/checkpoints/last"


LORA: dict[str, Any] = {"lora_image": 4, "lora_text": 2, "max_steps": 4, "save_every": 2, "lr": 0.01}


@pytest.fixture(scope="module")
def run(weights, tmp_path_factory):
    """Four steps in micro-batches, with an average of the weights."""
    folder = tmp_path_factory.mktemp("lora")
    assert train(folder, pretrained=weights, micro_batch=7, ema=0.5, **LORA) == 0
    return folder


def content(checkpoint):
    files = {path.name: load_file(path) for path in checkpoint.glob("*.safetensors")}
    return files | {"state": StoredTensors.open(checkpoint / "state").read()}


def assert_same(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_checkpoint_is_merged_and_has_the_adapters_beside(run, weights):
    checkpoint = run / "logs/run/checkpoints/last"
    saved, start = content(checkpoint), load_file(weights / "open_clip_model.safetensors")
    plain, adapters = saved["open_clip_model.safetensors"], saved["lora.safetensors"]
    assert plain.keys() == start.keys()
    assert open_clip.create_model(f"local-dir:{checkpoint}") is not None
    projections = ("visual.proj", "text_projection", "logit_scale")
    matrices = ("in_proj_weight", "out_proj.weight", "c_fc.weight", "c_proj.weight")
    for name in start:
        changed = not torch.equal(plain[name], start[name])
        assert changed == (name in projections or name.endswith(matrices)), name
    assert sum(value.numel() for value in adapters.values()) < 0.1 * sum(value.numel() for value in start.values())
    torch.testing.assert_close(merged(start | adapters), plain, rtol=0, atol=0)
    tower = "model.clip."
    own = merged({
        name.removeprefix(tower): value for name, value in saved["state"].items() if name.startswith(tower)
    })  # fmt: skip
    trained = saved["trained.safetensors"]
    assert all(torch.equal(own[name], trained[name]) for name in own if not name.startswith("logit_"))
    assert any(not torch.equal(plain[name], trained[name]) for name in own)  # the former is the average


def test_killed_and_resumed_is_uninterrupted(run, weights, tmp_path):
    checkpoint = run / "logs/run/checkpoints/step_00000002"
    assert train(tmp_path, resume=checkpoint, pretrained=weights, micro_batch=7, ema=0.5, **LORA) == 0
    assert_same(*(content(folder / "logs/run/checkpoints/step_00000004") for folder in (run, tmp_path)))
    ranks = LORA | {"lora_text": 4}
    assert train(tmp_path, resume=checkpoint, pretrained=weights, micro_batch=7, ema=0.5, **ranks) == 2


def test_adapters_are_exported_merged_and_started_from(run, weights, tmp_path, capsys):
    adapters, out = tmp_path / "adapters.safetensors", tmp_path / "merged.safetensors"
    assert command("export", run / "logs/run", adapters, "--format", "lora") == 0
    assert command("export", weights, out, "--lora", adapters) == 0
    start = tmp_path / "start.safetensors"
    assert command("export", run / "logs/run/checkpoints/start", start, "--lora", adapters) == 0
    trained = load_file(run / "logs/run/checkpoints/last/open_clip_model.safetensors")
    assert_same({"": load_file(out), "start": load_file(start)}, {"": trained, "start": trained})
    assert leanclip.load(out)[0].temperature() == leanclip.load(run / "logs/run")[0].temperature()

    start = {"pretrained": weights, "lora_weights": adapters} | LORA
    assert train(tmp_path, **start | {"max_steps": 1, "lr": 1e-30}) == 0
    again = load_file(tmp_path / "logs/run/checkpoints/last/open_clip_model.safetensors")
    towers = [name for name in trained if not name.startswith("logit_")]
    assert all(torch.allclose(again[name], trained[name], atol=1e-12) for name in towers)
    capsys.readouterr()
    assert train(tmp_path, resume="auto", **start | {"max_steps": 2, "lr": 1e-30}) == 0

    def refused(code, **changed):
        folder = tmp_path / "refused"
        folder.mkdir(exist_ok=True)
        line = assert_train_refused(code, folder, capsys, **start | changed)
        assert not (folder / "logs/run/checkpoints").exists()
        return line

    assert "--lora-image 4 --lora-text 2" in refused("lora.other_rank", lora_image=2)
    refused("lora.other_weights", pretrained=run / "logs/run")
    refused("lora.not_adapters", lora_weights=weights / "open_clip_model.safetensors")
    refused("lora.not_found", lora_weights=tmp_path / "absent")
    refused("config.bad_value", lora_image=0, lora_text=0)
    damaged = load_file(adapters) | {"visual.ln_pre.lora_a": torch.zeros(2, 3)}
    save_file(damaged, tmp_path / "damaged.safetensors", metadata={"leanclip_lora": "0"})
    refused("lora.other_weights", lora_weights=tmp_path / "damaged.safetensors")
    assert_refused("lora.not_found", ["export", weights, tmp_path / "x.safetensors", "--format", "lora"], capsys)


def test_towers_from_elsewhere_are_trained_with_adapters(bert, tmp_path, capsys):
    """A timm ViT and a text tower of transformers, one with adapters and one trained, from weights of their own."""
    torch.manual_seed(1)
    save_file(timm.create_model("test_vit", pretrained=False).state_dict(), tmp_path / "vit.safetensors")
    flags: dict[str, Any] = {
        "model": "leanclip-tiny", "image_tower": "timm:test_vit", "text_tower": f"hf:{bert}", "pretrained_text": bert,
        "pretrained_image": tmp_path / "vit.safetensors", "force_image_size": 32, "lora_image": 8, "max_steps": 2,
        "save_every": 1, "global_batch_size": 8,
    }  # fmt: skip
    assert train(tmp_path, **flags, dry_run=True) == 0
    shown = capsys.readouterr().out
    assert "adapters of rank 8" in shown and "--lr-image" not in shown  # --lr is given
    assert train(tmp_path, **flags) == 0
    checkpoints = tmp_path / "logs/run/checkpoints"
    whole = content(checkpoints / "last")
    saved = whole["open_clip_model.safetensors"]
    assert not any(is_adapter(name) for name in saved)
    assert {name for name in whole["lora.safetensors"] if name.startswith("text.")} >= {
        name for name in saved if name.startswith("text.transformer.encoder")
    }
    assert leanclip.load(tmp_path / "logs/run")[0].clip.visual.image_size == (32, 32)
    assert train(tmp_path, **flags | {"resume": checkpoints / "step_00000001"}) == 0
    assert_same(content(checkpoints / "last"), whole)
    facts = json.loads((tmp_path / "logs/run/run.json").read_text())
    assert facts["parameters"] == sum(value.numel() for value in saved.values() if value.is_floating_point())


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"lock_image": True}, "config.bad_value"),
        ({"lora_image": -1}, "config.bad_value"),
        ({"pretrained": None}, "lora.without_weights"),
        ({"lora_image": 33}, "lora.rank_too_large"),
    ],
)
def test_what_cannot_be_done_is_one_line(changed, code, weights, tmp_path, capsys):
    flags = {name: value for name, value in (LORA | {"pretrained": weights} | changed).items() if value is not None}
    line = assert_train_refused(code, tmp_path, capsys, **flags)
    assert "lora-image" in line.replace("_", "-")
    assert not (tmp_path / "logs/run/checkpoints").exists()


@pytest.mark.parametrize("case", ["resnet", "timm"])
def test_a_tower_without_linear_layers_is_refused(case):
    with refuses("lora.no_layers", "--lora-image 4"):
        model_of(*FAMILIES[case]).add_adapters("image", 4)

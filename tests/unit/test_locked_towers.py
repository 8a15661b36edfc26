"""Locked towers: the trunk is frozen and runs as in evaluation, the projection is trained, and a summary says so."""

import copy
import json

import open_clip
import pytest
import torch
from checkpoint_runs import job_of
from tower_cases import FAMILIES, captions, model_of

from leanclip.models import ModelConfig, create_model
from leanclip.models.build import build_model
from leanclip.models.towers.layers import layer_rates, tower_layers
from leanclip.optim import OptimConfig, scheduled, set_learning_rate, weight_decay_groups
from refusal import refuses

COCA = {
    "embed_dim": 16,
    "custom_text": True,
    "vision_cfg": {"image_size": 16, "layers": 1, "width": 16, "head_width": 8, "patch_size": 8,
                   "attentional_pool": True, "attn_pooler_heads": 2, "output_tokens": True},
    "text_cfg": {"context_length": 12, "vocab_size": 97, "width": 16, "heads": 2, "layers": 1, "embed_cls": True,
                 "output_tokens": True},
    "multimodal_cfg": {"context_length": 12, "vocab_size": 97, "width": 16, "heads": 2, "layers": 1,
                       "attn_pooler_heads": 2},
}  # fmt: skip


def hugging_face(bert, **text):
    text = {"hf_model_name": str(bert), "hf_tokenizer_name": str(bert), "hf_proj_type": "linear",
            "hf_pooler_type": "mean_pooler", "context_length": 12} | text  # fmt: skip
    vision = {"image_size": 32, "timm_model_name": "test_efficientnet", "timm_pool": "", "timm_proj": "linear"}
    return build_model("small", {"embed_dim": 12, "vision_cfg": vision, "text_cfg": text}, None, {})


def trained(model):
    return {name for name, parameter in model.clip.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("family", ["clip", "a text tower of its own", "resnet", "timm", "hugging face"])
def test_projections_of_locked_towers_are_trained(family, request):
    model = hugging_face(request.getfixturevalue("bert")) if family == "hugging face" else model_of(*FAMILIES[family])
    projections = {name for side in ("image", "text") for name in tower_layers(model.clip, side).projection}
    assert len(projections) >= 2
    model.lock("image")
    model.lock("text")
    assert trained(model) == projections
    pixels = torch.randn(4, 3, *model.image_size)
    tokens = model.tokenizer(["a cat", "two"] * 2) if family == "hugging face" else captions(4)
    model.train()
    first, second = model(pixels, tokens), model(pixels, tokens)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])  # no dropout, no moving averages
    (first[0].sum() + first[1].sum()).backward()
    assert {name for name, parameter in model.clip.named_parameters() if parameter.grad is not None} == projections
    summary = model.summary()
    assert all(tower.frozen_layers == tower.layers > 0 and tower.weights is None for tower in summary)
    assert sum(tower.trained for tower in summary) == sum(model.clip.get_parameter(p).numel() for p in projections)


@pytest.mark.filterwarnings("ignore:Importing from timm.models.helpers")  # by open_clip
@pytest.mark.parametrize("family", ["clip", "a text tower of its own", "timm"])
@pytest.mark.parametrize("unlocked", [0, 1, 2, 3])
def test_unlocked_layers_are_counted_as_open_clip_does(family, unlocked):
    model = model_of(*FAMILIES[family])
    theirs = copy.deepcopy(model)
    theirs.clip.lock_image_tower(unlocked_groups=unlocked)
    theirs.clip.lock_text_tower(unlocked_layers=unlocked)
    projections = {name for side in ("image", "text") for name in tower_layers(model.clip, side).projection}
    model.lock("image", unlocked)
    model.lock("text", unlocked)
    assert trained(model) == trained(theirs) | projections


def test_the_last_layers_of_other_towers_can_be_unlocked(bert):
    """open_clip's ResNets and BERT refuse that with an assertion or a KeyError."""
    resnet, text = model_of(*FAMILIES["resnet"]), hugging_face(bert)
    resnet.lock("image", 1)
    text.lock("text", 2)
    blocks = {name.split(".")[1] for name in trained(resnet) if name.startswith("visual.")}
    assert blocks == {"layer4", "attnpool"}
    layers = {name.partition(".layer.")[2][:1] for name in trained(text) if name.startswith("text.transformer.")}
    assert layers == {"1", "2"}
    text.train()
    modes = {name: module.training for name, module in text.clip.text.named_modules() if name.endswith("dropout")}
    assert not modes["transformer.embeddings.dropout"] and not modes["transformer.encoder.layer.0.output.dropout"]
    assert modes["transformer.encoder.layer.2.output.dropout"]  # an unlocked layer trains as usual
    assert str(text.summary()[1]).endswith("2 of 4 layers frozen, its projection trained")


def test_nothing_left_to_train_is_refused():
    base, vision, text = FAMILIES["its own, no projection"]
    vision = {"timm_model_name": "test_vit", "timm_pool": "", "timm_proj": "none", "image_size": 160}
    model = model_of(base | {"embed_dim": 64}, vision | {"layers": None}, text | {"width": 64})
    model.lock("image")
    with refuses("model.nothing_to_train", "--lock-text"):
        model.lock("text")


def test_the_summary_names_the_weights(tmp_path):
    (tmp_path / "small.json").write_text(json.dumps(open_clip.get_model_config("ViT-S-32-alt")))
    model = create_model(ModelConfig(model=str(tmp_path / "small.json")))
    assert [tower.weights for tower in model.summary()] == [None, None]
    torch.save(model.clip.state_dict(), tmp_path / "start.pt")
    model = create_model(ModelConfig(model=str(tmp_path / "small.json"), pretrained=str(tmp_path / "start.pt")))
    model.lock("image", 2)
    lines = [str(tower) for tower in model.summary()]
    assert all(f"weights from {tmp_path}/start.pt" in line for line in lines)
    assert "12 of 13 layers frozen, its projection trained" in lines[0] and "frozen" not in lines[1]


def test_the_decoder_of_coca_is_counted_and_not_trained():
    model = build_model("coca", COCA, None, {})
    decoder = sum(parameter.numel() for parameter in model.clip.text_decoder.parameters())
    assert model.untrained_decoder == decoder > 0
    assert not any(name.startswith("text_decoder") for name in trained(model))
    assert sum(tower.parameters for tower in model.summary()) + decoder + 1 == sum(
        parameter.numel() for parameter in model.clip.parameters()
    )
    assert model_of({}, {}, {}).untrained_decoder == 0


@pytest.mark.parametrize("family", ["clip", "resnet", "timm", "hugging face"])
def test_learning_rates_by_tower_and_layer(family, request):
    model = hugging_face(request.getfixturevalue("bert")) if family == "hugging face" else model_of(*FAMILIES[family])
    rates = layer_rates(model.clip, base=1.0, image=0.5, text=None, head=8.0, decay=0.5)
    image, text = tower_layers(model.clip, "image"), tower_layers(model.clip, "text")
    assert {rates[name] for name in image.projection + text.projection} == {8.0}
    for number, layer in enumerate(image.trunk):
        assert {rates[name] for name in layer} <= {0.5 * 0.5 ** (len(image.trunk) - 1 - number)}
    assert not any(name in rates for name in text.trunk[-1])  # that of the optimizer
    assert {rates[name] for name in text.trunk[0]} == {0.5 ** (len(text.trunk) - 1)}
    groups = weight_decay_groups(model, 0.1, {f"clip.{name}": rate for name, rate in rates.items()})
    names = {id(parameter): name for name, parameter in model.clip.named_parameters()}
    grouped = {names[id(p)]: group.get("lr", 1.0) for group in groups for p in group["params"]}
    assert grouped == {name: rates.get(name, 1.0) for name in trained(model)}
    assert all((p.ndim >= 2) == (group["weight_decay"] == 0.1) for group in groups for p in group["params"])
    assert len(weight_decay_groups(model, 0.1, {})) == 2


def test_learning_rates_follow_one_schedule(tmp_path):
    settings = {"lr": 0.01, "lr_image": 0.001, "lr_head": 0.1, "layer_decay": 0.5, "warmup": 2}
    job = job_of(tmp_path, **settings)
    optimizer = job.context.optimizer
    assert {group["peak_lr"] for group in optimizer.param_groups} >= {0.01, 0.005, 0.001, 0.0005, 0.1}
    set_learning_rate(optimizer, scheduled(job.config.optim, 0, steps=8, steps_per_epoch=5), peak=0.01)
    following = [group for group in optimizer.param_groups if group.get("follows_schedule", True)]
    assert len(following) > 5 and all(group["lr"] == pytest.approx(group["peak_lr"] / 2) for group in following)
    with pytest.raises(ValueError, match="layer_decay"):
        OptimConfig(layer_decay=1.5)

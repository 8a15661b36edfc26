"""Texts at their true length, and towers run block by block, against open_clip's own forward pass."""

import copy
import pickle

import pytest
import torch
from torch.nn import functional as F
from tower_cases import FAMILIES, both_ways, captions, model_of

from leanclip.models import model_config_of
from leanclip.models.text_length import FEWER, MANY, STEPS, EndOfText, Texts, layout, rounded

PADDED = {
    "class token": ({"custom_text": True}, {"embed_cls": True}),
    "not causal": ({}, {"no_causal_mask": True}),
    "pooling 'last'": ({"custom_text": True}, {"pool_type": "last"}),
    "all its tokens": ({"custom_text": True}, {"output_tokens": True}),
}


@pytest.mark.parametrize(
    ("family", "dtype"),
    [(family, torch.float32) for family in FAMILIES] + [("clip", torch.float64), ("custom blocks", torch.float64)],
)
def test_embeddings_and_gradients_equal_open_clips(family, dtype):
    model = model_of(*FAMILIES[family]).to(dtype).train()
    assert model.padding_reason is None and model.end_of_text is not None
    images = torch.randn(11, 3, 32, 32, dtype=dtype)
    tokens = captions(eos=2 if model.end_of_text.eos == 2 else 96)
    names = list(model.state_dict())
    expected = both_ways(model, images, tokens, ours=False)
    blockwise = both_ways(model, images, tokens, ours=True)
    assert set(blockwise) == set(expected) and list(model.state_dict()) == names
    truth = both_ways(copy.deepcopy(model).double(), images.double(), tokens, ours=False)
    scale = max(float(value.norm()) for name, value in expected.items() if name not in ("image", "text"))
    for name, value in expected.items():
        # Relative to the tensor, and for gradients that are almost nothing (a bias before a norm) to all of them.
        size = max(float(value.norm()), 1e-2 * scale)
        own_error = float((value.double() - truth[name]).norm())  # many norms in a row round more
        allowed = max((1e-6 if dtype == torch.float32 else 1e-13) * size, 2 * own_error)
        assert float((blockwise[name] - value).norm()) <= allowed, name


@pytest.mark.parametrize("reason", PADDED)
def test_other_text_towers_are_padded_with_a_reason(reason):
    base, text = PADDED[reason]
    model = model_of(base, {}, text)
    assert model.end_of_text is None and reason in str(model.padding_reason)
    tokens = captions()
    assert model.texts(tokens) is tokens
    if not text.get("output_tokens"):
        assert torch.equal(model.encode_text(tokens), model.clip.encode_text(tokens, normalize=True))


def test_the_families_of_open_clip_that_run_without_padding():
    """By the text towers of its model configs, built small."""
    accepted = {
        "ViT-B-32": True, "RN50": True, "EVA02-B-16": True, "convnext_base": True, "ViT-H-14-worldwide": True,
        "PE-Core-B-16": True, "MobileCLIP-B": True, "ViT-B-16-SigLIP": False, "ViT-L-14-CLIPA": False,
        "coca_ViT-B-32": False, "MobileCLIP-S1": False,
    }  # fmt: skip
    for name, accepts in accepted.items():
        config = model_config_of(name)[1]
        text = config["text_cfg"] | {"context_length": 19, "vocab_size": 97, "width": 16, "heads": 2, "layers": 1}
        text.pop("hf_tokenizer_name", None)
        base = {"custom_text": True} if config.get("custom_text") else {}
        model = model_of(base, {}, {key: value for key, value in text.items() if key != "tokenizer_kwargs"})
        assert (model.end_of_text is not None) == accepts, name


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_rounding_up_keeps_padding_that_changes_nothing(rows):
    model = model_of({}, {}, {}).double()
    tokens = captions(rows)
    lengths = EndOfText(None)(tokens)
    exact, wide = Texts.pack(tokens, lengths), Texts.pack(tokens, lengths, few_sizes=True)
    assert len(exact.tokens) == int(lengths.sum())
    assert len(wide.tokens) == min(rounded(int(lengths.sum())), tokens.numel())
    for texts in (exact, wide):
        assert torch.equal(texts.tokens[texts.ends], tokens[torch.arange(rows), lengths - 1])
        assert torch.equal(texts.tokens, tokens[texts.packing.rows, texts.packing.positions])
    assert torch.allclose(model.encode_text(wide), model.encode_text(exact), rtol=1e-12, atol=1e-14)


def test_rounded_sizes_are_few():
    assert len({rounded(total) for total in range(16384, 32769)}) == STEPS + 1
    assert len({rounded(total) for total in range(1024, 2049)}) == FEWER + 1
    assert all(total <= rounded(total) <= total * (1 + 1 / FEWER) for total in range(1, MANY))
    assert all(total <= rounded(total) <= total * (1 + 1 / STEPS) for total in range(MANY, 40_000, 7))
    assert layout(torch.tensor([3, 2]), width=4, few_sizes=False).table.tolist() == [[0, 3, 5], [0, 2, 4]]


def test_texts_end_at_the_first_end_token():
    tokens = torch.tensor([[5, 2, 7, 2, 0], [1, 9, 9, 3, 0]])
    assert EndOfText(2)(tokens).tolist() == [2, 1]  # without one open_clip pools the first token
    assert EndOfText(None)(tokens).tolist() == [3, 2]
    assert pickle.loads(pickle.dumps(EndOfText(2))) == EndOfText(2)


@pytest.mark.parametrize("blocks", [None, 0, 1, 2])
def test_recomputed_blocks_change_nothing(blocks):
    model = model_of({}, {}, {}).double().train()
    images, tokens = torch.randn(11, 3, 32, 32, dtype=torch.float64), captions()
    expected = both_ways(model, images, tokens, ours=True)
    model.checkpoint_activations(blocks)
    ran = []
    for block in model.clip.visual.transformer.resblocks:
        block.ln_1.register_forward_hook(lambda *_: ran.append(1))
    blockwise = both_ways(model, images, tokens, ours=True)
    assert len(ran) == 2 + (2 if blocks is None else blocks)  # the recomputed ones run twice
    torch.testing.assert_close(blockwise, expected, rtol=0, atol=0)


def test_patch_dropout_draws_as_open_clip_does():
    model = model_of({}, {"patch_dropout": 0.5}, {}).double().train()
    images = torch.randn(7, 3, 32, 32, dtype=torch.float64)
    torch.manual_seed(3)
    expected = model.clip.encode_image(images, normalize=True)
    torch.manual_seed(3)
    assert torch.allclose(model.encode_image(images), expected, rtol=1e-10, atol=1e-12)
    torch.manual_seed(4)
    assert not torch.allclose(model.encode_image(images), expected, atol=1e-3)


def test_pixels_and_odd_sizes():
    """uint8 is normalised; pixels that do not fill a patch are dropped, as by the convolution."""
    model = model_of({}, {"image_size": 35}, {}).eval()
    pixels = torch.randint(256, (3, 3, 35, 35), dtype=torch.uint8)
    images = pixels.float().div(255).sub(model.image_mean).div(model.image_std)
    expected = model.clip.encode_image(images, normalize=True)
    assert torch.allclose(model.encode_image(pixels), expected, atol=1e-6)


def test_a_copied_model_is_independent():
    model = model_of({}, {}, {})
    tokens = captions()
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.clip.transformer.parameters():
            parameter.mul_(1.1)
    assert not torch.allclose(other.encode_text(tokens), model.encode_text(tokens), atol=1e-4)
    assert torch.allclose(other.encode_text(tokens), F.normalize(other.clip.encode_text(tokens), dim=-1), atol=1e-6)


def test_compiled_blocks_compute_the_same_and_share_their_code(monkeypatch):
    from leanclip.models import transformer_towers as towers

    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(towers, "compiled", {towers.run_block: torch.compile(towers.run_block, backend=backend)}.get)
    model = model_of({}, {"layers": 4}, {"layers": 4}).double().train()
    images, tokens = torch.randn(11, 3, 32, 32, dtype=torch.float64), captions()
    expected = both_ways(model, images, tokens, ours=True)
    for module in model.modules():
        if isinstance(module, towers.Block):
            module.compiled = True
    blockwise = both_ways(model, images, tokens, ours=True)
    assert len(graphs) == 4  # each tower's blocks and its last
    both_ways(model, images, tokens, ours=True)
    assert len(graphs) == 4
    torch.testing.assert_close(blockwise, expected, rtol=1e-10, atol=1e-13)

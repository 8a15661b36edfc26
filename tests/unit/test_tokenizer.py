"""The tokenizer with a cache of words gives open_clip's tokens for any text."""

import pickle
import random

import open_clip
import pytest
import torch

from leanclip.data import Shards
from leanclip.data.datasets import BUNDLED
from leanclip.models.tokenizer import CachedEncoder, create_tokenizer, with_cache

SPECIAL = (
    "", "   ", "A dog.", "two  dogs\tand a\ncat ", "it's they're I'VE don't", "a&amp;b", "fish &amp;amp; chips",
    "AT&T", "<start_of_text> a dog <end_of_text>", "<START_OF_TEXT>", "caf\u00e9", "\u201cquoted\u201d", "\ufb01sh",
    "\uff21\uff22", "na\u00c3\u00afve", "\x1b[36mblue\x1b[0m", "a\r\nb", "a\x00b", "\u0130stanbul", "\U0001f436 dog",
    "3d 12,345.67 #1!!", "e\u0301", "x" * 500, "&lt;b&gt;", "&;", "&#38;#38;", "a\u00a0b", "a\x1cb", "a\u2028b",
    "\u05e9\u05dc\u05d5\u05dd", "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35",
)  # fmt: skip


LETTERS = "aAzZ09 .,'!&;#<>_-\t\n\"" + "\u00e9\u00c3\u2019\u3000"


@pytest.fixture(scope="module")
def tokenizers():
    return create_tokenizer("ViT-B-32"), open_clip.get_tokenizer("ViT-B-32")


def texts_of(kind):
    if kind == "bundled":
        source = Shards(str(BUNDLED / "val-*.tar"))
        return [caption for index in range(len(source)) for caption in source.captions(index)]
    if kind == "ascii":  # ftfy must not change any text that counts as plain
        return [text for code in range(128) for text in (chr(code), f"a{chr(code)}b", chr(code) * 3)]
    draw = random.Random(0)
    return ["".join(draw.choice(LETTERS) for _ in range(draw.randrange(40))) for _ in range(3000)]


@pytest.mark.parametrize("kind", ["special", "bundled", "ascii", "random"])
def test_the_tokens_are_open_clips(tokenizers, kind):
    ours, theirs = tokenizers
    texts = list(SPECIAL) if kind == "special" else texts_of(kind)
    assert len(texts) > 30
    for text in texts:
        for _ in range(2):  # the second time from the cache
            assert ours.encode(text) == theirs.encode(text), repr(text)
    assert torch.equal(ours(texts), theirs(texts))


def test_the_cache_is_pickled_and_bounded(tokenizers, monkeypatch):
    ours, theirs = tokenizers
    assert isinstance(ours.encode, CachedEncoder)
    assert pickle.loads(pickle.dumps(ours)).encode("a dog") == theirs.encode("a dog")
    monkeypatch.setattr("leanclip.models.tokenizer.CACHED_WORDS", 2)
    small = CachedEncoder(ours)
    assert small("one two three two one three") == theirs.encode("one two three two one three")
    assert len(small.cache) == 2


def test_other_tokenizers_are_unchanged():
    """Such as one that removes punctuation."""
    tokenizer = open_clip.tokenizer.SimpleTokenizer(clean="canonicalize")
    assert with_cache(tokenizer) is tokenizer and not isinstance(tokenizer.encode, CachedEncoder)

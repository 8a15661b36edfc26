"""The tokenizer that remembers words gives open_clip's tokens, whatever the text."""

import pickle
import random

import open_clip
import pytest
import torch

from leanclip.data import Shards
from leanclip.data.datasets import BUNDLED
from leanclip.models.tokenizer import CachedEncoder, create_tokenizer, with_cache

TEXTS = (
    "", "   ", "A dog.", "two  dogs\tand a\ncat ", "it's they're I'VE don't", "a&amp;b", "fish &amp;amp; chips",
    "AT&T", "<start_of_text> a dog <end_of_text>", "<START_OF_TEXT>", "caf\u00e9", "\u201cquoted\u201d", "\ufb01sh",
    "\uff21\uff22", "na\u00c3\u00afve", "\x1b[36mblue\x1b[0m", "a\r\nb", "a\x00b", "\u0130stanbul", "\U0001f436 dog",
    "3d 12,345.67 #1!!", "e\u0301", "x" * 500, "&lt;b&gt;", "&;", "&#38;#38;", "a\u00a0b", "a\x1cb", "a\u2028b",
    "\u05e9\u05dc\u05d5\u05dd", "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35",
)  # fmt: skip


@pytest.fixture(scope="module")
def both():
    return create_tokenizer("ViT-B-32"), open_clip.get_tokenizer("ViT-B-32")


@pytest.mark.parametrize("text", TEXTS)
def test_the_tokens_are_open_clips(both, text):
    ours, theirs = both
    for _ in range(2):  # the second time from memory
        assert ours.encode(text) == theirs.encode(text)
    assert torch.equal(ours([text, "a dog"]), theirs([text, "a dog"]))


def test_of_random_texts_too(both):
    ours, theirs = both
    draw = random.Random(0)
    letters = "aAzZ09 .,'!&;#<>_-\t\n\"" + "\u00e9\u00c3\u2019\u3000"
    for _ in range(3000):
        text = "".join(draw.choice(letters) for _ in range(draw.randrange(40)))
        assert ours.encode(text) == theirs.encode(text), repr(text)


def test_of_every_character_of_ascii(both):
    """What is taken for plain must be what ftfy leaves alone."""
    ours, theirs = both
    for code in range(128):
        for text in (chr(code), f"a{chr(code)}b", chr(code) * 3):
            assert ours.encode(text) == theirs.encode(text), repr(text)


def test_of_the_bundled_captions(both):
    ours, theirs = both
    source = Shards(str(BUNDLED / "val-*.tar"))
    captions = [caption for index in range(len(source)) for caption in source.captions(index)]
    assert len(captions) > 50
    assert torch.equal(ours(captions), theirs(captions))


def test_it_travels_to_other_processes_and_forgets_what_is_too_much(both, monkeypatch):
    ours, theirs = both
    assert isinstance(ours.encode, CachedEncoder)
    there = pickle.loads(pickle.dumps(ours))
    assert there.encode("a dog") == theirs.encode("a dog")
    monkeypatch.setattr("leanclip.models.tokenizer.CACHED_WORDS", 2)
    few = CachedEncoder(ours)
    assert few("one two three two one three") == theirs.encode("one two three two one three")
    assert len(few.cache) == 2


def test_others_are_left_alone():
    """Such as one that leaves punctuation out."""
    tokenizer = open_clip.tokenizer.SimpleTokenizer(clean="canonicalize")
    assert with_cache(tokenizer) is tokenizer and not isinstance(tokenizer.encode, CachedEncoder)

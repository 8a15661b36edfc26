"""Tokenizers: open_clip's, with a cache of words, and a counter of the tokens of captions."""

import functools
from typing import Any

from leanclip.errors import UserError
from leanclip.models.open_clip_api import SimpleTokenizer, get_clean_fn, model_config_of, open_clip, registered
from leanclip.models.untrusted import without_code

CACHED_WORDS = 1 << 17


def create_tokenizer(model: str) -> Any:
    with registered(model_config_of(model)[1]) as name:
        try:
            return with_cache(open_clip.get_tokenizer(name))
        except (OSError, ValueError) as error:  # it is on the hub, which cannot be reached
            raise UserError(
                f"cannot load the tokenizer of {model}: {without_code(error)}", code="model.no_tokenizer"
            ) from error


def with_cache(tokenizer: Any) -> Any:
    """The same tokenizer, faster where it is open_clip's own in lower case."""
    if type(tokenizer) is SimpleTokenizer and tokenizer.clean_fn is get_clean_fn("lower"):
        tokenizer.encode = CachedEncoder(tokenizer)
    return tokenizer


class CachedEncoder:
    """A replacement for `tokenizer.encode` that caches the tokens of words: captions repeat few words often.

    The tokenizer must be one that converts to lower case. Neither ftfy nor HTML unescaping changes a caption of
    printable ASCII without `&`: only white space and case remain to be normalised.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.cache: dict[str, list[int]] = {}

    def __call__(self, text: str) -> list[int]:
        plain = text.isascii() and text.isprintable() and "&" not in text
        text = " ".join(text.split()).lower() if plain else self.tokenizer.clean_fn(text)
        tokens: list[int] = []
        for word in self.tokenizer.pat.findall(text):
            tokens += self.cache.get(word) or self._encode_word(word)
        return tokens

    def _encode_word(self, word: str) -> list[int]:
        letters = "".join(self.tokenizer.byte_encoder[byte] for byte in word.encode())
        tokens = [self.tokenizer.encoder[piece] for piece in self.tokenizer.bpe(letters).split(" ")]
        if len(self.cache) < CACHED_WORDS:
            self.cache[word] = tokens
        return tokens


_one_tokenizer = functools.lru_cache(maxsize=1)(create_tokenizer)


class TokenCounter:
    """Counts the tokens of a caption, start and end included, without truncation. Pickled by the model's name."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.context_length: int = model_config_of(model)[1]["text_cfg"].get("context_length", 77)

    def __call__(self, text: str) -> int:
        return token_count(_one_tokenizer(self.model), text)


def token_count(tokenizer: Any, text: str) -> int:
    """Start and end included, without truncation."""
    inner = getattr(tokenizer, "tokenizer", None)  # transformers' own, in open_clip's wrapper
    if inner is not None:
        return len(inner(tokenizer.clean_fn(text)).input_ids)
    return len(tokenizer.encode(text)) + 2

"""open_clip's own tokenizer at a fraction of its time: captions are mostly plain words that were met before."""

from typing import Any

MOST = 1 << 17  # words to remember


class Words:
    """Does what `encode` of the tokenizer does, which must be one that makes text lower case.

    A caption of printable ASCII without `&` holds nothing that ftfy would mend or HTML unescape: only its white space
    and its case are left to change.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.known: dict[str, list[int]] = {}

    def __call__(self, text: str) -> list[int]:
        plain = text.isascii() and text.isprintable() and "&" not in text
        text = " ".join(text.split()).lower() if plain else self.tokenizer.clean_fn(text)
        found: list[int] = []
        for word in self.tokenizer.pat.findall(text):
            found += self.known.get(word) or self._learn(word)
        return found

    def _learn(self, word: str) -> list[int]:
        letters = "".join(self.tokenizer.byte_encoder[byte] for byte in word.encode())
        tokens = [self.tokenizer.encoder[piece] for piece in self.tokenizer.bpe(letters).split(" ")]
        if len(self.known) < MOST:
            self.known[word] = tokens
        return tokens

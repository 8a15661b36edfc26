"""How long captions are for a model."""

from typing import Any

from leanclip.models.two_tower import create_tokenizer, model_config_of


class TokenCounter:
    """Counts the tokens of a text, start and end included and nothing cut off. Pickled by name."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.context_length: int = model_config_of(model)[1]["text_cfg"].get("context_length", 77)
        self._tokenizer: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tokenizer": None}

    def __call__(self, text: str) -> int:
        if self._tokenizer is None:
            self._tokenizer = create_tokenizer(self.model)
        inner = getattr(self._tokenizer, "tokenizer", None)  # transformers' own, in open_clip's wrapper
        if inner is not None:
            return len(inner(self._tokenizer.clean_fn(text)).input_ids)
        return len(self._tokenizer.encode(text)) + 2

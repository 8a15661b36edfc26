"""The last layer of a tower, from its features to the space that both towers share."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from leanclip.models.text_length import text_tower

CALLED = ("head", "proj")  # of timm's and transformers' towers, which call it in any case


class Projection:
    """A tower's projection: a matrix, a module or None, which is the attribute `name` of `owner`."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name

    @classmethod
    def of_images(cls, clip: Any) -> "Projection | None":
        head = getattr(clip.visual, "head", None)  # an empty one: the projection is inside timm's trunk
        return None if head is not None and not len(head) else cls._first(clip.visual, ("head", "proj"))

    @classmethod
    def of_texts(cls, clip: Any) -> "Projection | None":
        return cls._first(text_tower(clip), ("text_projection", "proj"))

    @classmethod
    def _first(cls, owner: Any, names: tuple[str, ...]) -> "Projection | None":
        return next((cls(owner, name) for name in names if hasattr(owner, name)), None)

    def __call__(self, features: Tensor) -> Tensor:
        matrix = getattr(self.owner, self.name)
        if matrix is None:
            return features
        return matrix(features) if isinstance(matrix, nn.Module) else features @ matrix

    @property
    def width(self) -> int:
        """Of the features."""
        matrix = getattr(self.owner, self.name)
        if isinstance(matrix, nn.Module):
            return next(layer.in_features for layer in matrix.modules() if isinstance(layer, nn.Linear))
        return matrix.shape[0]

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Inside, the tower returns its features."""
        matrix = getattr(self.owner, self.name)
        setattr(
            self.owner, self.name, nn.Identity() if self.name in CALLED and isinstance(matrix, nn.Module) else None
        )
        try:
            yield
        finally:
            setattr(self.owner, self.name, matrix)

"""Whether an image is whole, and its size, at a fraction of the cost of decoding it for training."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from leanclip.data.decode import open_image
from leanclip.data.source import BrokenSample
from leanclip.errors import first_line


class ImageFacts(NamedTuple):
    width: int
    height: int
    format: str
    """As Pillow calls it: JPEG, PNG, WEBP, ..."""


def examine(content: bytes) -> ImageFacts:
    """Decode an image, a JPEG at an eighth of its size, and say what it is. BrokenSample if that fails."""
    image = open_image(content)
    facts = ImageFacts(*image.size, image.format or "")
    with decoding():
        image.draft(None, (1, 1))
        image.load()
    return facts


@contextmanager
def decoding() -> Iterator[None]:
    """Decoders fail in many ways on damaged input: all of them are the sample's fault."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Exception as error:
        raise BrokenSample("image", first_line(error)) from error

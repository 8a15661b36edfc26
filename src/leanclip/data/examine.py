"""Whether an image is whole, and its size, at a fraction of the cost of decoding it for training."""

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from PIL import Image

from leanclip.data.source import BrokenSample


class ImageFacts(NamedTuple):
    width: int
    height: int
    format: str
    """As Pillow calls it: JPEG, PNG, WEBP, ..."""


@contextmanager
def opened(content: bytes, name: str) -> Iterator[Image.Image]:
    """The image, not yet decoded. Whatever goes wrong inside the `with` is the sample's fault."""
    if not content:
        raise BrokenSample("image", f"the image of {name} has no bytes")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a broken EXIF block says nothing about the pixels
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(content)) as image:
                yield image
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise BrokenSample("large", f"the image of {name} is too large ({error})") from error
    except (OSError, ValueError, SyntaxError, EOFError, MemoryError) as error:
        raise BrokenSample("image", f"cannot decode the image of {name} ({error})") from error


def examine(content: bytes, name: str) -> ImageFacts:
    """Decode an image, a JPEG at an eighth of its size, and say what it is."""
    with opened(content, name) as image:
        facts = ImageFacts(*image.size, image.format or "")
        image.draft(None, (1, 1))
        image.load()
    return facts

"""Made-up samples in any number, without a file: the same batches for measuring how fast everything else is."""

import functools
import io
import random

import numpy as np
from PIL import Image

from leanclip.data.file_source import Packable
from leanclip.errors import UserError

PREFIX = "synthetic:"
SIDE = 256  # pixels of the raw images: what is left to do is the crop
NOISE_BYTES = 1 << 20  # a stretch of these is an image: drawing new ones would be what is measured
JPEG_SIZE = (500, 375)
PICTURES = 64  # different JPEGs, for the same reason
WORDS = [  # each is one token
    "a", "the", "of", "in", "on", "with", "and", "at", "by", "near", "old", "new", "red", "blue", "green",
    "white", "black", "small", "big", "young", "two", "three", "man", "woman", "dog", "cat", "bird", "horse",
    "car", "boat", "train", "house", "street", "park", "beach", "table", "city", "water", "sky", "tree",
    "flower", "field", "snow", "light", "night", "day", "sitting", "standing", "walking", "playing", "looking",
    "holding", "running", "wearing", "food", "wall",
]  # fmt: skip
WORD_COUNTS = range(6, 22)  # 8 to 23 tokens with start and end, as captions from the web


class Synthetic(Packable):
    """Noise and words; image and caption of an id are always the same.

    Images come uncompressed, which costs next to nothing to decode, or as JPEGs of the size of the web's photographs.
    """

    def __init__(self, count: int, *, jpeg: bool = False) -> None:
        self.count, self.jpeg = count, jpeg

    def __len__(self) -> int:
        return self.count

    def image_bytes(self, index: int) -> bytes:
        if self.jpeg:
            content = _picture(index % PICTURES)
            comment = b"\xff\xfe\x00\x0a" + index.to_bytes(8, "big")  # no two samples have the same bytes
            return content[:2] + comment + content[2:]
        start = index * 7919 % NOISE_BYTES
        pixels = _noise()[start : start + SIDE * SIDE * 3 - 8]
        return b"P6 %d %d 255\n%b%b" % (SIDE, SIDE, index.to_bytes(8, "big"), pixels)

    def captions(self, index: int) -> list[str]:
        draw = random.Random(index)
        words = WORD_COUNTS[int(draw.random() * len(WORD_COUNTS))]
        return [" ".join(WORDS[int(draw.random() * len(WORDS))] for _ in range(words))]

    def name(self, index: int) -> str:
        return f"{index} of {self.identity()}"

    def identity(self) -> str:
        return f"{PREFIX}{self.count}{':jpeg' if self.jpeg else ''}"


def open_synthetic(data: str) -> Synthetic:
    """From `synthetic:N` or `synthetic:N:jpeg`."""
    count, _, form = data.removeprefix(PREFIX).partition(":")
    if not count.isdecimal() or not int(count) or form not in ("", "jpeg"):
        raise UserError(f"cannot read {data!r}; write {PREFIX}N or {PREFIX}N:jpeg, N being the number of samples")
    return Synthetic(int(count), jpeg=form == "jpeg")


@functools.cache
def _noise() -> bytes:
    return np.random.default_rng(0).bytes(NOISE_BYTES + SIDE * SIDE * 3)


@functools.cache
def _picture(number: int) -> bytes:
    """Noise that is smooth enough to compress as a photograph does."""
    width, height = JPEG_SIZE
    coarse = np.random.default_rng(number).integers(0, 256, (height // 6, width // 6, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(coarse).resize(JPEG_SIZE, Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()

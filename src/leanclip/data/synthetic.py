"""Generated samples without files, for measuring the speed of everything except reading; and generated mistakes."""

import functools
import io
import random

import numpy as np
from PIL import Image

from leanclip.data.source import Packable
from leanclip.errors import UserError

PREFIX = "synthetic:"
EXCHANGE_KEY = 0xE8C4  # keeps these random numbers apart from others of the same seed
RAW_SIDE = 256  # pixels, of the uncompressed images
NOISE_BYTES = 1 << 20  # every image is a slice of these; generating new noise would dominate the measurement
MAX_DIGITS = 9  # of the number of samples
JPEG_SIZE = (500, 375)
DISTINCT_JPEGS = 64  # for the same reason
WORDS = [  # one token each
    "a", "the", "of", "in", "on", "with", "and", "at", "by", "near", "old", "new", "red", "blue", "green",
    "white", "black", "small", "big", "young", "two", "three", "man", "woman", "dog", "cat", "bird", "horse",
    "car", "boat", "train", "house", "street", "park", "beach", "table", "city", "water", "sky", "tree",
    "flower", "field", "snow", "light", "night", "day", "sitting", "standing", "walking", "playing", "looking",
    "holding", "running", "wearing", "food", "wall",
]  # fmt: skip
WORD_COUNTS = range(6, 22)  # 8 to 23 tokens with start and end, like captions from the web


class Synthetic(Packable):
    """Noise images with random words; the same id always gives the same sample.

    Images are uncompressed, which makes decoding cheap, or JPEGs of a size that is common on the web.
    """

    def __init__(self, count: int, *, jpeg: bool = False) -> None:
        self.count, self.jpeg = count, jpeg

    def __len__(self) -> int:
        return self.count

    def image_bytes(self, index: int) -> bytes:
        if self.jpeg:
            content = _jpeg(index % DISTINCT_JPEGS)
            comment = b"\xff\xfe\x00\x0a" + index.to_bytes(8, "big")  # no two samples have the same bytes
            return content[:2] + comment + content[2:]
        start = index * 7919 % NOISE_BYTES
        pixels = _noise()[start : start + RAW_SIDE * RAW_SIDE * 3 - 8]
        return b"P6 %d %d 255\n%b%b" % (RAW_SIDE, RAW_SIDE, index.to_bytes(8, "big"), pixels)

    def raw_captions(self, index: int) -> list[str]:
        rng = random.Random(index)
        words = WORD_COUNTS[int(rng.random() * len(WORD_COUNTS))]
        return [" ".join(WORDS[int(rng.random() * len(WORDS))] for _ in range(words))]

    def key(self, index: int) -> str:
        return str(index)

    def name(self, index: int) -> str:
        return f"{index} of {self.identity()}"

    def identity(self) -> str:
        return f"{PREFIX}{self.count}{':jpeg' if self.jpeg else ''}"


def open_synthetic(data: str) -> Synthetic:
    """From `synthetic:N` or `synthetic:N:jpeg`."""
    count, _, form = data.removeprefix(PREFIX).partition(":")
    if not count.isdecimal() or len(count) > MAX_DIGITS or not int(count) or form not in ("", "jpeg"):
        message = (
            f"cannot read {data!r}; write {PREFIX}N or {PREFIX}N:jpeg, with N the number of samples, of at most"
            f" {MAX_DIGITS} digits"
        )
        raise UserError(message, code="data.bad_synthetic")
    return Synthetic(int(count), jpeg=form == "jpeg")


@functools.cache
def _noise() -> bytes:
    return np.random.default_rng(0).bytes(NOISE_BYTES + RAW_SIDE * RAW_SIDE * 3)


@functools.cache
def _jpeg(number: int) -> bytes:
    """Smooth noise, which compresses like a photograph."""
    width, height = JPEG_SIZE
    coarse = np.random.default_rng(number).integers(0, 256, (height // 6, width // 6, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(coarse).resize(JPEG_SIZE, Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()


def exchanged_captions(ids: np.ndarray, samples: int, share: float, *, seed: int) -> np.ndarray:
    """For each sample the one whose captions it gets: a share of the ids, drawn at random, exchange theirs."""
    rng = np.random.default_rng([seed, EXCHANGE_KEY])
    chosen = rng.choice(ids, round(share * len(ids)), replace=False)
    captions_of = np.arange(samples)
    captions_of[chosen] = np.roll(chosen, 1)
    return captions_of

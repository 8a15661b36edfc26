"""From bytes to what the model eats: one sample at a time, in a worker."""

import io
import random
import warnings
from collections.abc import Callable

import torch
from PIL import Image
from torch import Tensor

from leanclip.data.order import sample_seed
from leanclip.data.source import BrokenSample, Source


def decode_image(source: Source, index: int) -> Image.Image:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a broken EXIF block says nothing about the pixels
            image = Image.open(io.BytesIO(source.image_bytes(index)))
            return image.convert("RGB")
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise BrokenSample("image", f"cannot decode the image of sample {source.name(index)} ({error})") from error


def training_sample(
    source: Source,
    index: int,
    transform: Callable[..., Tensor],
    tokenizer: Callable[..., Tensor],
    *,
    seed: int,
    epoch: int,
) -> tuple[Tensor, Tensor]:
    """The augmented image and the tokens of one caption: a pure function of (seed, epoch, index)."""
    number = sample_seed(seed, epoch, index)
    draw = random.Random(number)
    caption = draw.choice(source.captions(index))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(number)
        state = random.getstate()
        random.seed(number)  # some of open_clip's augmentations draw from Python's generator
        image = transform(decode_image(source, index))
        random.setstate(state)
    return image, tokenizer([caption])[0]

"""From bytes to what the model eats: one sample at a time, in a worker."""

import io
import random
import warnings
from collections.abc import Callable

import torch
from PIL import Image
from torch import Tensor

from leanclip.data.order import sample_seed
from leanclip.data.shards import Shards
from leanclip.errors import UserError


def decode_image(shards: Shards, index: int) -> Image.Image:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a broken EXIF block says nothing about the pixels
            image = Image.open(io.BytesIO(shards.image_bytes(index)))
            return image.convert("RGB")
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise UserError(f"cannot decode the image of sample {shards.name(index)} ({error}); remove it") from error


def training_sample(
    shards: Shards,
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
    caption = draw.choice(shards.captions(index))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(number)
        state = random.getstate()
        random.seed(number)  # some of open_clip's augmentations draw from Python's generator
        image = transform(decode_image(shards, index))
        random.setstate(state)
    return image, tokenizer([caption])[0]

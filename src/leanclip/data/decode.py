"""From encoded bytes to pixels: open_clip's preprocessing, at a lower cost.

The result is uint8; the model normalises it on its device. libjpeg decodes a JPEG that is much larger than the target
directly at a half, a quarter or an eighth of its size; then the crop is cut and resized with open_clip's filter. The
crop of such an image is rounded to the grid of the reduced one.
"""

import contextlib
import functools
import io
import math
import os
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageFile, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import get_worker_info
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import functional

from leanclip.data.source import BrokenSample, Source
from leanclip.errors import first_line

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")  # Pillow reads more; some decoders start programs
MAX_PIXELS = 89_478_485  # above it Pillow warns of a decompression bomb
MAX_ASPECT_RATIO = 100  # of an image; a longer one is a line
MAX_OVERSIZE = 16  # of the resized image over the target, on its longer side; evaluation cuts off the rest before
ASPECT_RATIOS = (3 / 4, 4 / 3)  # of a training crop
CROP_ATTEMPTS = 10
JPEG_REDUCTIONS = (8, 4, 2)  # factors by which libjpeg can reduce an image while it decodes
# A reduced image stays at least this many times larger than its target, so that the filter determines the result. On
# sharp images the mean difference from open_clip is 2 to 3 levels of 255 at a margin of 1, 1.6 at 1.5 and 0.9 at 2.
TRAINING_MARGIN, EVALUATION_MARGIN = 1.5, 2.0
STDERR = 2

Transform = Callable[[bytes, random.Random | None], Tensor]  # evaluation passes None


class Preprocess(Protocol):
    """The input that a model expects: open_clip's PreprocessCfg."""

    size: int | tuple[int, int]
    interpolation: str
    resize_mode: str
    fill_color: int


class Box(NamedTuple):
    """A part of an image, in pixels of its full size."""

    left: int
    top: int
    right: int
    bottom: int


@dataclass(frozen=True, kw_only=True)
class TrainingTransform:
    """open_clip's training transform: a random crop with an area share in `scale`, resized to `size`.

    Colour jitter (brightness, contrast, saturation, hue) and greyscale are applied with their probabilities.
    """

    size: tuple[int, int]  # height, width
    scale: tuple[float, float] = (0.9, 1.0)
    color_jitter: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    color_jitter_prob: float = 0.0
    gray_scale_prob: float = 0.0

    def __call__(self, content: bytes, rng: random.Random | None) -> Tensor:
        return resized(self.crop(content, rng), self.size)

    def crop(self, content: bytes, rng: random.Random | None) -> Tensor:
        """All but the last step where that is to resize; an image whose colours change is resized before."""
        rng = rng or random.Random()
        image = open_image(content)
        crop = decoded_crop(image, random_crop(image.size, self.scale, rng), self.size)
        jitter = self.color_jitter_prob and rng.random() < self.color_jitter_prob
        gray = self.gray_scale_prob and rng.random() < self.gray_scale_prob
        if not (jitter or gray):
            return crop
        image = Image.fromarray(resized(crop, self.size).permute(1, 2, 0).numpy())
        if jitter:
            image = color_jittered(image, self.color_jitter, rng)
        return _to_tensor(image.convert("L").convert("RGB") if gray else image)


@dataclass(frozen=True)
class EvaluationTransform:
    """open_clip's validation transform: the image resized by `resize_mode`, then a centre crop, padded if needed."""

    preprocess: Preprocess

    def __call__(self, content: bytes, rng: random.Random | None = None) -> Tensor:
        image = open_image(content)
        target_height, target_width = _height_width(self.preprocess.size)
        square = target_height == target_width  # open_clip ignores the interpolation of other "shortest" targets
        interpolates = self.preprocess.resize_mode != "shortest" or square
        mode = "bilinear" if self.preprocess.interpolation == "bilinear" and interpolates else "bicubic"
        height, width = self._resized(image.height, image.width)
        kept_height = min(image.height, math.ceil(image.height * MAX_OVERSIZE * target_height / height))
        kept_width = min(image.width, math.ceil(image.width * MAX_OVERSIZE * target_width / width))
        height, width = self._resized(kept_height, kept_width)
        box = _centre(image.size, (kept_width, kept_height))
        pixels = resized_crop(image, box, (height, width), mode, margin=EVALUATION_MARGIN)
        top, left = max(0, round((height - target_height) / 2)), max(0, round((width - target_width) / 2))
        pixels = pixels[:, top : top + target_height, left : left + target_width]
        missing_height, missing_width = target_height - pixels.shape[1], target_width - pixels.shape[2]
        top, left = missing_height // 2, missing_width // 2
        padding = (left, missing_width - left, top, missing_height - top)
        return F.pad(pixels, padding, value=self.preprocess.fill_color)

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        target_height, target_width = _height_width(self.preprocess.size)
        resize_mode = self.preprocess.resize_mode
        if resize_mode == "squash":
            return target_height, target_width
        if resize_mode == "shortest" and target_height == target_width:
            short, long = sorted((height, width))
            longer = int(target_height * long / short)
            return (target_height, longer) if height <= width else (longer, target_height)
        ratios = height / target_height, width / target_width
        ratio = max(ratios) if resize_mode == "longest" else min(ratios)
        return max(1, round(height / ratio)), max(1, round(width / ratio))


def training_transform(
    preprocess: Preprocess,
    *,
    scale: tuple[float, float] | None = None,
    color_jitter: tuple[float, float, float, float] | None = None,
    color_jitter_prob: float = 0.0,
    gray_scale_prob: float = 0.0,
) -> TrainingTransform:
    return TrainingTransform(
        size=_height_width(preprocess.size),
        scale=scale or (0.9, 1.0),
        color_jitter=color_jitter or (0.0, 0.0, 0.0, 0.0),
        color_jitter_prob=color_jitter_prob,
        gray_scale_prob=gray_scale_prob,
    )


def open_image(content: bytes) -> Image.Image:
    """The image, its pixels not decoded yet."""
    with decoding():
        image = Image.open(io.BytesIO(content), formats=FORMATS)
    if image.width * image.height > MAX_PIXELS:
        raise BrokenSample("huge", f"it has {image.width} x {image.height} pixels")
    if max(image.size) > MAX_ASPECT_RATIO * min(image.size):
        ratio = f"the ratio is above {MAX_ASPECT_RATIO}"
        raise BrokenSample("aspect ratio", f"it has {image.width} x {image.height} pixels: {ratio}")
    return image


@contextlib.contextmanager
def decoding() -> Iterator[None]:
    """Decoders fail in many ways on damaged input; each becomes a BrokenSample."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a damaged EXIF block does not affect the pixels
            yield
    except Image.DecompressionBombError as error:
        raise BrokenSample("huge", str(error)) from error
    except UnidentifiedImageError as error:  # its message has the address of a buffer
        raise BrokenSample("image", f"not one of {', '.join(FORMATS)}, or damaged") from error
    except Exception as error:
        raise BrokenSample("image", first_line(error)) from error


def examine(content: bytes) -> tuple[int, int, str]:
    """Width, height and format of an image that decodes, a JPEG at an eighth of its size; else BrokenSample."""
    image = open_image(content)
    width, height = image.size
    with decoding():
        image.draft(None, (1, 1))
        image.load()
    return width, height, image.format or ""


def decode_image(source: Source, index: int) -> Image.Image:
    """A sample's image at its full size."""
    content = source.image_bytes(index)
    with naming(source, index):
        return _to_rgb(open_image(content))


def pixels_of_sample(source: Source, index: int, transform: Transform, rng: random.Random | None = None) -> Tensor:
    content = source.image_bytes(index)
    with naming(source, index):
        return transform(content, rng)


def view_of_sample(source: Source, index: int, transform: Transform, *, seed: int) -> Tensor:
    """The augmented image of a visit: a pure function of the index and the seed."""
    rng = random.Random(seed)
    rng.random()  # by which captions once were drawn: crops, and tables of their features, stay the same
    return pixels_of_sample(source, index, transform, rng)


@contextlib.contextmanager
def naming(source: Source, index: int) -> Iterator[None]:
    """Add the name of the sample to the message of a decoder."""
    try:
        yield
    except BrokenSample as error:
        message = f"cannot decode the image of sample {source.name(index)} ({error})"
        raise BrokenSample(error.kind, message) from error


def random_crop(size: tuple[int, int], scale: tuple[float, float], rng: random.Random) -> Box:
    """A box with a random area share and a random aspect ratio, as torchvision's RandomResizedCrop draws it."""
    width, height = size
    for _ in range(CROP_ATTEMPTS):
        area = width * height * (scale[0] + rng.random() * (scale[1] - scale[0]))
        low, high = (math.log(ratio) for ratio in ASPECT_RATIOS)
        ratio = math.exp(low + rng.random() * (high - low))
        crop_width, crop_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            top = int(rng.random() * (height - crop_height + 1))
            left = int(rng.random() * (width - crop_width + 1))
            return Box(left, top, left + crop_width, top + crop_height)
    # No attempt fitted: the largest centre crop of an allowed aspect ratio.
    crop_width, crop_height = width, height
    if width / height < ASPECT_RATIOS[0]:
        crop_height = round(width / ASPECT_RATIOS[0])
    elif width / height > ASPECT_RATIOS[1]:
        crop_width = round(height * ASPECT_RATIOS[1])
    return _centre(size, (crop_width, crop_height))


def _centre(size: tuple[int, int], crop: tuple[int, int]) -> Box:
    left, top = (size[0] - crop[0]) // 2, (size[1] - crop[1]) // 2
    return Box(left, top, left + crop[0], top + crop[1])


def resized_crop(
    image: Image.Image, box: Box, size: tuple[int, int], mode: str = "bicubic", *, margin: float = TRAINING_MARGIN
) -> Tensor:
    """Decode an image, cut the box out and resize it to `size` (height, width): a (3, height, width) tensor."""
    return resized(decoded_crop(image, box, size, margin=margin), size, mode)


def decoded_crop(image: Image.Image, box: Box, size: tuple[int, int], *, margin: float = TRAINING_MARGIN) -> Tensor:
    """The box of an image that will be resized to `size`, perhaps of a reduced one; the channels are in its last
    dimension in memory."""
    full_size = image.size
    if image.format == "JPEG":
        limit = min((box.right - box.left) / size[1], (box.bottom - box.top) / size[0]) / margin
        reduction = next((factor for factor in JPEG_REDUCTIONS if factor <= limit), 1)
        if reduction == 1 and (pixels := _decoded_fast(image)) is not None:
            return pixels[:, box.top : box.bottom, box.left : box.right]
        image.draft(None, (full_size[0] // reduction, full_size[1] // reduction))
    decoded = _to_rgb(image)
    if decoded.size != full_size:
        box = _on_reduced_grid(box, full_size, decoded.size)
    return _to_tensor(decoded.crop(box))


def resized(crop: Tensor, size: tuple[int, int], mode: str = "bicubic") -> Tensor:
    """torch gives Pillow's result, antialiased and with the same rounding, in a third of the time."""
    if crop.shape[1:] == size:
        return crop
    return F.interpolate(crop[None], size, mode=mode, antialias=True)[0]


def _decoded_fast(image: Image.Image) -> Tensor | None:
    """Pillow's pixels of an RGB JPEG without its copies of them; None where Pillow has to decide. Only in worker
    processes: libjpeg prints what it notices to stderr, which is turned off meanwhile."""
    file = image.fp if isinstance(image, ImageFile.ImageFile) else None
    if image.mode != "RGB" or get_worker_info() is None or not isinstance(file, io.BytesIO):
        return None
    stderr = os.dup(STDERR)
    os.dup2(_null(), STDERR)
    try:
        pixels = decode_jpeg(torch.frombuffer(file.getbuffer(), dtype=torch.uint8), ImageReadMode.RGB)
    except RuntimeError:
        return None
    finally:
        os.dup2(stderr, STDERR)
        os.close(stderr)
    assert isinstance(pixels, Tensor)
    return pixels if pixels.shape == (3, image.height, image.width) else None


@functools.cache
def _null() -> int:
    return os.open(os.devnull, os.O_WRONLY)


def _on_reduced_grid(box: Box, full_size: tuple[int, int], reduced: tuple[int, int]) -> Box:
    x_scale, y_scale = reduced[0] / full_size[0], reduced[1] / full_size[1]
    left, top = round(box.left * x_scale), round(box.top * y_scale)
    return Box(left, top, max(round(box.right * x_scale), left + 1), max(round(box.bottom * y_scale), top + 1))


def color_jittered(
    image: Image.Image, strength: tuple[float, float, float, float], rng: random.Random
) -> Image.Image:
    """torchvision's ColorJitter: brightness, contrast, saturation and hue in random order, by random amounts."""
    changes = list(zip(("brightness", "contrast", "saturation", "hue"), strength, strict=True))
    for name, amount in sorted(changes, key=lambda _: rng.random()):
        if amount:
            low, high = (-amount, amount) if name == "hue" else (max(0.0, 1 - amount), 1 + amount)
            image = getattr(functional, f"adjust_{name}")(image, low + rng.random() * (high - low))
    return image


def _to_tensor(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def _to_rgb(image: Image.Image) -> Image.Image:
    with decoding():
        return image.convert("RGB")


def _height_width(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])

"""From bytes to pixels: open_clip's preprocessing, done where it is cheap.

The result is uint8; the model normalises it on its device. A JPEG that is much larger than the target is decoded at
a half, a quarter or an eighth of its size, which libjpeg does at a fraction of the cost; then the crop is cut and
resized with open_clip's filter. On such images a crop keeps to the grid of the reduced one.
"""

import contextlib
import io
import math
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageEnhance
from torch import Tensor

from leanclip.data.source import BrokenSample, Source
from leanclip.errors import first_line

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")  # Pillow knows more, some of which start programs
MOST_PIXELS = 89_478_485  # Pillow's own bound, from which on it warns of a decompression bomb
RATIOS = (3 / 4, 4 / 3)
TRIES = 10
REDUCTIONS = (8, 4, 2)  # what libjpeg does at once while decoding
# A reduced image is still so many times larger than its target that the filter decides how the result looks. At 1 the
# mean difference to open_clip is 2 to 3 levels of 255 on sharp photographs, at 1.5 it is 1.6 and at 2 it is 0.9.
TRAINING_RESERVE, EVALUATION_RESERVE = 1.5, 2.0

Transform = Callable[[bytes, random.Random | None], Tensor]  # None where nothing is random


class Preprocess(Protocol):
    """What a model says of its input: open_clip's PreprocessCfg."""

    @property
    def size(self) -> int | tuple[int, int]: ...
    @property
    def interpolation(self) -> str: ...
    @property
    def resize_mode(self) -> str: ...
    @property
    def fill_color(self) -> int: ...


class Box(NamedTuple):
    """A part of an image, in pixels of its full size."""

    left: int
    top: int
    right: int
    bottom: int


@dataclass(frozen=True, kw_only=True)
class TrainingTransform:
    """open_clip's training transform: a random crop of a share of the image in `scale`, resized to `size`.

    Colours are varied with the given probabilities: brightness, contrast, saturation and hue, then greyness.
    """

    size: tuple[int, int]  # height, width
    scale: tuple[float, float] = (0.9, 1.0)
    color_jitter: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    color_jitter_prob: float = 0.0
    gray_scale_prob: float = 0.0

    def __call__(self, content: bytes, draw: random.Random | None) -> Tensor:
        draw = draw or random.Random()
        image = open_image(content)
        box = random_crop(image.size, self.scale, draw)
        pixels = resized_crop(image, box, self.size)
        jitter = self.color_jitter_prob and draw.random() < self.color_jitter_prob
        gray = self.gray_scale_prob and draw.random() < self.gray_scale_prob
        if not (jitter or gray):
            return pixels
        coloured = Image.fromarray(pixels.permute(1, 2, 0).numpy())
        if jitter:
            coloured = jittered(coloured, self.color_jitter, draw)
        if gray:
            coloured = coloured.convert("L").convert("RGB")
        return _tensor(coloured)


@dataclass(frozen=True, kw_only=True)
class EvaluationTransform:
    """open_clip's validation transform: the shortest side, the longest or both resized, then the centre cut out."""

    size: tuple[int, int]
    interpolation: str = "bicubic"
    resize_mode: str = "shortest"
    fill_color: int = 0

    def __call__(self, content: bytes, draw: random.Random | None = None) -> Tensor:
        image = open_image(content)
        target_height, target_width = self.size
        square = target_height == target_width  # else, and for the shortest side, open_clip does not ask the model
        bilinear = self.interpolation == "bilinear" and (self.resize_mode != "shortest" or square)
        height, width = self._resized(image.height, image.width)
        whole = Box(0, 0, image.width, image.height)
        method = "bilinear" if bilinear else "bicubic"
        pixels = resized_crop(image, whole, (height, width), method, reserve=EVALUATION_RESERVE)
        top, left = round((height - target_height) / 2), round((width - target_width) / 2)
        pixels = pixels[:, max(top, 0) : max(top, 0) + target_height, max(left, 0) : max(left, 0) + target_width]
        if pixels.shape[1:] == self.size:
            return pixels
        sheet = torch.full((3, *self.size), self.fill_color, dtype=torch.uint8)
        _, height, width = pixels.shape
        top, left = (target_height - height) // 2, (target_width - width) // 2
        sheet[:, top : top + height, left : left + width] = pixels
        return sheet

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        target_height, target_width = self.size
        if self.resize_mode == "squash":
            return self.size
        if self.resize_mode == "shortest" and target_height == target_width:
            short, long = sorted((height, width))
            longer = int(target_height * long / short)
            return (target_height, longer) if height <= width else (longer, target_height)
        ratios = height / target_height, width / target_width
        ratio = max(ratios) if self.resize_mode == "longest" else min(ratios)
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
        size=_both(preprocess.size),
        scale=scale or (0.9, 1.0),
        color_jitter=color_jitter or (0.0, 0.0, 0.0, 0.0),
        color_jitter_prob=color_jitter_prob,
        gray_scale_prob=gray_scale_prob,
    )


def evaluation_transform(preprocess: Preprocess) -> EvaluationTransform:
    return EvaluationTransform(
        size=_both(preprocess.size),
        interpolation=preprocess.interpolation,
        resize_mode=preprocess.resize_mode,
        fill_color=preprocess.fill_color,
    )


def open_image(content: bytes) -> Image.Image:
    """The image, its pixels not decoded yet."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a broken EXIF block says nothing about the pixels
            image = Image.open(io.BytesIO(content), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise BrokenSample("huge", str(error)) from error
    except Exception as error:  # decoders fail in many ways on damaged input
        raise BrokenSample("image", first_line(error)) from error
    if image.width * image.height > MOST_PIXELS:
        raise BrokenSample("huge", f"it has {image.width} x {image.height} pixels")
    return image


def decode_image(source: Source, index: int) -> Image.Image:
    """A sample's whole image."""
    content = source.image_bytes(index)
    with naming(source, index):
        return _rgb(open_image(content))


def training_sample(source: Source, index: int, transform: Transform, *, seed: int) -> tuple[Tensor, str]:
    """The augmented image and one caption: a pure function of the index and the seed."""
    draw = random.Random(seed)
    caption = source.caption(index, draw)
    content = source.image_bytes(index)
    with naming(source, index):
        image = transform(content, draw)
    return image, caption


@contextlib.contextmanager
def naming(source: Source, index: int) -> Iterator[None]:
    """Decoders do not know whose bytes they read; the message should."""
    try:
        yield
    except BrokenSample as error:
        message = f"cannot decode the image of sample {source.name(index)} ({error})"
        raise BrokenSample(error.kind, message) from error


def random_crop(size: tuple[int, int], scale: tuple[float, float], draw: random.Random) -> Box:
    """A box of a random share of the image and a random shape between 3:4 and 4:3, as RandomResizedCrop draws it."""
    width, height = size
    for _ in range(TRIES):
        area = width * height * (scale[0] + draw.random() * (scale[1] - scale[0]))
        low, high = (math.log(ratio) for ratio in RATIOS)
        ratio = math.exp(low + draw.random() * (high - low))
        wide, tall = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < tall <= height:
            top = int(draw.random() * (height - tall + 1))
            left = int(draw.random() * (width - wide + 1))
            return Box(left, top, left + wide, top + tall)
    wide, tall = width, height  # none fitted: the middle, as much of it as has an allowed shape
    if width / height < RATIOS[0]:
        tall = round(width / RATIOS[0])
    elif width / height > RATIOS[1]:
        wide = round(height * RATIOS[1])
    left, top = (width - wide) // 2, (height - tall) // 2
    return Box(left, top, left + wide, top + tall)


def resized_crop(
    image: Image.Image, box: Box, size: tuple[int, int], mode: str = "bicubic", *, reserve: float = TRAINING_RESERVE
) -> Tensor:
    """Decode what is needed of an image, cut the box and resize it to `size` (height, width): (3, height, width)."""
    full = image.size
    if image.format == "JPEG":
        most = min((box.right - box.left) / size[1], (box.bottom - box.top) / size[0]) / reserve
        reduction = next((scale for scale in REDUCTIONS if scale <= most), 1)
        image.draft(None, (full[0] // reduction, full[1] // reduction))
    pixels = _rgb(image)
    if pixels.size != full:
        box = _snapped(box, full, pixels.size)
    # torch resizes as Pillow does, antialiased and to the same rounding, in a third of the time.
    cut = _tensor(pixels.crop(box))[None]
    if cut.shape[2:] == size:
        return cut[0]
    return F.interpolate(cut, size, mode=mode, antialias=True)[0]


def _snapped(box: Box, full: tuple[int, int], reduced: tuple[int, int]) -> Box:
    """The box on the grid of a reduced image."""
    across, down = reduced[0] / full[0], reduced[1] / full[1]
    left, top = round(box.left * across), round(box.top * down)
    return Box(left, top, max(round(box.right * across), left + 1), max(round(box.bottom * down), top + 1))


def jittered(image: Image.Image, strength: tuple[float, float, float, float], draw: random.Random) -> Image.Image:
    """torchvision's ColorJitter: the four changes in random order, each by a random amount."""
    steps = [0, 1, 2, 3]
    for i in (3, 2, 1):
        j = int(draw.random() * (i + 1))
        steps[i], steps[j] = steps[j], steps[i]
    enhancers = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
    for step in steps:
        amount = strength[step]
        if not amount:
            continue
        if step == 3:
            hue, saturation, value = image.convert("HSV").split()
            shift = round((2 * draw.random() - 1) * amount * 255)
            turned = Image.fromarray((np.asarray(hue).astype(np.int16) + shift).astype(np.uint8))
            image = Image.merge("HSV", (turned, saturation, value)).convert("RGB")
        else:
            low = max(0.0, 1 - amount)
            image = enhancers[step](image).enhance(low + draw.random() * (1 + amount - low))
    return image


def _tensor(image: Image.Image) -> Tensor:
    """(3, height, width) uint8."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def _rgb(image: Image.Image) -> Image.Image:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return image.convert("RGB")
    except Exception as error:  # decoders fail in many ways on damaged input
        raise BrokenSample("image", first_line(error)) from error


def _both(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])

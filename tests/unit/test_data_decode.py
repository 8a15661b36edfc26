"""Decoding against open_clip's transforms."""

import io
import random
from typing import Any

import numpy as np
import pytest
import torch
from open_clip.transform import PreprocessCfg, image_transform_v2
from photographs import photograph
from PIL import Image
from torchvision.transforms import ColorJitter, RandomResizedCrop

from leanclip.data import BrokenSample, EvaluationTransform, Shards, training_transform
from leanclip.data.datasets import BUNDLED
from leanclip.data.decode import (
    EVALUATION_MARGIN,
    TRAINING_MARGIN,
    Box,
    TrainingTransform,
    color_jittered,
    open_image,
    random_crop,
    resized_crop,
)
from leanclip.models import ModelConfig, create_model

PLAIN: dict[str, Any] = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}  # pixels in [0, 1], not normalised


def whole(content):
    return Image.open(io.BytesIO(content)).convert("RGB")


def open_clips(config, content):
    """open_clip's validation transform."""
    transform: Any = image_transform_v2(config, is_train=False)
    return transform(whole(content))


def difference(ours, theirs):
    """Mean absolute difference in units of 1/255."""
    return float((ours.double() - 255 * theirs.double()).abs().mean())


SIZES = [(256, 256), (341, 256), (500, 375), (500, 500), (720, 700), (1200, 950), (150, 700), (60, 50)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "form",
    [
        {},
        {"interpolation": "bilinear"},
        {"resize_mode": "longest", "fill_color": 7},
        {"resize_mode": "squash"},
        {"size": (224, 160)},
        {"size": (112, 224), "interpolation": "bilinear"},
    ],
)
def test_evaluation_pixels_are_open_clips(size, form):
    content = photograph(*size)
    config = PreprocessCfg(**({"size": 224} | form), **PLAIN)
    ours = EvaluationTransform(config)(content, None)
    theirs = open_clips(config, content)
    assert ours.dtype == torch.uint8 and ours.shape == theirs.shape
    assert difference(ours, theirs) <= 2
    lossless = photograph(*size, kind="PNG")
    theirs = open_clips(config, lossless)
    assert difference(EvaluationTransform(config)(lossless, None), theirs) <= 0.3  # nothing was reduced


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scale", [(0.9, 1.0), (0.3, 1.0)])
def test_training_pixels_are_open_clips_given_the_crop(size, scale):
    content = photograph(*size)
    for seed in range(4):
        box = random_crop(size, scale, random.Random(seed))
        ours = resized_crop(open_image(content), box, (224, 224))
        most = min(box.right - box.left, box.bottom - box.top) / 224 / TRAINING_MARGIN
        reduction = next((scale for scale in (8, 4, 2) if scale <= most), 1)
        grid = [min(round(edge / reduction) * reduction, limit) for edge, limit in zip(box, size * 2, strict=True)]
        theirs = np.asarray(whole(content).crop(Box(*grid)).resize((224, 224), Image.Resampling.BICUBIC))
        assert difference(ours, torch.from_numpy(theirs / 255).permute(2, 0, 1)) <= 2


def test_crops_have_the_distribution_of_torchvision():
    """Mean and spread of area, aspect ratio and position."""

    def figures(boxes, size):
        left, top, wide, tall = np.array(boxes, float).T
        return np.stack([wide * tall / size[0] / size[1], np.log(wide / tall), left / size[0], top / size[1]])

    for size, scale in (((500, 375), (0.3, 1.0)), ((100, 400), (0.9, 1.0))):
        image = torch.empty(1, size[1], size[0])
        torch.manual_seed(0)
        theirs = []
        for _ in range(4000):
            top, left, tall, wide = RandomResizedCrop.get_params(image, list(scale), [3 / 4, 4 / 3])
            theirs.append((left, top, wide, tall))
        ours = []
        for seed in range(4000):
            box = random_crop(size, scale, random.Random(seed))
            ours.append((box.left, box.top, box.right - box.left, box.bottom - box.top))
        one, two = figures(ours, size), figures(theirs, size)
        assert np.allclose(one.mean(1), two.mean(1), atol=0.015)
        assert np.allclose(one.std(1), two.std(1), atol=0.015)


def test_colour_jitter_has_the_distribution_of_torchvision():
    image = whole(photograph(64, 64))
    strength = (0.4, 0.4, 0.4, 0.1)
    torch.manual_seed(0)
    theirs = np.stack([np.asarray(ColorJitter(*strength)(image)) for _ in range(400)]).astype(float)
    ours = np.stack([np.asarray(color_jittered(image, strength, random.Random(i))) for i in range(400)]).astype(float)
    assert np.allclose(ours.mean((0, 1, 2)), theirs.mean((0, 1, 2)), atol=4)
    assert np.allclose(ours.std((1, 2)).mean(0), theirs.std((1, 2)).mean(0), atol=4)
    gray = TrainingTransform(size=(32, 32), gray_scale_prob=1.0)(photograph(64, 64), random.Random(0))
    assert (gray[0] == gray[1]).all() and (gray[1] == gray[2]).all()
    jitter = TrainingTransform(size=(32, 32), color_jitter=strength, color_jitter_prob=1.0)
    assert torch.equal(*(jitter(photograph(64, 64), random.Random(5)) for _ in range(2)))


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "1", "I;16", "LA"])
def test_every_mode_becomes_rgb(mode):
    file = io.BytesIO()
    Image.new("RGB", (40, 30), "orange").convert("L" if mode == "I;16" else mode).convert(mode).save(file, "PNG")
    config = PreprocessCfg(size=16, **PLAIN)
    theirs = open_clips(config, file.getvalue())
    assert difference(EvaluationTransform(config)(file.getvalue(), None), theirs) <= 0.5


@pytest.mark.parametrize("mode", ["L", "CMYK"])
def test_unusual_jpegs_are_reduced_too(mode):
    content = photograph(640, 640, mode=mode)
    ours = resized_crop(open_image(content), Box(0, 0, 640, 640), (64, 64))
    theirs = np.asarray(whole(content).resize((64, 64), Image.Resampling.BICUBIC))
    assert difference(ours, torch.from_numpy(theirs / 255).permute(2, 0, 1)) <= 2


def bilevel(side):
    file = io.BytesIO()
    Image.new("1", (side, side)).save(file, "PNG")
    return file.getvalue()


def test_huge_damaged_and_unsupported_images_are_broken():
    transform = training_transform(PreprocessCfg(size=16))
    jpeg = photograph(300, 200)
    cases = {bilevel(12_000): "huge", bilevel(20_000): "huge"}
    cases[b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"] = "image"
    cases |= {jpeg[:cut]: "image" for cut in (0, 10, 200, len(jpeg) // 2)}
    for content, kind in cases.items():
        with pytest.raises(BrokenSample) as broken:
            transform(content, random.Random(0))
        assert broken.value.kind == kind


def line(length, kind="PNG"):
    file = io.BytesIO()
    Image.new("RGB", (length, 1), "orange").save(file, kind)
    return file.getvalue()


@pytest.mark.parametrize("length", [101, 200_000, 9_000_000])
def test_absurd_aspect_ratios_are_broken(length):
    for transform in (TrainingTransform(size=(224, 224)), EvaluationTransform(PreprocessCfg(size=224))):
        with pytest.raises(BrokenSample, match="the ratio is above 100") as broken:
            transform(line(length), random.Random(0))
        assert broken.value.kind == "aspect ratio"


@pytest.mark.parametrize("form", [{}, {"resize_mode": "longest"}, {"resize_mode": "squash"}, {"size": (64, 128)}])
def test_the_intermediate_of_a_long_image_is_bounded(form, monkeypatch):
    sizes = []
    monkeypatch.setattr(
        "leanclip.data.decode.resized_crop",
        lambda image, box, size, *arguments, **options: (
            sizes.append(size) or resized_crop(image, box, size, *arguments, **options)
        ),
    )
    for content in (line(100), photograph(3000, 40), photograph(40, 3000, kind="PNG")):
        pixels = EvaluationTransform(PreprocessCfg(**({"size": 128} | form)))(content, None)
        assert pixels.shape[2] == 128
    assert all(height * width <= 16 * 128 * 128 for height, width in sizes)


@pytest.mark.parametrize("size", [*SIZES, (640, 160), (161, 1000), (1000, 99), (20, 320)])
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_evaluation_pixels_of_ordinary_ratios_are_those_of_the_whole_image_resized(size, kind):
    content = photograph(*size, kind=kind)
    short, long = 128, int(128 * max(size) / min(size))
    height, width = (short, long) if size[0] >= size[1] else (long, short)
    whole_image = resized_crop(open_image(content), Box(0, 0, *size), (height, width), margin=EVALUATION_MARGIN)
    top, left = round((height - 128) / 2), round((width - 128) / 2)
    expected = whole_image[:, top : top + 128, left : left + 128]
    assert torch.equal(EvaluationTransform(PreprocessCfg(size=128))(content, None), expected)


@pytest.mark.parametrize("size", [(3500, 150), (130, 4000), (5000, 100)])
def test_evaluation_pixels_of_long_images_are_open_clips(size):
    content = photograph(*size, kind="PNG")
    config = PreprocessCfg(size=64, **PLAIN)
    assert (
        difference(EvaluationTransform(config)(content, None), open_clips(config, content)) <= 4
    )  # half a pixel apart


def test_messages_name_no_buffer():
    with pytest.raises(BrokenSample) as broken:
        open_image(b"no image")
    assert "BytesIO" not in str(broken.value) and "JPEG" in str(broken.value)


def test_the_model_normalises_as_open_clip_does():
    model = create_model(ModelConfig(model="leanclip-tiny"))
    content = Shards(str(BUNDLED / "val-*.tar")).image_bytes(0)
    pixels = EvaluationTransform(model.preprocess)(content, None)[None]
    theirs = model.transform()(whole(content))[None]
    assert torch.allclose(model.normalised(pixels), theirs, atol=0.05)  # one level of 255 is 0.015
    assert model.normalised(theirs) is theirs
    exact = (pixels / 255 - model.image_mean) / model.image_std
    assert torch.allclose(model.normalised(pixels), exact, atol=1e-6)
    for dtype in (torch.float64, torch.bfloat16):
        assert model.to(dtype).normalised(pixels).dtype == dtype
    assert not any("image_" in name for name in model.state_dict())

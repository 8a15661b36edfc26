"""The pictures that go with an evaluation."""

import base64
import io

import torch
from PIL import Image

from leanclip.data import DataConfig, open_datasets
from leanclip.evaluation import Embedded, hardest_negatives


def held_out(count):
    data = open_datasets(DataConfig(), seed=0).val
    assert data is not None
    return data, data.ids[:count].tolist()


def on_circle(*degrees):
    angles = torch.deg2rad(torch.tensor(degrees, dtype=torch.float64))
    return torch.stack([angles.cos(), angles.sin()], 1)


def test_hardest_negatives_are_the_worst_confusions_and_the_pictures_they_belong_to():
    data, ids = held_out(4)
    captions = ["own 0", "second of 0", "own 1", "same words", "same words"]
    owner = torch.tensor([0, 0, 1, 2, 3])
    texts = on_circle(0, 180, 40, 90, 91)
    images = on_circle(0, 2, 90, 92)
    found = hardest_negatives(data, Embedded(images, texts, owner, captions, ids, 0), images=3, negatives=2)

    # Image 1 (2 degrees) lies nearest to "own 0"; images 2 and 3 share their words, which are no confusion.
    assert [entry["caption"] for entry in found] == ["own 1", "own 0", "same words"]
    first = found[0]
    assert [n["caption"] for n in first["negatives"]] == ["own 0", "same words"]
    cosine = torch.deg2rad(torch.tensor([38.0, 2.0], dtype=torch.float64)).cos().tolist()
    assert abs(first["score"] - cosine[0]) < 1e-12 and abs(first["negatives"][0]["score"] - cosine[1]) < 1e-12
    assert found[2]["negatives"][0]["caption"] == "own 1"
    for picture in (first, *first["negatives"]):
        with Image.open(io.BytesIO(base64.b64decode(picture["image"]))) as image:
            assert image.format == "JPEG" and max(image.size) <= 160

    def pixels(entry):
        return base64.b64decode(entry["image"])

    small = hardest_negatives(data, Embedded(images, texts, owner, captions, ids, 0), images=4)
    of_image_0 = [n for entry in small for n in entry["negatives"] if n["caption"] == "own 0"]
    of_image_1 = [n for entry in small for n in entry["negatives"] if n["caption"] == "own 1"]
    assert of_image_0 and of_image_1 and pixels(of_image_0[0]) != pixels(of_image_1[0])


def test_one_image_has_no_negatives_and_nan_does_not_stop_it():
    data, ids = held_out(2)
    one = Embedded(on_circle(0), on_circle(1), torch.tensor([0]), ["only"], ids[:1], 0)
    assert hardest_negatives(data, one) == []
    broken = torch.full((2, 2), torch.nan, dtype=torch.float64)
    found = hardest_negatives(data, Embedded(broken, broken, torch.tensor([0, 1]), ["a", "b"], ids, 0))
    assert len(found) == 2

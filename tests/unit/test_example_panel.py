"""Examples for the report (example_panel.py)."""

import base64
import io

import torch
from PIL import Image

from leanclip.data import DataConfig, open_datasets
from leanclip.evaluation import Embedded, earlier_best, hardest_negatives


def held_out(count):
    data = open_datasets(DataConfig(), seed=0).val
    assert data is not None
    return data, data.ids[:count].tolist()


def on_circle(*degrees):
    angles = torch.deg2rad(torch.tensor(degrees, dtype=torch.float64))
    return torch.stack([angles.cos(), angles.sin()], 1)


def test_hardest_negatives_and_the_images_they_belong_to():
    data, ids = held_out(4)
    captions = ["own 0", "second of 0", "own 1", "same words", "same words"]
    owner = torch.tensor([0, 0, 1, 2, 3])
    texts = on_circle(0, 180, 40, 90, 91)
    images = on_circle(0, 2, 90, 92)
    embedded = Embedded(images, texts, owner, captions, ids, 0)
    hardest = hardest_negatives(data, embedded, images=3, negatives=2)

    # Image 1 (2 degrees) is nearest to "own 0"; images 2 and 3 have the same caption, which is not wrong.
    assert [entry["caption"] for entry in hardest] == ["own 1", "own 0", "same words"]
    first = hardest[0]
    assert [n["caption"] for n in first["negatives"]] == ["own 0", "same words"]
    cosine = torch.deg2rad(torch.tensor([38.0, 2.0], dtype=torch.float64)).cos().tolist()
    assert abs(first["score"] - cosine[0]) < 1e-12 and abs(first["negatives"][0]["score"] - cosine[1]) < 1e-12
    assert hardest[2]["negatives"][0]["caption"] == "own 1"
    for entry in (first, *first["negatives"]):
        with Image.open(io.BytesIO(base64.b64decode(entry["image"]))) as image:
            assert image.format == "JPEG" and max(image.size) <= 160
    thumbnails = {
        n["caption"]: n["image"] for entry in hardest_negatives(data, embedded, images=4) for n in entry["negatives"]
    }
    assert thumbnails["own 0"] != thumbnails["own 1"]


def test_one_image_and_nan():
    data, ids = held_out(2)
    one = Embedded(on_circle(0), on_circle(1), torch.tensor([0]), ["only"], ids[:1], 0)
    assert hardest_negatives(data, one) == []
    broken = torch.full((2, 2), torch.nan, dtype=torch.float64)
    assert len(hardest_negatives(data, Embedded(broken, broken, torch.tensor([0, 1]), ["a", "b"], ids, 0))) == 2


def test_the_best_captions_of_earlier_points():
    """Of ten evaluations the first one and two others are kept; those after a step that is resumed from are not."""
    panel = {"step": 0, "images": [{"matches": [{"caption": "at 0"}, {"caption": "second"}]}]}
    assert earlier_best(panel, 0) == []
    for step in range(100, 1001, 100):
        panel["earlier"] = earlier_best(panel, step)
        panel |= {"step": step, "images": [{"matches": [{"caption": f"at {step}"}]}]}
    assert [point["step"] for point in panel["earlier"]] == [0, 400, 700]
    assert [point["best"] for point in panel["earlier"]] == [[{"caption": f"at {step}"}] for step in (0, 400, 700)]
    assert [point["step"] for point in earlier_best(panel, 500)] == [0, 400]

import numpy as np
import pytest
import torch

from leanclip.evaluation import retrieval_metrics


def plain_recalls(images, texts, owner):
    """By sorting, one query at a time. Assumes no ties."""
    scores = texts @ images.T
    found = {}
    for k in (1, 5, 10):
        found[f"text_to_image_recall@{k}"] = np.mean(
            [owner[j] in np.argsort(-scores[j])[:k] for j in range(len(texts))]
        )
        found[f"image_to_text_recall@{k}"] = np.mean(
            [i in owner[np.argsort(-scores[:, i])[:k]] for i in range(len(images))]
        )
    return found


@pytest.mark.parametrize("captions", [1, 5])
def test_recalls_equal_a_plain_computation(captions):
    draw = np.random.default_rng(captions)
    images = draw.normal(size=(37, 8))
    owner = np.repeat(np.arange(37), captions)
    texts = images[owner] + 1.5 * draw.normal(size=(37 * captions, 8))
    found = retrieval_metrics(*(torch.from_numpy(array) for array in (images, texts, owner)))
    expected = plain_recalls(images, texts, owner)
    assert 0 < expected["text_to_image_recall@1"] < 1
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert found["images"] == 37 and found["captions"] == 37 * captions and found["chance@10"] == 10 / 37


def test_a_broken_model_finds_nothing():
    broken = torch.full((20, 4), float("nan"))
    found = retrieval_metrics(broken, broken, torch.arange(20))
    assert found["text_to_image_recall@10"] == 0 and found["image_to_text_recall@10"] == 0


def test_a_collapsed_model_finds_nothing():
    same = torch.ones(20, 4) / 2
    found = retrieval_metrics(same, same, torch.arange(20))
    assert found["text_to_image_recall@10"] == 0 and found["image_to_text_recall@10"] == 0

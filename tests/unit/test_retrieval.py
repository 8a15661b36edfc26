"""Recall and median rank against a plain computation; memory on a large set."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from leanclip.data import DataConfig, open_datasets
from leanclip.evaluation import EvaluationSettings, embed, retrieval_metrics
from leanclip.evaluation.retrieval import ranks_of_right
from leanclip.inference import find_model
from leanclip.progress import ACTIVITY


def plain_recalls(images, texts, owner):
    """By sorting, one query at a time. Assumes no ties."""
    scores = texts @ images.T
    ranks = {
        "text_to_image": [np.flatnonzero(np.argsort(-scores[j]) == owner[j])[0] for j in range(len(texts))],
        "image_to_text": [np.flatnonzero(owner[np.argsort(-scores[:, i])] == i)[0] for i in range(len(images))],
    }
    recalls = {f"{name}_recall@{k}": np.mean(np.array(rank) < k) for name, rank in ranks.items() for k in (1, 5, 10)}
    return recalls | {f"{name}_median_rank": np.median(rank) + 1 for name, rank in ranks.items()}


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("tile", [7, None])
@pytest.mark.parametrize("captions", [1, 5])
def test_recalls_equal_a_plain_computation(captions, tile, shuffled):
    draw = np.random.default_rng(captions)
    images = draw.normal(size=(37, 8))
    owner = np.concatenate([np.repeat(np.arange(37), captions), [3, 3, 20]])  # some have more captions than others
    texts = images[owner] + 1.5 * draw.normal(size=(len(owner), 8))
    if shuffled:
        order = draw.permutation(len(owner))
        texts, owner = texts[order], owner[order]
    metrics = retrieval_metrics(*(torch.from_numpy(array) for array in (images, texts, owner)), tile=tile)
    expected = plain_recalls(images, texts, owner)
    assert 0 < expected["text_to_image_recall@1"] < 1
    expected |= {"images": 37, "captions": len(owner), "chance@10": 10 / 37}
    assert metrics == pytest.approx(expected)


def test_ties_count_as_wrong():
    images = torch.eye(4)
    texts = images[[0, 0, 2, 3]]  # the second caption is that of the first image, word for word
    before_image, before_text = ranks_of_right(images, texts, torch.arange(4), tile=3)
    assert before_image.tolist() == [1, 3, 0, 0] and before_text.tolist() == [0, 3, 0, 0]


def test_every_batch_and_tile_counts_as_activity(small_run):
    """Otherwise the heartbeat would stop a long evaluation as hanging."""
    data = open_datasets(DataConfig(), seed=0).val
    assert data is not None
    data = replace(data, ids=data.ids[:20])
    before = ACTIVITY.ticks
    settings = EvaluationSettings(device=torch.device("cpu"), batch=4)
    embedded = embed(find_model(str(small_run)).load(), data, settings)
    assert ACTIVITY.ticks >= before + 5 + 5  # images and texts
    before = ACTIVITY.ticks
    ranks_of_right(embedded.images, embedded.texts, embedded.image_of_text, tile=5)
    assert ACTIVITY.ticks == before + 4 + 16  # the right pairs, and all


@pytest.mark.parametrize("tile", [7, None])
@pytest.mark.parametrize("value", [float("nan"), 0.5])
def test_a_non_finite_or_collapsed_model_has_no_recall(value, tile):
    same = torch.full((20, 4), value)
    metrics = retrieval_metrics(same, same, torch.arange(20), tile=tile)
    assert metrics["text_to_image_recall@10"] == 0 and metrics["image_to_text_recall@10"] == 0


LARGE = """
import json, sys
from pathlib import Path
import torch
from leanclip.evaluation.retrieval import ranks_of_right
torch.set_num_threads(int(sys.argv[1]))
draw = torch.Generator().manual_seed(0)
images = torch.nn.functional.normalize(torch.randn(100_000, 32, generator=draw), dim=1)
owner = torch.arange(500_000) // 5
texts = torch.nn.functional.normalize(images[owner] + 0.15 * torch.randn(500_000, 32, generator=draw), dim=1)
before_image, before_text = ranks_of_right(images, texts, owner)
wrong = 0
for i in range(0, 100_000, 2500):
    scores = texts.double() @ images[i].double()
    wrong += int(((scores >= scores[owner == i].max()) & (owner != i)).sum()) != int(before_image[i])
for j in range(0, 500_000, 12_500):
    scores = images.double() @ texts[j].double()
    own = torch.arange(100_000) == owner[j]
    wrong += int(((scores >= scores[own].max()) & ~own).sum()) != int(before_text[j])
peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])  # getrusage's may be the parent's
print(json.dumps({"wrong": wrong, "peak": peak, "recall": float((before_text < 10).double().mean())}))
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from Linux's /proc")
def test_half_a_million_captions_fit_into_two_gibibytes():
    done = subprocess.run([sys.executable, "-c", LARGE, "2"], capture_output=True, text=True, check=True)
    large = json.loads(done.stdout)
    assert large["peak"] < 2 << 20  # kilobytes, of everything: the interpreter and torch too
    assert large["wrong"] <= 1  # of 80; float32 may order two neighbours the other way
    assert 0.1 < large["recall"] < 1

import contextlib
import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from leanclip.data import DataConfig, open_datasets
from leanclip.evaluation import embed, retrieval_metrics
from leanclip.evaluation.retrieval import places
from leanclip.inference import find_model, load_model
from leanclip.progress import ACTIVITY


def plain_recalls(images, texts, owner):
    """By sorting, one query at a time. Assumes no ties."""
    scores = texts @ images.T
    own = [np.flatnonzero(owner[np.argsort(-scores[:, i])] == i)[0] for i in range(len(images))]
    found = {
        "text_to_image_median_rank": np.median(
            [np.flatnonzero(np.argsort(-scores[j]) == owner[j])[0] + 1 for j in range(len(texts))]
        ),
        "image_to_text_median_rank": np.median(own) + 1,
    }
    for k in (1, 5, 10):
        found[f"text_to_image_recall@{k}"] = np.mean(
            [owner[j] in np.argsort(-scores[j])[:k] for j in range(len(texts))]
        )
        found[f"image_to_text_recall@{k}"] = np.mean(
            [i in owner[np.argsort(-scores[:, i])[:k]] for i in range(len(images))]
        )
    return found


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
    found = retrieval_metrics(*(torch.from_numpy(array) for array in (images, texts, owner)), tile=tile)
    expected = plain_recalls(images, texts, owner)
    assert 0 < expected["text_to_image_recall@1"] < 1
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert found["images"] == 37 and found["captions"] == len(owner) and found["chance@10"] == 10 / 37


def test_ties_count_against():
    images = torch.eye(4)
    texts = images[[0, 0, 2, 3]]  # the second caption is that of the first image, word for word
    image_places, text_places = places(images, texts, torch.arange(4), tile=3)
    assert image_places.tolist() == [1, 3, 0, 0]
    assert text_places.tolist() == [0, 3, 0, 0]


def test_every_batch_and_tile_is_a_sign_of_work(small_run):
    """Else the watch over the ranks would take a long evaluation for a hang."""
    data = open_datasets(DataConfig(), seed=0).val
    assert data is not None
    data = replace(data, ids=data.ids[:20])
    model, cpu = load_model(find_model(small_run)), torch.device("cpu")
    before = ACTIVITY.ticks
    embedded = embed(model, data, device=cpu, autocast=contextlib.nullcontext(), batch=4)
    assert ACTIVITY.ticks >= before + 5 + 5  # images and texts
    before = ACTIVITY.ticks
    places(embedded.images, embedded.texts, embedded.image_of_text, tile=5)
    assert ACTIVITY.ticks == before + 4 + 16  # the right pairs, and all


@pytest.mark.parametrize("tile", [7, None])
def test_a_broken_model_finds_nothing(tile):
    broken = torch.full((20, 4), float("nan"))
    found = retrieval_metrics(broken, broken, torch.arange(20), tile=tile)
    assert found["text_to_image_recall@10"] == 0 and found["image_to_text_recall@10"] == 0


def test_a_collapsed_model_finds_nothing():
    same = torch.ones(20, 4) / 2
    found = retrieval_metrics(same, same, torch.arange(20))
    assert found["text_to_image_recall@10"] == 0 and found["image_to_text_recall@10"] == 0


LARGE = """
import json, sys, time
from pathlib import Path
import numpy as np, torch
from leanclip.evaluation.retrieval import places, retrieval_metrics
torch.set_num_threads(int(sys.argv[1]))
draw = torch.Generator().manual_seed(0)
images = torch.nn.functional.normalize(torch.randn(100_000, 32, generator=draw), dim=1)
owner = torch.arange(500_000) // 5
texts = torch.nn.functional.normalize(images[owner] + 0.15 * torch.randn(500_000, 32, generator=draw), dim=1)
began = time.perf_counter()
image_places, text_places = places(images, texts, owner)
seconds = time.perf_counter() - began
wrong = 0
for i in range(0, 100_000, 2500):
    scores = texts.double() @ images[i].double()
    wrong += int(((scores >= scores[owner == i].max()) & (owner != i)).sum()) != int(image_places[i])
for j in range(0, 500_000, 12_500):
    scores = images.double() @ texts[j].double()
    own = torch.arange(100_000) == owner[j]
    wrong += int(((scores >= scores[own].max()) & ~own).sum()) != int(text_places[j])
peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])  # getrusage's may be the parent's
print(json.dumps({"wrong": wrong, "peak": peak, "seconds": seconds,
                  "recall": float((text_places < 10).double().mean())}))
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(sys.platform != "linux", reason="Linux says what a program has used at most")
def test_half_a_million_captions_fit_into_two_gibibytes():
    done = subprocess.run([sys.executable, "-c", LARGE, "2"], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["peak"] < 2 << 20  # kilobytes, of everything: the interpreter and torch too
    assert found["wrong"] <= 1  # of 80; float32 may order two neighbours the other way
    assert 0.1 < found["recall"] < 1

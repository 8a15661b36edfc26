"""The comparison of trained models: its statistics, its batches, and its training runs."""

import json
import sys
from dataclasses import replace

import compare_losses
import estimate_error
import pytest
import step_time
import torch
import training_runs
from photo_dataset import CaptionedImages, PhotoDataset
from training_runs import Run, RunStore

from leanclip.data.datasets import BUNDLED

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def emoji():
    return PhotoDataset.load(BUNDLED)


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(training_runs.TINY))
    return path


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_run_is_trained_once(processes, tiny, tmp_path, monkeypatch):
    run = Run("fastclip-v3", 16, 1e-3, 1)
    store = RunStore(tmp_path, BUNDLED, processes, steps=2, config=tiny)
    rows = store.rows([run, replace(run, hyper=(("tau", 0.07),))])
    monkeypatch.setattr(training_runs, "train_in_process", lambda *_: pytest.fail("trained again"))
    assert store.rows([run])[run] == rows[run]
    assert rows[run]["samples"] == "32" and [point["samples"] for point in store.curve(run)] == [32]
    assert (
        RunStore(tmp_path, steps=2, config=tiny).rows([replace(run, seed=2)]) == {}
    )  # without photos nothing trains


def test_runs_of_one_seed_see_the_same_batches(emoji):
    first = Run("infonce", 32, 1e-3, 1)

    def beginning(run):
        stream = training_runs.batches(emoji.train, run, CPU)
        return [next(stream) for _ in range(2)]

    same, other = beginning(replace(first, loss="siglip", lr=5e-4)), beginning(replace(first, seed=2))
    for batch, same_batch in zip(beginning(first), same, strict=True):
        assert batch.images.equal(same_batch.images) and batch.tokens.equal(same_batch.tokens)
    assert not beginning(first)[0].sample_ids.equal(other[0].sample_ids)


def test_captions_belong_to_their_images(emoji):
    """Also where caption numbers are too large for a float32 with a fraction."""
    batch = next(training_runs.batches(emoji.train, Run("infonce", 64, 1e-3, 3), CPU))
    assert batch.lengths is not None
    for image, tokens, length in zip(batch.sample_ids, batch.tokens, batch.lengths, strict=True):
        captions = emoji.train.tokens[emoji.train.first[image] : emoji.train.first[image + 1]].long()
        assert (captions == tokens).all(1).any()
        assert tokens[length - 1] == tokens.max() and (tokens[length:] == 0).all()
    images, per_image = 20_000, 5
    tokens = (torch.arange(images * per_image) // per_image).int()[:, None]  # the number of the image
    pixels = torch.zeros(images, 3, 1, 1, dtype=torch.uint8)
    data = CaptionedImages(pixels, tokens, torch.ones(len(tokens)).long(), torch.arange(images + 1) * per_image)
    large = next(training_runs.batches(data, Run("infonce", images, 1e-3, 1), CPU))
    assert large.tokens[:, 0].equal(large.sample_ids)


def test_estimate_is_exact_if_the_batch_is_the_whole_data_set(emoji, tiny, monkeypatch):
    place, count = training_runs.Workspace(emoji, CPU, tiny), len(emoji.train.images)
    context, _ = place.begin(Run("fastclip-v3", count, 1e-3, 1))
    context.loss.set_epoch(0, 1)
    monkeypatch.setattr(estimate_error, "VIEWS", 1)
    with torch.no_grad():
        image, text = estimate_error.view(place, 0)
    context.loss(image, text, torch.arange(count))
    figures = estimate_error.inspect(place, 16, context)
    assert abs(figures["estimate_bias"]) < 1e-4 and figures["estimate_spread"] < 1e-4
    assert figures["batch_spread"] > 0.01 and 1 < figures["effective_negatives"] < count


@pytest.mark.parametrize("command", [compare_losses, step_time, estimate_error])
def test_every_command_runs(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [command.__file__, "--quick"])
    command.main()
    out = capsys.readouterr().out
    assert any(word in out for word in ("±", "ms per step", "estimate error"))
    assert list(tmp_path.iterdir()) == []

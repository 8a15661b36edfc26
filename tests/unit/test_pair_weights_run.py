"""Weights of pairs in a whole run: the setting, what the log says, and resuming."""

import json
from typing import Any

import pytest
import torch
from checkpoint_runs import assert_train_refused, equal, job_of, saved_tensors, train
from shard_files import picture, write_shard

from leanclip.losses.base import ContrastiveLoss
from run_records import records

SETTINGS = {"global_batch_size": 64, "loss": "dcl", "epochs": 4, "max_steps": 12, "save_every": 6}


def refits(folder):
    return records(folder / "logs/run", "pair_weights")


@pytest.mark.parametrize(("mode", "on"), [("learned", True), ("auto", False)])
def test_the_log_says_at_each_fit_what_looks_wrong(mode, on, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("leanclip.losses.pair_weights.SMALLEST_SHARE", 1.0)  # never exceeded
    assert train(tmp_path, pair_weights=mode, **SETTINGS) == 0
    found = refits(tmp_path)
    assert [line["epoch"] for line in found] == [2, 3] and [line["on"] for line in found] == [on, on]
    assert all(sum(line["counts"]) >= 180 for line in found)  # epochs leave 8 of 200 out
    lines = [line for line in capsys.readouterr().out.splitlines() if "look wrong" in line]
    assert len(lines) == 2 and all(f"weights are {'on' if on else 'off'}" in line for line in lines)


def test_a_run_that_resumes_at_a_fit_logs_it_once(tmp_path):
    assert train(tmp_path, pair_weights="auto", **SETTINGS | {"max_steps": 6}) == 0
    assert train(tmp_path, pair_weights="auto", resume="auto", **SETTINGS) == 0
    assert [line["step"] for line in refits(tmp_path)] == [7, 10]


def test_too_few_visits_are_said_and_off_is_no_setting(tmp_path, capsys):
    short = {"loss": "infonce", "max_steps": 4, "save_every": 2}
    assert train(tmp_path, **short) == 0
    assert train(tmp_path, pair_weights="off", resume="auto", **short) == 0
    expected = saved_tensors(tmp_path, 4)
    assert_train_refused("resume.mismatch", tmp_path, capsys, pair_weights="auto", resume="auto", **short)
    (tmp_path / "logs/run").rename(tmp_path / "logs/plain")
    assert train(tmp_path, pair_weights="learned", epochs=1, **short) == 0
    assert "after 2 visits" in " ".join(capsys.readouterr().out.split())
    scored = saved_tensors(tmp_path, 4)
    equal({name: value for name, value in scored.items() if name in expected}, expected)
    assert scored["loss.state.scored"].max() == 1


def captions_of(number):
    """From one to three."""
    return [f"caption {position} of sample {number}" for position in range(1 + number % 3)]


@pytest.fixture
def several(tmp_path):
    files = {f"{number:05d}.jpg": picture(number) for number in range(40)}
    files |= {f"{n:05d}.json": json.dumps({"captions": captions_of(n)}).encode() for n in range(40)}
    return {"train_data": str(write_shard(tmp_path / "several.tar", files)), "pair_weights": "learned"}


@pytest.mark.parametrize("cached", [False, True])
def test_a_batch_says_which_caption_of_its_sample_each_one_is(cached, several, tmp_path, monkeypatch):
    monkeypatch.setenv("LEANCLIP_CACHE", str(tmp_path / "cache"))
    if cached:
        assert train(tmp_path, max_steps=1, name="weights") == 0  # a locked tower without weights is refused
        several |= {"pretrained": str(tmp_path / "logs/weights"), "lock_text": True, "cache_locked": 1, "tau": 0.05}
    job = job_of(tmp_path, **several, captions_per_sample=3)
    every = {n: job.model.tokenizer(captions_of(n)) for n in range(40)}
    if cached:
        with torch.no_grad():
            every = {n: job.model.eval().text_features(tokens).half() for n, tokens in every.items()}
    drawn = set()
    for epoch in range(4):
        for batch in job.loader.epoch(epoch):
            assert batch.caption_numbers is not None
            for index, number, row in zip(
                batch.sample_ids.tolist(), batch.caption_numbers, batch.tokens, strict=True
            ):
                difference = (every[index].float() - row.float()).abs().sum(1)
                assert int(difference.argmin()) == int(number) and len(every[index]) == 1 + index % 3
                drawn.add(int(number))
    assert drawn == {0, 1, 2}
    plain = job_of(tmp_path, **several)
    assert all(batch.caption_numbers is None for batch in plain.loader.epoch(0))
    assert any("--captions-per-sample 3" in note for note in plain.notes)
    assert not any("--captions-per-sample" in note for note in job.notes)


def test_a_run_counts_the_visits_to_each_caption(several, tmp_path, capsys):
    settings = several | {"loss": "fastclip-v1", "captions_per_sample": 2, "epochs": 4, "max_steps": 8}
    assert train(tmp_path, **settings) == 0
    visits = torch.zeros(40, 2)
    job = job_of(tmp_path, **settings, name="again")
    for epoch in range(4):
        for batch in job.loader.epoch(epoch):
            assert batch.caption_numbers is not None
            visits[batch.sample_ids, batch.caption_numbers % 2] += 1
    tensors = saved_tensors(tmp_path, 8)
    assert torch.equal(tensors["loss.state.scored"], visits) and visits.min() == 0 < visits[:, 1].max()
    assert tensors["loss.state.log_u_text"].shape == (40,)
    said, changed = "--captions-per-sample 1, the run has 2", settings | {"captions_per_sample": 1}
    assert_train_refused("resume.mismatch", tmp_path, capsys, said, resume="auto", **changed)


@pytest.mark.parametrize("way", ["plain", "micro-batches", "cached"])
def test_groups_and_a_field_of_weights_reach_the_loss(way, tmp_path, monkeypatch):
    files = {f"{number:05d}.jpg": picture(number) for number in range(40)}
    for n in range(40):
        fields = {"captions": [f"sample {n}"], "product": f"p{n % 7}", "quality": n / 8}
        files[f"{n:05d}.json"] = json.dumps(fields).encode()
    settings = {"train_data": str(write_shard(tmp_path / "data.tar", files)), "global_batch_size": 20, "max_steps": 2}
    if way == "micro-batches":
        settings |= {"micro_batch": 10}
    if way == "cached":
        monkeypatch.setenv("LEANCLIP_CACHE", str(tmp_path / "cache"))
        assert train(tmp_path, max_steps=1, name="weights") == 0
        settings |= {"pretrained": str(tmp_path / "logs/weights"), "lock_text": True, "cache_locked": 1, "tau": 0.05}
    forward: Any = ContrastiveLoss.forward
    calls = []

    def spy(loss, image, text, ids, **given):
        if "groups" in given:  # not in the check of a loss before training
            calls.append((ids.tolist(), given["groups"].tolist(), given["weights"].tolist()))
        return forward(loss, image, text, ids, **given)

    monkeypatch.setattr(ContrastiveLoss, "forward", spy)
    assert train(tmp_path, group_key="product", pair_weights="quality", **settings) == 0
    assert len(calls) == 2
    for ids, groups, weights in calls:
        assert weights == [number / 8 for number in ids]
        pairs = [(a, b) for a in range(20) for b in range(20)]
        assert all((groups[a] == groups[b]) == ((ids[a] - ids[b]) % 7 == 0) for a, b in pairs)

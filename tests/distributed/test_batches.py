"""The global batches of a run (ids, captions, augmented pixels) do not depend on ranks, workers or interruptions;
broken samples are replaced consistently and counted over all ranks."""

import json
from pathlib import Path

import pytest
from data_worker import train_on_shards
from ranks_job import run_ranks
from shard_files import sound, write_shard

from leanclip.distributed import Ranks
from run_records import records

STEPS = 9  # three epochs of three


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    files = sound(17)
    files["00003.jpg"] = b"not an image"
    files["00011.jpg"] = files["00011.jpg"][:60]
    write_shard(folder / "a.tar", files)
    write_shard(folder / "b.tar", sound(16, start=17))
    return f"{folder}/{{a,b}}.tar"


def joined_steps(results):
    """Global batches by step, the ranks' shares in order."""
    steps = [json.loads(result["seen"]) for result in results]
    return {int(step): [row for rank in steps for row in rank[step]] for step in steps[0]}


def broken(logs):
    return [line.get("broken_image", 0) for line in records(Path(logs) / "run", "train")]


@pytest.fixture(scope="module")
def uninterrupted(shards, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    batches = joined_steps([train_on_shards(Ranks(0, 1, None), folder, shards, folder / "logs", STEPS)])
    return batches, broken(folder / "logs")


@pytest.mark.parametrize(
    "parts",
    [
        ((2, 3, 4), (1, 1, 5), (4, 0, 9)),  # processes, workers of each, the step it stops at
        pytest.param(((4, 1, 2), (2, 0, 9)), marks=pytest.mark.slow),
    ],
)
def test_the_same_batches_on_other_ranks_and_workers(parts, shards, uninterrupted, tmp_path):
    expected, counts = uninterrupted
    assert sorted(expected) == list(range(STEPS))
    assert all(len({row[0] for row in rows}) == 10 for rows in expected.values())
    batches = {}
    for number, (size, workers, stop) in enumerate(parts):
        batches |= joined_steps(
            run_ranks(train_on_shards, size, tmp_path, shards, tmp_path / "logs", stop, number > 0, workers)
        )
        if number == 0:  # every part counts from zero
            assert broken(tmp_path / "logs")[:stop] == counts[:stop]
    assert {step: batches[step] for step in expected} == expected


def test_too_many_broken_samples_stop_all_ranks(shards, tmp_path):
    results = run_ranks(train_on_shards, 2, tmp_path, shards, tmp_path / "logs", STEPS, False, 0, 0.0)
    assert [result["code"] for result in results] == ["data.too_many_broken"] * 2

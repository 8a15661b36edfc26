"""Evaluation on several ranks equals that on one exactly, for sizes that divide by nothing."""

import sys
from pathlib import Path

import pytest
from evaluation_worker import evaluated_all
from ranks_job import run_ranks

from leanclip.distributed import Ranks

sys.path.append(str(Path(__file__).parents[1] / "unit"))

from shard_files import picture, sound, write_shard

CASES = [(25, "ddp", "float64"), (25, "fsdp", "float64"), (22, "ddp", "float32"), (2, "ddp", "float64")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """25 images with one or two captions and 17 with one of 7 classes; some of both are broken."""
    folder = tmp_path_factory.mktemp("sets")
    captions = sound(25) | {"00007.jpg": b"junk"} | {f"{n:05d}.jpg": b"junk" for n in range(20, 25)}
    write_shard(folder / "captions.tar", captions)
    (folder / "classes").mkdir()
    (folder / "classes" / "classnames.txt").write_text("".join(f"thing number {n}\n" for n in range(7)))
    files = {}
    for n in range(17):
        files |= {f"{n:02d}.jpg": picture(100 + n), f"{n:02d}.cls": str(n % 7).encode()}
    write_shard(folder / "classes" / "0.tar", files | {"16.jpg": b"junk"})
    return folder


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_equal_one_process(size, folder):
    expected = evaluated_all(Ranks(0, 1, None), folder, CASES)
    whole = expected[str(CASES[0])]
    assert whole["retrieval"]["images"] == 19 and whole["retrieval"]["broken"] == 6
    assert whole["zero_shot"]["images"] == 16 and whole["zero_shot"]["broken"] == 1
    assert len({count for row in whole["zero_shot"]["confusion"] for count in row}) > 1
    for results in run_ranks(evaluated_all, size, folder, CASES):
        for case in expected:
            assert results[case] == expected[case], case

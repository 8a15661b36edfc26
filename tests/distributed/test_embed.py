"""Embeddings that several processes compute, or that were killed ten times, are those of one pass, byte by byte."""

import signal

import numpy as np
import pytest
import torch
from embed_worker import FILES, embed, embed_and_die
from ranks_job import CONTEXT, run_ranks
from shard_files import sound, write_shard
from training_worker import vit_file

from leanclip.models import ModelConfig, create_model
from leanclip.models.export import export_open_clip
from leanclip.search.store import EmbeddingStore


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    torch.manual_seed(1)
    config = ModelConfig(model=vit_file(folder, text={"context_length": 16, "vocab_size": 49408}))
    export_open_clip(create_model(config).eval(), folder / "w.safetensors")
    files = sound(61)
    files["00003.jpg"] = b"not an image"
    files["00060.json"] = b"not json"
    return folder / "w.safetensors", write_shard(folder / "data.tar", files)


@pytest.fixture(scope="module")
def one_pass(inputs, tmp_path_factory):
    return run_ranks(embed, 1, tmp_path_factory.mktemp("ranks"), *inputs, tmp_path_factory.mktemp("x") / "one")[0]


@pytest.mark.parametrize("size", [2, 3])
def test_several_processes_equal_one(size, inputs, one_pass, tmp_path):
    for result in run_ranks(embed, size, tmp_path, *inputs, tmp_path / "many"):
        assert result == one_pass


def test_killed_ten_times_and_resumed(inputs, one_pass, tmp_path):
    out, left = tmp_path / "out", []
    for kill in range(10):
        process = CONTEXT.Process(target=embed_and_die, args=(1 + kill % 7, *inputs, out))
        process.start()
        process.join(120)
        assert process.exitcode == -signal.SIGKILL
        left.append(len(EmbeddingStore(out).missing()))
    assert 0 < left[-1] < left[0] == 61  # it went on, and there was work left every time
    assert run_ranks(embed, 1, tmp_path, *inputs, out)[0] == one_pass
    done = np.load(out / FILES[2])
    assert done.tolist().count(2) == 1 and done[3] == 2

"""Features of locked towers that several processes compute together are those of one process, as are the losses."""

import pytest
import torch
from features_worker import VIEWS, train_heads
from ranks_job import run_ranks
from safetensors.torch import save_file
from shard_files import sound, write_shard
from training_worker import vit_file

from leanclip.distributed import Ranks
from leanclip.models import ModelConfig, create_model


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_share_the_work_and_get_the_same_tables(size, tmp_path, monkeypatch):
    monkeypatch.setenv("LEANCLIP_CACHE", str(tmp_path / "one"))
    files = sound(33)
    files["00003.jpg"] = b"not an image"
    shard = str(write_shard(tmp_path / "data.tar", files))
    torch.manual_seed(1)
    model = create_model(ModelConfig(model=vit_file(tmp_path, text={"context_length": 77, "vocab_size": 49408})))
    save_file(
        {name: value.contiguous() for name, value in model.clip.state_dict().items()}, tmp_path / "w.safetensors"
    )
    arguments = (shard, tmp_path / "w.safetensors")
    alone = train_heads(Ranks(0, 1, None), tmp_path, *arguments, tmp_path / "one")
    assert alone["features 0"].shape[0] == 33 * VIEWS and alone["done 0"].tolist().count(2) == 1
    results = run_ranks(train_heads, size, tmp_path, *arguments, tmp_path / "many")
    for result in results:
        assert set(result) == set(alone)
        for name, expected in alone.items():
            torch.testing.assert_close(result[name], expected, rtol=1e-3 if "features" in name else 1e-5, atol=1e-4)

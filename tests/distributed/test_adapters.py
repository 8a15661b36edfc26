"""A run with adapters on several processes: its checkpoints, merged and not, and how it resumes."""

import pytest
import torch
from nonfinite_worker import poisoned_with
from ranks_job import run_ranks
from safetensors.torch import load_file
from training_worker import vit_file

from leanclip.distributed import Ranks
from leanclip.models import ModelConfig, create_model

SETTINGS = {"ema": 0.9, "precision": "fp64", "opt": "sgdm", "lr": 0.1, "lr_scheduler": "const", "loss": "fastclip-v3",
            "lora_image": 5, "lora_text": 3}  # fmt: skip


@pytest.mark.parametrize("fsdp", [False, True])
def test_two_processes_and_one_after_them_equal_one(fsdp, tmp_path):
    """Two processes for four steps, then one for four more: as one process for eight."""
    vit = vit_file(tmp_path, text={"context_length": 77, "vocab_size": 49408})
    torch.manual_seed(0)
    weights = create_model(ModelConfig(model=vit)).clip.state_dict()
    torch.save(weights, tmp_path / "start.pt")
    settings, alone = SETTINGS | {"pretrained": str(tmp_path / "start.pt")}, Ranks(0, 1, None)
    for name in ("right", "split"):
        (tmp_path / name).mkdir()
    right = poisoned_with(alone, tmp_path / "right", [], settings)["state"]
    run_ranks(poisoned_with, 2, tmp_path / "split", [], settings | {"fsdp": fsdp, "max_steps": 4})
    half = load_file(tmp_path / "split/logs/run/checkpoints/last/open_clip_model.safetensors")
    assert half.keys() == weights.keys()
    found = poisoned_with(alone, tmp_path / "split", [], settings | {"resume": "latest"})["state"]
    torch.testing.assert_close(found, right, rtol=1e-8, atol=1e-10)
    for file in ("open_clip_model", "trained", "lora"):
        files = [
            load_file(tmp_path / folder / f"logs/run/checkpoints/last/{file}.safetensors")
            for folder in ("right", "split")
        ]
        torch.testing.assert_close(*files, rtol=1e-5, atol=1e-8)

"""The averaged weights on several processes."""

import torch
from nonfinite_worker import poisoned_with
from ranks_job import run_ranks
from weight_average_worker import embedded_around_an_evaluation

from leanclip.distributed import Ranks

SETTINGS = {"ema": 0.9, "precision": "fp64", "opt": "sgdm", "lr": 0.1, "lr_scheduler": "const", "loss": "fastclip-v3"}


def test_split_weights_have_the_average_of_one_process_and_resume_on_it(tmp_path):
    """FSDP2 on two processes for four steps, then one process for four more: as one process for eight."""
    alone = Ranks(0, 1, None)
    for name in ("right", "split"):
        (tmp_path / name).mkdir()
    right = poisoned_with(alone, tmp_path / "right", [], SETTINGS)["state"]
    run_ranks(poisoned_with, 2, tmp_path / "split", [], SETTINGS | {"fsdp": True, "max_steps": 4})
    found = poisoned_with(alone, tmp_path / "split", [], SETTINGS | {"resume": "latest"})["state"]
    assert int(found["ema updates"]) == 8
    averaged = {name: value for name, value in right.items() if name.startswith("ema ")}
    assert len(averaged) > 20
    torch.testing.assert_close({name: found[name] for name in averaged}, averaged, rtol=1e-8, atol=1e-10)
    assert not torch.allclose(found["model clip.visual.conv1.weight"], found["ema visual.conv1.weight"])


def test_an_evaluation_leaves_split_weights_as_they_were(tmp_path):
    """FSDP2 keeps the outermost weights that it gathered, which inside an evaluation are the averages."""
    for found in run_ranks(embedded_around_an_evaluation, 2, tmp_path):
        assert not torch.allclose(found["inside"], found["right"])
        assert torch.equal(found["after"], found["right"])

"""The trainer on a GPU: every precision, FSDP2, and micro-batches that fit by themselves."""

import json

import pytest
import torch

from leanclip.cli.train import run
from leanclip.distributed import Ranks
from leanclip.models import ModelConfig, create_model
from leanclip.training import fit

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

BASE = "--max-steps 12 --global-batch-size 96 --workers 0 --eval-every 0 --log-every 1 --name run --loss fastclip-v3"


def losses(folder, extra):
    run([*BASE.split(), "--logs", str(folder), *extra.split()])
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "train"]


@pytest.mark.parametrize("extra", ["--precision amp", "--precision fp32", "--micro-batch 32", "--fsdp"])
def test_every_way_trains_alike(extra, tmp_path):
    right = losses(tmp_path / "plain", "--precision amp_bf16")
    found = losses(tmp_path / "other", extra)
    assert len(found) == 12
    # The bundled model has batch normalisation, so micro-batches come near, not equal.
    assert found == pytest.approx(right, rel=0.1 if "micro" in extra else 0.03)
    assert found[-1] < found[0]


def test_the_fitted_micro_batch_fits(monkeypatch):
    """With little room the micro-batch is small, and its pass needs no more than that room."""
    model = create_model(ModelConfig(model="ViT-B-32")).cuda()
    autocast = torch.autocast("cuda", torch.bfloat16)
    room = 12 * 2**30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (room, room))
    micro = fit.fitting(model, share=4096, batch=4096, ranks=Ranks(0, 1, None), autocast=autocast)
    assert 16 <= micro < 1024
    peak = fit._peak(model, micro, autocast)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert 0.7 * room < peak + fit.PER_PARAMETER * trained + 4096 * 150528 < room

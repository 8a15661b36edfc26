"""The trainer on a GPU: every precision, FSDP2, and micro-batches that fit by themselves."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from leanclip.cli.train import run
from leanclip.distributed import Ranks
from leanclip.training import fit
from leanclip.training.predict import predict_step

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
    """With little room the micro-batch is small, and a real step in it takes what was predicted, within that room."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    import bench_plan

    room = 12 * 2**30
    case = bench_plan.Case("ViT-B-32", "fastclip-v3", 2048)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (room, room))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device=None: 0)
    samples, device = bench_plan.SAMPLES, torch.device("cuda")
    micro = fit.fitting(case.config(), samples=samples, ranks=Ranks(0, 1, None), device=device)
    monkeypatch.undo()
    assert 16 <= micro < 1024
    peak, _ = bench_plan.measure(replace(case, micro=micro), device)
    assert 0.7 * room < peak * 2**30 < room
    predicted = predict_step(case.config(), samples=samples, parts=-(-2048 // micro)).peak
    assert predicted == pytest.approx(peak * 2**30, rel=0.05)


def test_a_profile_of_a_gpu_run(tmp_path, capsys):
    run([*BASE.split(), "--logs", str(tmp_path), "--profile"])
    shown = capsys.readouterr().out
    for word in ("image tower", "backward", "MFU", "TFLOP/s", "bound by"):
        assert word in shown

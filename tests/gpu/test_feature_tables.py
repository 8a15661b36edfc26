"""Features of locked towers on a GPU: tables in its memory and CUDA graphs, against mapped tables and eager steps."""

import json

import pytest
import torch

from leanclip.cli.train import run
from leanclip.data import feature_table
from leanclip.models import ModelConfig, create_model
from leanclip.training import cuda_graph
from run_records import losses

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

VIT = {
    "embed_dim": 64,
    "vision_cfg": {"image_size": 64, "layers": 2, "width": 128, "patch_size": 16},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 128, "heads": 2, "layers": 2},
}
BASE = (
    "--max-steps 30 --global-batch-size 96 --workers 2 --eval-every 0 --log-every 1 --name run --lr 1e-3 --tau 0.05"
    " --cache-locked 2 --precision fp32 --compile off"
)


@pytest.mark.parametrize("locked", ["--lock-image", "--lock-text", "--lock-image --lock-text"])
@pytest.mark.parametrize("loss", ["fastclip-v1 --pair-weights learned", "fastclip-v3", "infonce", "siglip"])
def test_graphs_and_tables_on_the_gpu_change_no_loss(loss, locked, tmp_path, monkeypatch):
    monkeypatch.setenv("LEANCLIP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "vit.json").write_text(json.dumps(VIT))
    torch.manual_seed(0)
    torch.save(create_model(ModelConfig(model=str(tmp_path / "vit.json"))).clip.state_dict(), tmp_path / "start.pt")
    copied, captured, results = [], [], {}
    copy_to = feature_table.FeatureTable.copy_to
    monkeypatch.setattr(feature_table.FeatureTable, "copy_to", lambda *given: copied.append(copy_to(*given)))
    monkeypatch.setattr(cuda_graph.GraphedStep, "__init__", counting(cuda_graph.GraphedStep.__init__, captured))
    for name, graph, share in (("mapped", "off", 2**40), ("eager", "off", 4), ("graph", "on", 4)):
        monkeypatch.setattr(feature_table, "DEVICE_SHARE", share)
        copied.clear()
        captured.clear()
        folder = tmp_path / name
        files = f"--model {tmp_path / 'vit.json'} --pretrained {tmp_path / 'start.pt'} --logs {folder}"
        run([*BASE.split(), *files.split(), *locked.split(), "--loss", *loss.split(), "--graph", graph])
        assert len(copied) == (0 if name == "mapped" else len(locked.split()))
        assert bool(captured) == (name == "graph")
        results[name] = losses(folder / "run")
    assert len(results["mapped"]) == 30
    assert results["eager"] == pytest.approx(results["mapped"], rel=1e-4)
    assert results["graph"] == pytest.approx(results["eager"], rel=1e-3)


def counting(function, calls):
    def called(*given):
        calls.append(given)
        return function(*given)

    return called

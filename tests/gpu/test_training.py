"""The trainer on a GPU: every precision, FSDP2, and micro-batches that fit by themselves."""

import json

import pytest
import torch

from leanclip.cli.train import run
from leanclip.data import Batch, DataConfig
from leanclip.distributed import Ranks
from leanclip.losses import loss_from_config
from leanclip.models import ModelConfig
from leanclip.optim import OptimConfig, create_optimizer, weight_decay_groups
from leanclip.planning.fit import fitting
from leanclip.runs.config import ParallelConfig, RunConfig, TrainConfig
from leanclip.training.model_setup import build_model
from leanclip.training.step import training_step
from leanclip.training.step_context import StepContext

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
    """With little room the micro-batch is small, and a step on the longest captions needs no more than that room."""
    room, device = 12 * 2**30, torch.device("cuda")
    config = TrainConfig(
        model=ModelConfig(model="ViT-B-32"),
        data=DataConfig(global_batch_size=4096),
        run=RunConfig(loss="infonce", precision="amp_bf16"),
        parallel=ParallelConfig(compile="off"),
        optim=OptimConfig(lr=1e-5, wd=0.1, beta1=0.9, beta2=0.98, eps_opt=1e-6),
    )
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (room - held, room))
    micro = fitting(config, samples=10**6, ranks=Ranks(0, 1, None), device=device)
    assert 16 <= micro < 1024
    model = build_model(config).to(device).train()
    loss = loss_from_config("infonce", config.loss, num_samples=10**6).to(device)
    optimizer = create_optimizer(config.optim, [*weight_decay_groups(model, 0.1), *loss.param_groups()])
    autocast = torch.autocast("cuda", torch.bfloat16)
    context = StepContext(
        towers=model, loss=loss, optimizer=optimizer, global_batch=4096, micro_batches=-(-4096 // micro),
        autocast=autocast, texts=model.texts,
    )  # fmt: skip
    tokens = model.tokenizer(["a " * 1000]).expand(4096, -1).contiguous()
    images = torch.randint(256, (4096, 3, 224, 224), dtype=torch.uint8, device=device)
    batch = Batch(
        images=images, tokens=tokens.to(device), sample_ids=torch.arange(4096), lengths=torch.full((4096,), 77)
    )
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        assert not training_step(context, batch).skipped
    assert 0.8 * room < torch.cuda.max_memory_allocated() < room

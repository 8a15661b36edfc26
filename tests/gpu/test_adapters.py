"""Adapters on a GPU: compiled, in a CUDA graph, in micro-batches; and the memory of a step."""

import json

import pytest
import torch

from leanclip.cli.train import run
from leanclip.data import Batch
from leanclip.losses import loss_from_config
from leanclip.models import ModelConfig, create_model
from leanclip.optim import OptimConfig, create_optimizer, weight_decay_groups
from leanclip.runs.config import TrainConfig
from leanclip.training.model_setup import model_for_run
from leanclip.training.step import training_step
from leanclip.training.step_context import StepContext
from run_records import losses as losses_of_run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

VIT = {
    "embed_dim": 64,
    "vision_cfg": {"image_size": 64, "layers": 3, "width": 128, "head_width": 64, "patch_size": 16},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 128, "heads": 2, "layers": 3},
}
BASE = "--max-steps 12 --global-batch-size 96 --workers 0 --eval-every 0 --log-every 1 --name run --lr 1e-3"


def losses(folder, extra):
    run([*BASE.split(), "--logs", str(folder), *extra.split()])
    return losses_of_run(folder / "run")


def test_every_way_trains_alike(tmp_path):
    (tmp_path / "vit.json").write_text(json.dumps(VIT))
    torch.manual_seed(0)
    weights = create_model(ModelConfig(model=str(tmp_path / "vit.json"))).clip.state_dict()
    torch.save(weights, tmp_path / "start.pt")
    flags = f"--model {tmp_path / 'vit.json'} --pretrained {tmp_path / 'start.pt'} --lora-image 8 --lora-text 8"
    right = losses(tmp_path / "eager", f"{flags} --graph off --compile off")
    assert len(right) == 12 and right[-1] < right[0]
    ways = ("--graph on --compile off", "--graph off --compile on", "--graph off --compile off --micro-batch 32")
    for number, way in enumerate(ways):
        assert losses(tmp_path / str(number), f"{flags} {way}") == pytest.approx(right, rel=0.02), way


def peak(rank, batch):
    """Bytes of a step of ViT-B-16, eager, in bf16."""
    torch.cuda.empty_cache()
    device = torch.device("cuda")
    config = TrainConfig(
        model=ModelConfig(model="ViT-B-16", lora_image=rank, lora_text=rank),
        optim=OptimConfig(lr=1e-5, wd=0.1, beta1=0.9, beta2=0.98, eps_opt=1e-6),
    )
    model = model_for_run(config).to(device).train()
    loss = loss_from_config("infonce", config.loss, num_samples=batch).to(device)
    optimizer = create_optimizer(config.optim, [*weight_decay_groups(model, 0.1), *loss.param_groups()])
    context = StepContext(
        towers=model, loss=loss, optimizer=optimizer, global_batch=batch,
        autocast=torch.autocast("cuda", torch.bfloat16),
    )  # fmt: skip
    images = torch.randint(256, (batch, 3, 224, 224), dtype=torch.uint8, device=device)
    tokens = model.tokenizer(["a photograph of a dog on a beach"]).expand(batch, -1).contiguous().to(device)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        packed = Batch(images=images, tokens=tokens, sample_ids=torch.arange(batch)).pack(model.texts, 1)
        assert not training_step(context, packed).skipped
    return torch.cuda.max_memory_allocated()


def test_memory_of_a_small_batch():
    assert peak(16, 32) <= 0.65 * peak(0, 32)

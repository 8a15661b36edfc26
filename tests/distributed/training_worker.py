"""What one rank of the training tests does: three steps of a small ViT, for each of a list of cases."""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch

import leanclip
from leanclip.data import Batch
from leanclip.distributed import full_tensor, wrap_ddp, wrap_fsdp
from leanclip.models import ModelConfig, create_model
from leanclip.optim import OptimConfig, create_optimizer
from leanclip.training.step import training_step
from leanclip.training.step_context import StepContext

SAMPLES, BATCH, STEPS = 30, 13, 3
VIT = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 16, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": 8, "vocab_size": 64, "width": 32, "heads": 2, "layers": 2},
}


class Case(NamedTuple):
    loss: str
    micro: bool
    wrap: str  # ddp or fsdp
    dtype: str
    extra: str = ""  # "checkpointing", "dropout", "weights" (and groups), "lora", or another optimizer than SGD

    @property
    def name(self):
        return "-".join([self.loss, "micro" if self.micro else "direct", self.wrap, self.dtype, self.extra]).strip(
            "-"
        )


def vit_file(folder, *, vision=None, text=None):
    """The config of a small open_clip ViT without dropout; any rank may be the first to write it."""
    path = Path(folder) / f"vit-{len(vision or {})}-{len(text or {})}.json"
    if not path.exists():
        temporary = path.with_suffix(f".{os.getpid()}")
        changed = {"vision_cfg": VIT["vision_cfg"] | (vision or {}), "text_cfg": VIT["text_cfg"] | (text or {})}
        temporary.write_text(json.dumps(VIT | changed))
        temporary.rename(path)
    return str(path)


def small_vit(folder, **vision):
    torch.manual_seed(3)
    return create_model(ModelConfig(model=vit_file(folder, vision=vision)))


def batch(step, dtype):
    draw = torch.Generator().manual_seed(step)
    images = torch.randn(BATCH, 3, 16, 16, generator=draw, dtype=torch.float64).to(dtype)
    tokens = torch.randint(1, 64, (BATCH, 8), generator=draw)
    return images, tokens, torch.randperm(SAMPLES // 2, generator=draw)[:BATCH]  # half of them, so that they return


def run(case, ranks, folder):
    """Each step's loss and gradients as the optimizer sees them, and the weights and tables at the end."""
    dtype = getattr(torch, case.dtype)
    model = small_vit(folder, **({"patch_dropout": 0.5} if case.extra == "dropout" else {})).to(dtype).train()
    if case.extra == "checkpointing":
        model.checkpoint_activations()
    if case.extra == "lora":  # a rank that no number of processes divides
        model.add_adapters("image", 5)
        model.add_adapters("text", 3)
    loss = leanclip.create_loss(case.loss, num_samples=SAMPLES, tau=0.1).to(dtype)
    device = torch.device("cpu")
    if case.wrap == "fsdp" and ranks.group is not None:
        towers = wrap_fsdp(model, ranks, device, methods=("encode_image", "encode_text"))
    else:
        towers = wrap_ddp(model, ranks, device)
    groups: list[dict[str, Any]] = [{"params": [p for p in model.parameters() if p.requires_grad], "lr": 0.3}]
    groups += [{"params": group["params"], "lr": 0.05} for group in loss.param_groups()]
    if case.extra in ("adamw", "lamb"):
        # A large epsilon, or they would make steps of the rounding in gradients whose true value is zero.
        config = OptimConfig(opt=case.extra, lr=0.01, wd=0.1, beta1=0.9, beta2=0.98, eps_opt=1e-3)
        optimizer = create_optimizer(config, groups)
    else:
        optimizer = torch.optim.SGD(groups, momentum=0.9)
    named = [*model.named_parameters(), *loss.named_parameters()]
    seen: dict[str, torch.Tensor] = {}

    def remember(*_):
        for name, parameter in named:
            if parameter.grad is not None:
                seen[f"step {step} gradient of {name}"] = full_tensor(parameter.grad).clone()

    optimizer.register_step_pre_hook(remember)
    context = StepContext(
        towers=towers,
        loss=loss,
        optimizer=optimizer,
        global_batch=BATCH,
        micro_batches=-(-ranks.largest_share(BATCH) // 2) if case.micro else 1,
        grad_clip_norm=0.5,  # below the norms met here
        ranks=ranks,
    )
    mine = ranks.share(BATCH)
    torch.manual_seed(11 + ranks.rank)
    for step in range(STEPS):
        loss.set_epoch(step, STEPS)
        images, tokens, ids = (part[mine] for part in batch(step, dtype))
        weighted: dict[str, Any] = {}
        if case.extra == "weights":
            weighted = {"groups": ids % 4, "weights": (ids % 3).float()}
        result = training_step(context, Batch(images=images, tokens=tokens, sample_ids=ids, **weighted))
        assert not result.skipped
        seen[f"step {step} loss"], seen[f"step {step} norm"] = result.loss, result.grad_norm
    seen |= {f"weight {name}": full_tensor(value).clone() for name, value in model.state_dict().items()}
    return seen | {f"state {name}": full_tensor(value).clone() for name, value in loss.state_dict().items()}


def run_all(ranks, folder, cases):
    return {case.name: run(case, ranks, folder) for case in cases}

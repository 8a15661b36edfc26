"""One rank of README's loop, with a model of open_clip that is already wrapped in DDP."""

import re
from pathlib import Path

import open_clip
import torch
from torch.nn.parallel import DistributedDataParallel

import leanclip

README = Path(__file__).parents[2] / "README.md"
SAMPLES, BATCH = 16, 8
VISION = open_clip.CLIPVisionCfg(image_size=32, layers=1, width=32, head_width=16, patch_size=16)
TEXT = open_clip.CLIPTextCfg(context_length=8, vocab_size=64, width=32, heads=2, layers=1)


def train(ranks, _, biased):
    """The weights and the temperature after the loop."""
    (code,) = re.findall(r"```python\n(loss = leanclip.*?)```", README.read_text(), re.DOTALL)
    torch.manual_seed(0)
    clip = open_clip.CLIP(16, VISION, TEXT, init_logit_bias=-10 if biased else None).double()
    images, captions = torch.randn(SAMPLES, 3, 32, 32).double(), torch.randint(1, 64, (SAMPLES, 8))
    mine = [torch.arange(start, start + BATCH)[ranks.share(BATCH)] for start in range(0, SAMPLES, BATCH)]
    values = {
        "leanclip": leanclip, "torch": torch, "device": "cpu", "lr": 1e-3, "epochs": 2, "dataset": images,
        "model": clip if ranks.size == 1 else DistributedDataParallel(clip),
        "loader": [(images[ids], captions[ids], ids) for ids in mine],
    }  # fmt: skip
    exec(code, values)
    weights = torch.cat([p.detach().flatten() for name, p in clip.named_parameters() if "logit" not in name])
    return {"weights": weights, "temperature": values["loss"].temperature().detach()}

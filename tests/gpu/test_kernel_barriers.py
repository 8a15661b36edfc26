"""Compiled models have the gradients of those that are not, in every call."""

import json
from pathlib import Path

import pytest
import torch

from leanclip.models import ModelConfig, create_model
from leanclip.models.kernel_barriers import add_kernel_barriers

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
# At this size, at batch 128, torch 2.11 made open_clip's compiled image tower a kernel that loads too early.
CONFIG = {
    "embed_dim": 256,
    "vision_cfg": {"image_size": 64, "layers": 4, "width": 256, "head_width": 64, "patch_size": 8},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 256, "heads": 4, "layers": 3},
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, compiling
@pytest.mark.parametrize("whole", [True, False], ids=["open_clip's model", "leanclip's towers"])
def test_gradients_are_right_in_every_call(whole: bool, tmp_path: Path):
    """Whether it fails without barriers depends on the block sizes that autotuning picks."""
    (tmp_path / "small.json").write_text(json.dumps(CONFIG))
    torch.manual_seed(0)
    model = create_model(ModelConfig(model=str(tmp_path / "small.json"))).cuda().train()
    images, tokens = torch.randn(128, 3, 64, 64).cuda(), torch.randint(1, 40000, (128, 77)).cuda()
    tokens[:, 20] = 49407  # the end, which has the largest number

    def gradients(encode_image, encode_text):
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            image, text = encode_image(images), encode_text(tokens)
            image, text = (torch.nn.functional.normalize(each.float(), dim=-1) for each in (image, text))
        torch.nn.functional.cross_entropy(image @ text.T / 0.07, torch.arange(128).cuda()).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    right = gradients(model.clip.encode_image, model.clip.encode_text)
    if whole:
        add_kernel_barriers()
        encoders = torch.compile(model.clip.encode_image), torch.compile(model.clip.encode_text)
    else:
        model.compile_towers()
        encoders = model.encode_image, model.encode_text
    for _ in range(5):
        found = gradients(*encoders)
        assert found.keys() == right.keys()
        for name, gradient in right.items():
            assert (found[name] - gradient).norm() < 0.1 * gradient.norm() + 1e-6, name

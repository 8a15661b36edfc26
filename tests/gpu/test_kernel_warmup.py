"""The warm-up compiles every kernel that a run needs."""

import os
import subprocess
import sys

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
CODE = """
import os, sys
from dataclasses import replace
from pathlib import Path
from leanclip.runs import RunConfig, TrainConfig
from leanclip.training import set_up
from leanclip.data import DataConfig, on_device
from leanclip.training.step import training_step

def kernels():
    return set(Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin"))

loss, model = sys.argv[1:]
run, data = RunConfig(loss=loss, precision="amp_bf16", epochs=1), DataConfig(batch_size=64, workers=0)
config = TrainConfig(run=run, data=data)
config = replace(config, model=replace(config.model, model=model))
job = set_up(config)
before = kernels()
job.context.loss.set_epoch(0, 1)
for number, batch in enumerate(on_device(job.loader.epoch(0), job.device)):
    training_step(job.context, batch)
    if number == 5:
        break
later = kernels() - before
print(len(before), *later)
sys.exit(bool(later) or len(before) < 8)  # two each of images, short and long texts; the loss has two or more
"""


@pytest.mark.parametrize(("loss", "model"), [("fastclip-v3", "ViT-S-32-alt"), ("infonce", "ViT-S-32-alt")])
def test_the_first_steps_compile_nothing_more(tmp_path, loss, model):
    there = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", CODE, loss, model], env=there, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]

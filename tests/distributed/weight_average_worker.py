"""What one rank of the tests of averaged weights does."""

from pathlib import Path

import torch
from training_worker import vit_file

from leanclip.config import override
from leanclip.data.datasets import BUNDLED
from leanclip.runs import TrainConfig
from leanclip.runs.config import ParallelConfig
from leanclip.training import set_up


def embedded_around_an_evaluation(ranks, folder):
    """What the model makes of a batch while the averages are applied, then, and with its weights gathered anew."""
    vit = vit_file(folder, text={"context_length": 77, "vocab_size": 49408})
    values = {
        "train_data": str(BUNDLED / "val-*.tar"), "model": vit, "global_batch_size": 8, "epochs": 1, "ema": 0.9,
        "precision": "fp32", "device": "cpu", "workers": 0, "logs": str(Path(folder) / "logs"), "warmup": 0,
        "name": "run",
    }  # fmt: skip
    job = set_up(override(TrainConfig(parallel=ParallelConfig(fsdp=True)), values, "test"))
    assert job.ema is not None
    with torch.no_grad():
        for average in job.ema.averages.values():
            average.mul_(0.5)
    batch = next(iter(job.loader.epoch(0)))

    def embedded():
        with torch.no_grad():
            return torch.cat([job.model.encode_image(batch.images), job.model.encode_text(batch.tokens)])

    with job.ema.applied():
        inside = embedded()
    with torch.no_grad():
        after = torch.cat(job.model(batch.images, batch.tokens))
    job.model.state_dict()  # FSDP2 lets go of what it has gathered
    return {"inside": inside, "after": after, "right": embedded()}

"""One rank of the profile's test."""

import time

from training_worker import vit_file

from leanclip.config import override
from leanclip.planning import profile as module
from leanclip.runs import TrainConfig
from leanclip.training import set_up


def profile(ranks, folder, delay):
    """The parts of a profile of two steps. Rank 1 is late by `delay` seconds in every step."""
    vit = vit_file(folder, text={"context_length": 77, "vocab_size": 49408})
    values = {"model": vit, "global_batch_size": 24, "workers": 0, "device": "cpu", "loss": "fastclip-v3"}
    job = set_up(override(TrainConfig(), values | {"logs": str(folder)}, "test"))
    original = module.training_step

    def late(*arguments):
        time.sleep(delay * ranks.rank)
        return original(*arguments)

    module.training_step = late
    result = module.profile(job, steps=2)
    collectives = {
        purpose: {"exposed": c.exposed, "hidden": c.hidden, **vars(c)} for purpose, c in result.collectives.items()
    }
    trained = sum(p.nbytes for p in job.context.parameters if p.requires_grad)
    return {
        "step": result.step, "seconds": result.seconds, "breakdown": result.breakdown(), "trained": trained,
        "collectives": collectives, "rows": result.communication_table().row_count,
    }  # fmt: skip

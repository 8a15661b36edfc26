"""Runs a trainer in this process and records the time and the recall of its evaluations.

    python benchmarks/evidence/timed_trainer.py leanclip  EVENTS MODEL.json [flags of `leanclip train`]
    python benchmarks/evidence/timed_trainer.py open_clip EVENTS MODEL.json [flags of `open_clip_train.main`]

Only the functions that evaluate are wrapped. open_clip 3.3.0's trainer also gets three fixes: newer releases of
webdataset work, pandas is not required (only its CSV files need it), and compiled kernels get leanclip's barriers;
without them torch 2.11 computed wrong gradients for its model, and most of its runs did not learn (docs/log.md).
EVENTS gets one JSON line when an evaluation begins and one when it ends, with the epoch and the recalls.
"""

import functools
import importlib.machinery
import importlib.util
import inspect
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

DIRECTIONS = ("text_to_image", "image_to_text")


def record(event: str, **figures: float) -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    with Path(sys.argv[2]).open("a") as file:
        file.write(json.dumps({"event": event, "at": time.time(), **figures}) + "\n")


def leanclip(model: str, flags: list[str]) -> None:
    from leanclip.cli import main
    from leanclip.training import loop

    evaluate = loop._Trainer.evaluate

    def timed(self: Any) -> bool:
        record("evaluation begins")
        best = evaluate(self)
        metrics = self.output.log.results["val"].metrics
        record(
            "evaluation ends",
            epoch=round(self.epoch, 6),
            **{name: metrics[f"{name}_recall@10"] for name in DIRECTIONS},
        )
        return best

    loop._Trainer.evaluate = timed
    sys.exit(main(["train", "--model", model, *flags]))


def open_clip(model: str, flags: list[str]) -> None:
    import open_clip

    from leanclip.models.kernel_barriers import add_kernel_barriers

    if importlib.util.find_spec("pandas") is None:
        sys.modules["pandas"] = importlib.util.module_from_spec(importlib.machinery.ModuleSpec("pandas", None))
    from open_clip_train import data as loading
    from open_clip_train import main as trainer

    # Since 0.2.96 webdataset marks the end of a shard, which open_clip 3.3.0 takes for a file (its issue 935).
    if "eof_value" in inspect.signature(loading.tar_file_expander).parameters:
        loading.tar_file_expander = functools.partial(loading.tar_file_expander, eof_value=None)

    if "--torchcompile" in flags:
        add_kernel_barriers()
    open_clip.add_model_config(model)
    evaluate, train_one_epoch = trainer.evaluate, trainer.train_one_epoch

    def timed(model: Any, data: Any, epoch: int, *rest: Any, **named: Any) -> dict[str, float]:
        record("evaluation begins")
        metrics = evaluate(model, data, epoch, *rest, **named)
        record("evaluation ends", epoch=epoch, **{name: float(metrics[f"{name}_R@10"]) for name in DIRECTIONS})
        return metrics

    def first_epoch(*positional: Any, **named: Any) -> None:
        trainer.train_one_epoch = train_one_epoch
        record("evaluation begins")  # there is none before training: these events mark the end of the start-up
        record("evaluation ends", epoch=0)
        train_one_epoch(*positional, **named)

    trainer.evaluate, trainer.train_one_epoch = timed, first_epoch
    trainer.main(["--model", Path(model).stem, *flags])


if __name__ == "__main__":
    {"leanclip": leanclip, "open_clip": open_clip}[sys.argv[1]](sys.argv[3], sys.argv[4:])

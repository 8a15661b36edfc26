"""Runs a trainer in this process and writes down when it evaluates, and what it finds.

    python benchmarks/evidence/stopwatch.py leanclip  EVENTS MODEL.json [flags of `leanclip train`]
    python benchmarks/evidence/stopwatch.py open_clip EVENTS MODEL.json [flags of `open_clip_train.main`]

Nothing of the trainers is changed but this: their functions that evaluate are called between two looks at the clock,
and open_clip's is made to run with newer releases of webdataset, without pandas, which only its CSV files need, and
with the barriers that leanclip puts into compiled kernels: without them torch 2.11 gave its model wrong gradients,
and most of its runs did not learn (docs/log.md).
EVENTS gets one JSON line a look: what began or ended, the time, and after an evaluation the epoch and the recalls.
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


class Stopwatch:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, event: str, **facts: float) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        with self.path.open("a") as file:
            file.write(json.dumps({"event": event, "at": time.time(), **facts}) + "\n")


def leanclip(watch: Stopwatch, model: str, arguments: list[str]) -> None:
    from leanclip.cli import main
    from leanclip.training import loop

    evaluate = loop._Trainer.evaluate

    def timed(self: Any) -> bool:
        watch("evaluation begins")
        best = evaluate(self)
        metrics = self.log.results["val"].metrics
        recalls = {name: metrics[f"{name}_recall@10"] for name in ("text_to_image", "image_to_text")}
        watch("evaluation ends", epoch=self.epochs_done, **recalls)
        return best

    loop._Trainer.evaluate = timed
    sys.exit(main(["train", "--model", model, *arguments]))


def open_clip(watch: Stopwatch, model: str, arguments: list[str]) -> None:
    import open_clip

    from leanclip.models.kernel_barriers import add_kernel_barriers

    if importlib.util.find_spec("pandas") is None:
        sys.modules["pandas"] = importlib.util.module_from_spec(importlib.machinery.ModuleSpec("pandas", None))
    from open_clip_train import data as loading
    from open_clip_train import main as trainer

    # Since 0.2.96 webdataset marks the end of a shard, which open_clip 3.3.0 takes for a file (its issue 935).
    if "eof_value" in inspect.signature(loading.tar_file_expander).parameters:
        loading.tar_file_expander = functools.partial(loading.tar_file_expander, eof_value=None)

    if "--torchcompile" in arguments:
        add_kernel_barriers()
    open_clip.add_model_config(model)
    evaluate, train_one_epoch = trainer.evaluate, trainer.train_one_epoch

    def timed(model: Any, data: Any, epoch: int, *rest: Any, **named: Any) -> dict[str, float]:
        watch("evaluation begins")
        metrics = evaluate(model, data, epoch, *rest, **named)
        recalls = {name: float(metrics[f"{name}_R@10"]) for name in ("text_to_image", "image_to_text")}
        watch("evaluation ends", epoch=epoch, **recalls)
        return metrics

    def first_timed(*given: Any, **named: Any) -> None:
        trainer.train_one_epoch = train_one_epoch
        watch("evaluation begins")  # none before training: the clock shows that it is ready
        watch("evaluation ends", epoch=0)
        train_one_epoch(*given, **named)

    trainer.evaluate, trainer.train_one_epoch = timed, first_timed
    trainer.main(["--model", Path(model).stem, *arguments])


if __name__ == "__main__":
    name, events, config, *flags = sys.argv[1:]
    {"leanclip": leanclip, "open_clip": open_clip}[name](Stopwatch(Path(events)), config, flags)

"""Evaluation during training: recall and zero-shot accuracy, logged and printed."""

import json
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from typing import Any

from leanclip.data import Subset
from leanclip.errors import UserError
from leanclip.evaluation import (
    EvaluationSettings,
    classify,
    earlier_best,
    embed,
    hardest_negatives,
    recall_text,
    retrieval_metrics,
    retrieval_panel,
    summary,
)
from leanclip.filesystem import read_json
from leanclip.runs.metrics import BEFORE, finite
from leanclip.training.run_output import RunOutput
from leanclip.training.setup import Job


class HeldOutData:
    """The held-out samples and labelled sets of a run. All ranks call it together."""

    def __init__(self, job: Job, output: RunOutput) -> None:
        self.job, self.output, self.log = job, output, output.log
        self.noted: set[str] = set()  # sets whose data were described, once in a run
        self.settings = EvaluationSettings(
            device=job.device, autocast=job.context.autocast, workers=job.config.data.workers
        )

    def __call__(self, step: int, epoch: float) -> dict[str, float]:
        """The metrics by name, empty without held-out data. With an average of the weights, of the average."""
        job, metrics = self.job, dict[str, float]()
        with nullcontext() if job.ema is None else job.ema.applied():
            if job.data.val is not None:
                metrics |= self.retrieval(job.data.val, step, epoch)
            if job.zero_shot:
                metrics |= self.zero_shot(step, epoch)
        return metrics

    def retrieval(self, data: Subset, step: int, epoch: float) -> dict[str, float]:
        """Recall on the held-out data, and a panel of examples."""
        job = self.job
        embedded = embed(job.model, data, self.settings, features=job.val_features)
        title = "the held-out data"
        if title not in self.noted and (shared := embedded.shared_captions(title)):
            self.output.print(f"warning: {shared}")
        self.note_broken(title, embedded.broken, of=len(data))
        metrics = dict(retrieval_metrics(embedded.images, embedded.texts, embedded.image_of_text))
        if self.log is not None:
            self.log_metrics("val", metrics, step, epoch, broken=embedded.broken)
            panel = {
                "step": step,
                "set": "val",
                "images": retrieval_panel(data, embedded),
                "hardest": hardest_negatives(data, embedded),
            }
            panel["earlier"] = self.earlier_best(panel)
            self.output.write(self.output.directory.panel, json.dumps(finite(panel)))
        self.output.print(
            f"step {step}{self.averaged}: held-out recall@10"
            f" text-to-image {recall_text(metrics, 'text_to_image')}, image-to-text"
            f" {recall_text(metrics, 'image_to_text')}"
        )
        return metrics

    def earlier_best(self, panel: Mapping[str, Any]) -> list[dict[str, Any]]:
        """From the panel in the run directory, if that shows the same images."""
        with suppress(UserError, KeyError, TypeError, ValueError, IndexError, AttributeError):  # missing or damaged
            previous = read_json(self.output.directory.panel)
            if [entry["image"] for entry in previous["images"]] == [entry["image"] for entry in panel["images"]]:
                return earlier_best(previous, panel["step"])
        return []

    def zero_shot(self, step: int, epoch: float) -> dict[str, float]:
        """Accuracy and confusions on the labelled sets."""
        job, metrics, sets = self.job, dict[str, float](), {}
        for labelled, prompts in job.zero_shot:
            result = classify(job.model, labelled, prompts, self.settings)
            metrics |= {f"{result.name}/{name}": value for name, value in result.metrics().items()}
            sets[result.name] = result.to_json()
            self.log_metrics(result.name, result.metrics(), step, epoch, broken=result.broken)
            self.note_broken(result.name, result.broken, of=result.images + result.broken)
            self.output.print(f"step {step}{self.averaged}: {summary(result)}")
        self.output.write(self.output.directory.zero_shot, json.dumps({"step": step, "sets": sets}))
        return metrics

    def note_broken(self, name: str, broken: int, *, of: int) -> None:
        """Say at the first evaluation of a set how many of its samples are broken."""
        if broken and name not in self.noted:
            self.output.print(f"warning: {broken:,} of the {of:,} samples of {name} are broken and are left out")
        self.noted.add(name)

    def log_metrics(self, name: str, metrics: Mapping[str, float], step: int, epoch: float, *, broken: int) -> None:
        if self.log is not None:
            weights = None if self.job.ema is None else "ema"
            if step == 0 and self.job.config.model.from_weights:
                weights = BEFORE
            self.log.evaluation(step=step, epoch=epoch, name=name, metrics=metrics, weights=weights, broken=broken)

    @property
    def averaged(self) -> str:
        """For the printed lines: which weights were evaluated."""
        return "" if self.job.ema is None else ", averaged weights"

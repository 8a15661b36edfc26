"""Evaluation during training: recall and zero-shot accuracy of the weights as they are, written down and told."""

import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path

from leanclip.data import Subset
from leanclip.evaluation import (
    EvaluationSettings,
    classify,
    embed,
    hardest_negatives,
    retrieval_metrics,
    retrieval_panel,
    summary,
)
from leanclip.filesystem import write_atomically
from leanclip.runs.metrics import MetricsLog, finite
from leanclip.runs.run_directory import RunDirectory
from leanclip.training.setup import Job


class HeldOutData:
    """What a run is measured on: its held-out samples and its labelled sets. All ranks call it together."""

    def __init__(
        self,
        job: Job,
        directory: RunDirectory,
        log: MetricsLog | None,  # on the rank that writes
        tell: Callable[[str], None],
    ) -> None:
        self.job, self.directory, self.log, self.tell = job, directory, log, tell
        self.told_of_captions = False
        self.settings = EvaluationSettings(
            device=job.device, autocast=job.context.autocast, workers=job.config.data.workers
        )

    def __call__(self, step: int, epoch: float) -> dict[str, float]:
        """The figures by name; none without anything to measure on. With an average, its weights are measured."""
        job, found = self.job, dict[str, float]()
        with nullcontext() if job.ema is None else job.ema.applied():
            if job.data.val is not None:
                found |= self.retrieval(job.data.val, step, epoch)
            if job.zero_shot:
                found |= self.zero_shot(step, epoch)
        return found

    def retrieval(self, data: Subset, step: int, epoch: float) -> dict[str, float]:
        """Recall on the held-out data, and pictures of it."""
        job = self.job
        embedded = embed(job.model, data, self.settings)
        if not self.told_of_captions and (shared := embedded.shared_captions("the held-out data")):
            self.tell(f"warning: {shared}")
        self.told_of_captions = True
        metrics = dict(retrieval_metrics(embedded.images, embedded.texts, embedded.image_of_text))
        if self.log is not None:
            self.write_down("val", metrics, step, epoch)
            panel = {
                "step": step,
                "set": "val",
                "images": retrieval_panel(data, embedded),
                "hardest": hardest_negatives(data, embedded),
            }
            write_if_possible(self.directory.panel, json.dumps(finite(panel)), self.tell)
        self.tell(
            f"step {step}{self.averaged}: held-out recall@10"
            f" text-to-image {metrics['text_to_image_recall@10']:.1%},"
            f" image-to-text {metrics['image_to_text_recall@10']:.1%} (chance {metrics['chance@10']:.1%})"
        )
        return metrics

    def zero_shot(self, step: int, epoch: float) -> dict[str, float]:
        """Accuracy on the labelled sets, and what was taken for what."""
        job, metrics, sets = self.job, dict[str, float](), {}
        for labelled, prompts in job.zero_shot:
            found = classify(job.model, labelled, prompts, self.settings)
            metrics |= {f"{found.name}/{name}": value for name, value in found.metrics().items()}
            sets[found.name] = found.to_json()
            self.write_down(found.name, found.metrics(), step, epoch)
            self.tell(f"step {step}{self.averaged}: {summary(found)}")
        if self.log is not None:
            write_if_possible(self.directory.zero_shot, json.dumps({"step": step, "sets": sets}), self.tell)
        return metrics

    def write_down(self, name: str, metrics: Mapping[str, float], step: int, epoch: float) -> None:
        if self.log is not None:
            weights = None if self.job.ema is None else "ema"
            self.log.evaluation(step=step, epoch=epoch, name=name, metrics=metrics, weights=weights)

    @property
    def averaged(self) -> str:
        """What a line about an evaluation must say of the weights."""
        return "" if self.job.ema is None else ", averaged weights"


def write_if_possible(path: Path, text: str, tell: Callable[[str], None]) -> None:
    """A file that is nice to have: without it the run goes on."""
    try:
        write_atomically(path, text)
    except OSError as error:
        tell(f"warning: {path.name} was not written ({error.strerror})")

"""Evaluation during training: recall and zero-shot accuracy, logged and printed."""

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
    """The held-out samples and labelled sets of a run. All ranks call it together."""

    def __init__(
        self,
        job: Job,
        directory: RunDirectory,
        log: MetricsLog | None,  # on the rank that writes
        print_line: Callable[[str], None],
    ) -> None:
        self.job, self.directory, self.log, self.print_line = job, directory, log, print_line
        self.captions_checked = False
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
        embedded = embed(job.model, data, self.settings)
        if not self.captions_checked and (shared := embedded.shared_captions("the held-out data")):
            self.print_line(f"warning: {shared}")
        self.captions_checked = True
        metrics = dict(retrieval_metrics(embedded.images, embedded.texts, embedded.image_of_text))
        if self.log is not None:
            self.log_metrics("val", metrics, step, epoch)
            panel = {
                "step": step,
                "set": "val",
                "images": retrieval_panel(data, embedded),
                "hardest": hardest_negatives(data, embedded),
            }
            write_if_possible(self.directory.panel, json.dumps(finite(panel)), self.print_line)
        self.print_line(
            f"step {step}{self.averaged}: held-out recall@10"
            f" text-to-image {metrics['text_to_image_recall@10']:.1%},"
            f" image-to-text {metrics['image_to_text_recall@10']:.1%} (chance {metrics['chance@10']:.1%})"
        )
        return metrics

    def zero_shot(self, step: int, epoch: float) -> dict[str, float]:
        """Accuracy and confusions on the labelled sets."""
        job, metrics, sets = self.job, dict[str, float](), {}
        for labelled, prompts in job.zero_shot:
            result = classify(job.model, labelled, prompts, self.settings)
            metrics |= {f"{result.name}/{name}": value for name, value in result.metrics().items()}
            sets[result.name] = result.to_json()
            self.log_metrics(result.name, result.metrics(), step, epoch)
            self.print_line(f"step {step}{self.averaged}: {summary(result)}")
        if self.log is not None:
            write_if_possible(self.directory.zero_shot, json.dumps({"step": step, "sets": sets}), self.print_line)
        return metrics

    def log_metrics(self, name: str, metrics: Mapping[str, float], step: int, epoch: float) -> None:
        if self.log is not None:
            weights = None if self.job.ema is None else "ema"
            self.log.evaluation(step=step, epoch=epoch, name=name, metrics=metrics, weights=weights)

    @property
    def averaged(self) -> str:
        """For the printed lines: which weights were evaluated."""
        return "" if self.job.ema is None else ", averaged weights"


def write_if_possible(path: Path, text: str, print_line: Callable[[str], None]) -> None:
    """A file that the run does not need: an error is printed and ignored."""
    try:
        write_atomically(path, text)
    except OSError as error:
        print_line(f"warning: {path.name} was not written ({error.strerror})")

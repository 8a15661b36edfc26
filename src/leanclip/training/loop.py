"""The training loop: batches in, steps taken, numbers out."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from leanclip.data import Batch, BrokenCount, Subset, on_device
from leanclip.distributed import LEDGER, Traffic, traffic
from leanclip.errors import UserError
from leanclip.evaluation import classify, embed, hardest_negatives, retrieval_metrics, retrieval_panel, summary
from leanclip.optim import scheduled, set_learning_rate
from leanclip.training.checkpoint import Position, save_best, save_checkpoint
from leanclip.training.health import HealthCheck
from leanclip.training.histograms import state_histograms
from leanclip.training.metrics import MetricsLog, finite, memory, to_host
from leanclip.training.model_card import model_card
from leanclip.training.progress import TrainingProgress
from leanclip.training.run_directory import CARD_FILE, RunDirectory, environment, write_atomically
from leanclip.training.setup import Job
from leanclip.training.step import StepResult, training_step
from leanclip.training.trackers import open_trackers

MANY_SAMPLES = 2000  # decoded in a few seconds


@dataclass
class _Clock:
    """Time of the run and of its current stretch between two log lines."""

    started: float
    before: float = 0.0  # seconds of the run before it was resumed
    waited: float = 0.0
    samples: int = 0

    def __post_init__(self) -> None:
        self.mark = time.perf_counter()

    def total(self) -> float:
        return self.before + time.perf_counter() - self.started

    def lap(self) -> tuple[float, float]:
        """Samples per second and the share of time spent waiting for data since the last lap."""
        now = time.perf_counter()
        elapsed = max(now - self.mark, 1e-9)
        rate, wait = self.samples / elapsed, self.waited / elapsed
        self.mark, self.waited, self.samples = now, 0.0, 0
        return rate, min(wait, 1.0)


def train(
    job: Job,
    directory: RunDirectory,
    console: Console | None = None,
    alive: Callable[[], None] = lambda: None,
) -> Path:
    """Run a job to its end. Returns the last checkpoint.

    All ranks run it; the first one speaks and writes. `alive` is called whenever this process has come further.
    """
    position = job.position
    log = open_log(job, directory)
    if log is None:
        with TrainingProgress(job.steps, position.step, Console(quiet=True)) as progress:
            return _Trainer(job, directory, None, progress, position, alive).run()
    directory.describe(status="running")
    failed = True
    try:
        with TrainingProgress(job.steps, position.step, console) as progress:
            for tracker in log.trackers:
                if tracker.place:
                    progress.print(f"wandb: {tracker.place}")
            last = _Trainer(job, directory, log, progress, position, alive).run()
        failed = False
    finally:
        directory.describe(status="failed" if failed else "finished")
        log.close(failed=failed)
    return last


def open_log(job: Job, directory: RunDirectory) -> MetricsLog | None:
    """The log, on the process that writes. A tracker that does not start stops all of them."""
    resume_at = None if job.resume_from is None else job.position.step
    opened: list[MetricsLog] = []

    def open_it() -> None:
        trackers = open_trackers(job.config, directory, resume_at=resume_at)
        opened.append(MetricsLog(directory.metrics, trackers, resume_at=resume_at))

    job.ranks.once(open_it)
    return opened[0] if opened else None


class _Trainer:
    def __init__(
        self,
        job: Job,
        directory: RunDirectory,
        log: MetricsLog | None,  # on the rank that writes
        progress: TrainingProgress,
        position: Position,
        alive: Callable[[], None],
    ) -> None:
        self.job, self.directory, self.log, self.progress, self.alive = job, directory, log, progress, alive
        self.step, self.samples, self.best = position.step, position.samples, position.best
        self.epoch, self.epoch_step = position.epoch, position.epoch_step
        self.skipped = 0
        self.sent: Traffic | None = None
        self.broken = BrokenCount(job.config.data.max_broken)
        self.met: list[tuple[int, dict[str, int], tuple[str, ...]]] = []  # and not counted yet
        self.clock = _Clock(time.perf_counter(), before=position.seconds)
        self.health = HealthCheck(job.config, batch=job.loader.batch)

    def run(self) -> Path:
        job, run = self.job, self.job.config.run
        job.model.train()
        job.loss.train()
        if self.step == 0:
            self.evaluate()
        self.texts()
        saved: Path | None = None
        while self.step < job.steps:
            for batch in self.batches():
                job.loss.set_epoch(self.epoch + self.epoch_step / job.loader.steps_per_epoch, job.epochs)
                result = self.take_step(batch)
                finished = self.step == job.steps
                if self.step % run.log_every == 0 or finished:
                    self.report(result)
                if finished or (run.eval_every and self.step % run.eval_every == 0):
                    self.evaluate()
                self.alive()
                saved = None
                if finished or (run.save_every and self.step % run.save_every == 0):
                    saved = self.save()
                if finished:
                    break
            self.epoch, self.epoch_step = self.epoch + 1, 0
        return saved or self.save()

    def batches(self) -> Iterator[Batch]:
        """The rest of this epoch's batches, on the device, with the time spent waiting for them counted."""
        batches = self.job.loader.epoch(self.epoch, start=self.epoch_step)
        batches = on_device(batches, self.job.device, self.job.dtype)
        while True:
            began = time.perf_counter()
            batch = next(batches, None)
            self.clock.waited += time.perf_counter() - began
            if batch is None:
                return
            self.met.append((len(batch), dict(batch.broken), batch.examples))
            if self.job.ranks.size == 1:
                self.count_broken()
            yield batch

    def count_broken(self) -> None:
        """What all processes met since the last time; too many broken samples end the run on all of them alike."""
        met, self.met = self.met, []
        try:
            for everyones in self.job.ranks.everyones(met):
                for entry in everyones:
                    self.broken.add(*entry)
        except UserError as error:
            error.told = not self.job.ranks.first
            raise

    def take_step(self, batch: Batch) -> StepResult:
        job, optim = self.job, self.job.config.optim
        assert optim.lr is not None
        self.lr = scheduled(optim, self.step, steps=job.steps, steps_per_epoch=job.loader.steps_per_epoch)
        set_learning_rate(job.optimizer, self.lr, peak=optim.lr)
        LEDGER.clear()
        began = time.perf_counter()
        result = training_step(job.pieces, batch)
        if job.compiled and self.step == job.position.step:
            took = time.perf_counter() - began
            self.progress.print(f"the first step took {took:.0f} s, to compile the towers (--compile off does not)")
        self.skipped += result.skipped
        if result.skipped:
            scale = job.pieces.scale
            advice = (
                f"the loss scale is now {scale.value:g}" if scale.grows else "lower --lr, or set --grad-clip-norm 1"
            )
            self.progress.print(
                f"warning: step {self.step + 1} was skipped, its gradient is not finite"
                f" ({self.skipped} so far): {advice}"
            )
        self.step += 1
        self.epoch_step += 1
        self.samples += job.loader.batch
        self.clock.samples += job.loader.batch
        if job.ranks.size > 1 and not self.sent:
            self.tell_traffic()
        return result

    def tell_traffic(self) -> None:
        """Once a run: what its loss sends in a step, beside what others would."""
        self.sent = traffic(LEDGER, ranks=self.job.ranks.size)
        if self.log is not None:
            self.directory.describe(communication=self.sent._asdict())
        own, openclip, disco = (f"{amount / 1e6:,.2f} MB" for amount in self.sent)
        self.progress.print(
            f"{self.job.ranks.size} processes; for the loss each receives {own} a step"
            f" (OpenCLIP's local loss {openclip}, DisCo-CLIP {disco})"
        )

    @property
    def epochs_done(self) -> float:
        return round(self.epoch + self.epoch_step / self.job.loader.steps_per_epoch, 6)

    def report(self, result: StepResult) -> None:
        if self.job.ranks.size > 1:
            self.count_broken()
        if self.log is None:
            return
        metrics = to_host({"loss": result.loss, "grad_norm": result.grad_norm} | dict(result.metrics))
        rate, wait = self.clock.lap()
        seconds = self.clock.total()
        self.log.train(
            step=self.step, epoch=self.epochs_done, samples=self.samples, seconds=round(seconds, 3), lr=self.lr,
            samples_per_second=rate, data_wait=wait, skipped_steps=self.skipped, **self.communication(),
            **self.broken.metrics(), **memory(self.job.device), **metrics,
        )  # fmt: skip
        left = (self.job.steps - self.step) * self.job.loader.batch / max(rate, 1e-9)
        line = f"loss {metrics['loss']:.4f}  tau {metrics['tau']:.4f}  {rate:,.0f} samples/s  data wait {wait:.0%}"
        self.progress.update(self.step, line, left)
        for warning in self.health(self.step, metrics):
            self.progress.print(f"warning: {warning}")

    def communication(self) -> dict[str, float]:
        """What the last step's loss sent, and the scale of its fp16 gradients."""
        found: dict[str, float] = {}
        if self.job.ranks.size > 1:
            calls, size = LEDGER.of_loss()
            found |= {"loss_collectives": calls, "loss_bytes": size}
        if self.job.pieces.scale.grows:
            found["loss_scale"] = self.job.pieces.scale.value
        return found

    def log_state(self) -> None:
        """How the per-sample numbers are spread; all ranks count together."""
        found = state_histograms(self.job.loss)
        if self.log is not None:
            self.log.histograms(step=self.step, epoch=self.epochs_done, found=found)

    def evaluate(self) -> None:
        job = self.job
        if self.step:
            self.log_state()
        found: dict[str, float] = {}
        if job.data.val is not None:
            found |= self.retrieval(job.data.val)
        if job.zero_shot:
            found |= self.zero_shot()
        if not found:
            return
        value = found.get(job.config.run.best_metric)
        if value is not None and self.step > 0 and (self.best is None or value > self.best):
            self.best = value
            save_best(self.directory.checkpoints, job.model, job.loss, self.texts())
        self.alive()
        self.clock.lap()

    def retrieval(self, data: Subset) -> dict[str, float]:
        """Recall on the held-out data, and pictures of it."""
        job = self.job
        embedded = embed(
            job.model, data, device=job.device, autocast=job.pieces.autocast, workers=self.workers_for(len(data))
        )
        metrics = dict(retrieval_metrics(embedded.images, embedded.texts, embedded.image_of_text))
        if self.log is not None:
            self.log.evaluation(step=self.step, epoch=self.epochs_done, name="val", metrics=metrics)
            panel = {
                "step": self.step,
                "set": "val",
                "images": retrieval_panel(data, embedded),
                "hardest": hardest_negatives(data, embedded),
            }
            write_atomically(self.directory.panel, json.dumps(finite(panel)))
        self.progress.print(
            f"step {self.step}: held-out recall@10 text-to-image {metrics['text_to_image_recall@10']:.1%}, "
            f"image-to-text {metrics['image_to_text_recall@10']:.1%} (chance {metrics['chance@10']:.1%})"
        )
        return metrics

    def zero_shot(self) -> dict[str, float]:
        """Accuracy on the labelled sets, and what was taken for what."""
        job, metrics, sets = self.job, {}, {}
        for labelled, prompts in job.zero_shot:
            found = classify(
                job.model, labelled, prompts, device=job.device, autocast=job.pieces.autocast,
                workers=self.workers_for(len(labelled)),
            )  # fmt: skip
            metrics |= {f"{found.name}/{name}": value for name, value in found.metrics().items()}
            sets[found.name] = found.to_json()
            if self.log is not None:
                self.log.evaluation(step=self.step, epoch=self.epochs_done, name=found.name, metrics=found.metrics())
            self.progress.print(f"step {self.step}: {summary(found)}")
        if self.log is not None:
            write_atomically(self.directory.zero_shot, json.dumps({"step": self.step, "sets": sets}))
        return metrics

    def workers_for(self, samples: int) -> int:
        """Starting processes is worth it for large sets only."""
        return self.job.config.data.workers if samples > MANY_SAMPLES else 0

    def save(self) -> Path:
        job = self.job
        full = self.epoch_step == job.loader.steps_per_epoch
        position = Position(
            step=self.step,
            epoch=self.epoch + full,
            epoch_step=0 if full else self.epoch_step,
            samples=self.samples,
            global_batch=job.loader.batch,
            seconds=self.clock.total(),
            best=self.best,
        )
        return save_checkpoint(
            self.directory.checkpoints, job.model, job.loss, job.optimizer, job.pieces.scale, position, self.texts()
        )

    def texts(self) -> dict[str, str]:
        """What lies beside the weights: the model card, which the run gets too, and the configuration."""
        if self.log is None:
            return {}
        card = model_card(self.directory.facts(), self.log.results, step=self.step)
        write_atomically(self.directory.card, card)
        config = self.directory.config
        return {CARD_FILE: card} | ({config.name: config.read_text()} if config.is_file() else {})


def describe(job: Job, version: str) -> dict[str, object]:
    """The facts of a job for run.json."""
    config = job.config
    return {
        "name": config.run.name,
        "version": version,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "model": config.model.model,
        "loss": config.run.loss,
        "parameters": sum(parameter.numel() for parameter in job.model.parameters()),
        "train_samples": len(job.data.train),
        "left_out": dict(job.data.train.source.broken),
        "global_batch": config.data.global_batch_size,
        "processes": job.ranks.size,
        "micro_batches": job.pieces.parts,
        "steps": job.steps,
        "epochs": config.run.epochs,
        "environment": environment(job.device),
        "notes": [job.data.note] if job.data.note else [],
    }

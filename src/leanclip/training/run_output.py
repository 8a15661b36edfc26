"""What a run prints, and what it writes into its directory beside checkpoints. The first rank writes for all."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console

from leanclip.checkpointing.checkpoint import Position
from leanclip.data.feature_table import Features
from leanclip.distributed import TRAFFIC_COUNTER, compare_traffic
from leanclip.filesystem import write_atomically, writing
from leanclip.losses.pair_weights import Refit
from leanclip.models.towers.lora import is_adapter
from leanclip.progress import TrainingProgress, make_console
from leanclip.runs.health import HealthCheck
from leanclip.runs.histograms import state_histograms
from leanclip.runs.metrics import MetricsLog, memory
from leanclip.runs.model_card import model_card
from leanclip.runs.run_directory import CARD_FILE, RunDirectory, environment
from leanclip.runs.trackers import open_trackers
from leanclip.training.setup import Job


class Clock:
    """The time of the run, and since the last log line."""

    def __init__(self, before: float) -> None:
        """`before`: seconds of the run before it was resumed."""
        self.mark = time.perf_counter()
        self.started, self.waited, self.samples = self.mark - before, 0.0, 0

    def total(self) -> float:
        return time.perf_counter() - self.started

    def lap(self) -> tuple[float, float]:
        """Samples per second, and the share of time spent waiting for data, since the last call."""
        now = time.perf_counter()
        elapsed = max(now - self.mark, 1e-9)
        rate, wait = self.samples / elapsed, self.waited / elapsed
        self.mark, self.waited, self.samples = now, 0.0, 0
        return rate, min(wait, 1.0)


class RunOutput:
    def __init__(self, job: Job, directory: RunDirectory, log: MetricsLog | None, progress: TrainingProgress) -> None:
        self.job, self.directory, self.progress, self.print = job, directory, progress, progress.console.print
        self.log = log  # on the rank that writes
        self.clock, self.status = Clock(job.position.seconds), "failed"
        self.health = HealthCheck(job.config, batch=job.loader.batch)
        # Read once: what others write into the directory during the run does not end it.
        self.facts, config = directory.facts(), directory.config
        self.texts = {config.name: config.read_text(errors="replace")} if log and config.is_file() else {}

    def step(self, at: Position, epoch: float, metrics: Mapping[str, float | str], broken: Mapping[str, int]) -> None:
        """A line of the log and on the terminal. `metrics` are those of the step."""
        assert self.log is not None
        rate, wait = self.clock.lap()
        self.log.train(
            step=at.step, epoch=epoch, samples=at.samples, seconds=round(self.clock.total(), 3),
            samples_per_second=rate, data_wait=wait, skipped_steps=at.skipped, **self.communication(), **broken,
            **memory(self.job.device), **metrics,
        )  # fmt: skip
        with suppress(OSError):  # tried again at the next line
            self.directory.remove_replaced()
        left = (self.job.steps - at.step) * self.job.loader.batch / max(rate, 1e-9)
        line = f"loss {metrics['loss']:.4f}  tau {metrics['tau']:.4f}  {rate:,.0f} samples/s  data wait {wait:.0%}"
        self.progress.at(at.step, line, left)
        for warning in self.health(at.step, metrics):
            self.print(f"warning: {warning}")

    def communication(self) -> dict[str, float]:
        """What the last step's loss sent, and the scale of its fp16 gradients."""
        metrics: dict[str, float] = {}
        if self.job.context.ranks.size > 1:
            calls, size = TRAFFIC_COUNTER.loss_total()
            metrics |= {"loss_collectives": calls, "loss_bytes": size}
        if self.job.context.scale.grows:
            metrics["loss_scale"] = self.job.context.scale.value
        return metrics

    def traffic(self) -> None:
        """What the loss received in the last step, compared with other methods."""
        sent = compare_traffic(TRAFFIC_COUNTER, ranks=self.job.context.ranks.size)
        if self.log is not None:
            with suppress(OSError):
                self.directory.describe(communication=sent._asdict())
        ours, openclip, disco = (f"{amount / 1e6:,.2f} MB" for amount in sent)
        self.print(
            f"{self.job.context.ranks.size} processes; for the loss each receives {ours} a step"
            f" (OpenCLIP's local loss {openclip}, DisCo-CLIP {disco})"
        )

    def histograms(self, step: int, epoch: float) -> None:
        """Of the per-sample state. All ranks call it together."""
        histograms = state_histograms(self.job.context.loss)
        if self.log is not None:
            self.log.histograms(step=step, epoch=epoch, histograms=histograms)

    def pair_weights(self, step: int, epoch: float, refit: Refit) -> None:
        """The weights of pairs from this step on."""
        self.print(f"step {step}: {refit.described}")
        if self.log is not None:
            self.log.pair_weights(step=step, epoch=epoch, refit=refit)

    def card_and_config(self, step: int) -> dict[str, str]:
        """The files beside saved weights: the config, and the model card, which the run directory gets, too."""
        if self.log is None:
            return {}
        self.log.flush()
        card = model_card(self.facts, self.log.results, step=step)
        self.write(self.directory.card, card)
        return {CARD_FILE: card} | self.texts

    def write(self, path: Path, text: str) -> None:
        """A file that the run does not need, on the rank that writes: an error is printed and ignored."""
        try:
            if self.log is not None:
                write_atomically(path, text)
        except OSError as error:
            self.print(f"warning: {path.name} was not written ({error.strerror})")


@contextmanager
def open_output(job: Job, directory: RunDirectory, console: Console | None) -> Iterator[RunOutput]:
    """At the end, run.json gets the status of the output. All ranks call it together."""
    log = open_log(job, directory)
    console = make_console(quiet=True) if log is None else console or make_console()
    with TrainingProgress(job.steps, job.position.step, console) as progress:
        output = RunOutput(job, directory, log, progress)
        if log is None:
            yield output
            return
        # Not through the output: a cycle would keep the job, and with it the loader's workers, after the run.
        log.warn = lambda message: progress.console.print(f"warning: {message}")
        directory.describe(status="running")
        for location in (tracker.location for tracker in log.trackers if tracker.location):
            output.print(f"wandb: {location}")
        try:
            yield output
        finally:
            with suppress(OSError):
                directory.describe(status=output.status)
            log.close(failed=output.status == "failed")


def open_log(job: Job, directory: RunDirectory) -> MetricsLog | None:
    """The log, on the first rank only. A tracker that fails to start ends the run on all ranks."""
    resume_at = None if job.resume_from is None else job.position.step
    opened: list[MetricsLog] = []

    def open_it() -> None:
        trackers = open_trackers(job.config, directory, resume_at=resume_at)
        with writing(directory.metrics, code="run.not_writable", remedy="give another --logs"):
            opened.append(MetricsLog(directory.metrics, trackers, resume_at=resume_at))

    job.context.ranks.broadcast_from_first(open_it)
    return opened[0] if opened else None


def describe(job: Job, version: str) -> dict[str, object]:
    """The facts of a job for run.json."""
    config = job.config
    return {
        "name": config.run.name,
        "version": version,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "model": config.model.title,
        "loss": config.run.loss,
        "parameters": sum(p.numel() for name, p in job.model.named_parameters() if not is_adapter(name)),
        "train_samples": len(job.data.train),
        "left_out": dict(job.data.train.source.broken),
        "global_batch": config.data.global_batch_size,
        "processes": job.context.ranks.size,
        "threads": job.threads,
        "decode": "gpu" if job.loader.resizes_on_gpu else "cpu",
        "micro_batches": job.context.micro_batches,
        "steps": job.steps,
        "epochs": job.epochs,
        "ema": config.run.ema,
        "environment": environment(job.device),
        "notes": [job.data.note] if job.data.note else [],
        **({} if job.resume_from else {"features": feature_tables(job.features)}),
    }


def feature_tables(features: Features) -> dict[str, dict[str, float | None]]:
    """What the tables of locked towers hold and, if this run computed them, how long that took."""
    return {
        side: {"rows": len(table.features), "mib": table.nbytes / 2**20, "seconds": table.seconds}
        for side, table in features._asdict().items()
        if table is not None
    }

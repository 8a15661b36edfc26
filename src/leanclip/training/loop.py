"""The training loop: take steps, log metrics, evaluate, save checkpoints."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn

from rich.console import Console

from leanclip.checkpointing.checkpoint import Checkpoints, Position, move_aside
from leanclip.checkpointing.resume import LATEST, SavedRun, find_checkpoint, settings
from leanclip.data import Batch, BrokenCount, on_device
from leanclip.distributed import TRAFFIC_COUNTER, Traffic, compare_traffic
from leanclip.errors import UserError
from leanclip.models import step_directories
from leanclip.optim import scheduled, set_learning_rate
from leanclip.runs.health import HealthCheck
from leanclip.runs.histograms import state_histograms
from leanclip.runs.metrics import MetricsLog, memory, to_host
from leanclip.runs.model_card import model_card
from leanclip.runs.progress import TrainingProgress
from leanclip.runs.run_directory import CARD_FILE, RunDirectory, environment
from leanclip.runs.stopping import Stopping
from leanclip.runs.trackers import open_trackers
from leanclip.training.evaluation import HeldOutData, write_if_possible
from leanclip.training.nonfinite import NonFiniteSteps, NotFiniteError, Verdict, advice, diagnosis, write_diagnosis
from leanclip.training.setup import Job
from leanclip.training.step import StepResult, training_step


@dataclass
class _Clock:
    """The time of the run, and since the last log line."""

    started: float
    before: float = 0.0  # seconds of the run before it was resumed
    waited: float = 0.0
    samples: int = 0

    def __post_init__(self) -> None:
        self.mark = time.perf_counter()

    def total(self) -> float:
        return self.before + time.perf_counter() - self.started

    def lap(self) -> tuple[float, float]:
        """Samples per second, and the share of time spent waiting for data, since the last call."""
        now = time.perf_counter()
        elapsed = max(now - self.mark, 1e-9)
        rate, wait = self.samples / elapsed, self.waited / elapsed
        self.mark, self.waited, self.samples = now, 0.0, 0
        return rate, min(wait, 1.0)


class Ending(NamedTuple):
    """How a run ended, if it did not fail."""

    checkpoint: Path  # the last one
    stopped: str | None = None  # why before its last step


def train(
    job: Job,
    directory: RunDirectory,
    console: Console | None = None,
    alive: Callable[[], None] = lambda: None,
    stop: Stopping | None = None,
) -> Ending:
    """Run a job to its last step, or until `stop` ends it.

    All ranks call it; the first one prints and writes. `alive` is called after every step and evaluation.
    """
    stop = stop or Stopping()
    log = open_log(job, directory)
    if log is None:
        with TrainingProgress(job.steps, job.position.step, Console(quiet=True)) as progress:
            return _Trainer(job, directory, None, progress, alive, stop).run_and_settle()
    directory.describe(status="running")
    status = "failed"
    try:
        with TrainingProgress(job.steps, job.position.step, console) as progress:
            log.warn = lambda message: progress.print(f"warning: {message}")
            for tracker in log.trackers:
                if tracker.location:
                    progress.print(f"wandb: {tracker.location}")
            ending = _Trainer(job, directory, log, progress, alive, stop).run_and_settle()
        status = "stopped" if ending.stopped else "finished"
    finally:
        with suppress(OSError):
            directory.describe(status=status)
        log.close(failed=status == "failed")
    return ending


def open_log(job: Job, directory: RunDirectory) -> MetricsLog | None:
    """The log, on the first rank only. A tracker that fails to start ends the run on all ranks."""
    resume_at = None if job.resume_from is None else job.position.step
    opened: list[MetricsLog] = []

    def open_it() -> None:
        trackers = open_trackers(job.config, directory, resume_at=resume_at)
        try:
            opened.append(MetricsLog(directory.metrics, trackers, resume_at=resume_at))
        except OSError as error:
            raise UserError(
                f"cannot write {directory.metrics} ({error.strerror}); choose another directory: --logs",
                code="run.not_writable",
            ) from error

    job.context.ranks.broadcast_from_first(open_it)
    return opened[0] if opened else None


class _Trainer:
    def __init__(
        self,
        job: Job,
        directory: RunDirectory,
        log: MetricsLog | None,  # on the rank that writes
        progress: TrainingProgress,
        alive: Callable[[], None],
        stop: Stopping,
    ) -> None:
        self.job, self.directory, self.log, self.progress, self.alive = job, directory, log, progress, alive
        self.stop, position, run = stop, job.position, job.config.run
        self.checkpoints = Checkpoints(
            directory.checkpoints,
            job.state,
            facts={
                "settings": settings(job.config),
                "architecture": job.model.open_clip_config(),
                "samples": len(job.data.train.source),
                "manifest": job.data.train.source.manifest(),
            },
            group=job.group,
            keep_last=run.keep_last,
            keep_every=run.keep_every,
            stop_on_error=run.stop_on_save_error,
            notify=progress.print,
        )
        self.start_at(position)
        self.steps_taken = 0  # by this process: a run that reloads a checkpoint repeats step numbers
        self.nonfinite = NonFiniteSteps(run.max_bad_steps)
        self.reloaded: Path | None = None
        self.sent: Traffic | None = None
        self.clock = _Clock(time.perf_counter(), before=position.seconds)
        self.held_out = HeldOutData(job, directory, log, progress.print)
        self.health = HealthCheck(job.config, batch=job.loader.batch)

    def start_at(self, position: Position) -> None:
        """Continue with the counts of a checkpoint."""
        self.step, self.samples, self.best = position.step, position.samples, position.best
        self.epoch, self.epoch_step = position.epoch, position.epoch_step
        self.skipped = position.skipped
        self.broken = BrokenCount(self.job.config.data.max_broken, seen=position.seen, kinds=position.broken)
        self.uncounted: list[
            tuple[int, dict[str, int], tuple[str, ...]]
        ] = []  # batches: size, broken samples, examples

    def run_and_settle(self) -> Ending:
        try:
            return self.run()
        except KeyboardInterrupt:
            raise  # the second Ctrl-C ends the run at once
        except BaseException:
            self.checkpoints.settle()  # a checkpoint that is being written is finished first
            raise

    def run(self) -> Ending:
        job, run, stopped = self.job, self.job.config.run, None
        if self.step >= job.steps and job.resume_from is not None:
            self.progress.print(f"the run is finished: step {self.step} of {job.steps}; raise --epochs to continue")
            return Ending(job.resume_from)
        job.model.train()
        job.context.loss.train()
        if self.step == 0:
            self.evaluate()
        self.card_and_config()
        self.stop.notify = self.progress.print
        while not stopped:
            for batch in self.batches():
                job.context.loss.set_epoch(self.epoch + self.epoch_step / job.loader.steps_per_epoch, job.epochs)
                result = self.take_step(batch)
                if self.step == job.position.step + 1 and job.device.type == "cuda":
                    self.checkpoints.prepare()
                verdict = self.judge(result)
                if verdict == "reload" and self.reload():
                    break
                if verdict != "continue":
                    self.give_up(result, batch)
                finished = self.step == job.steps
                if self.step % run.log_every == 0 or finished:
                    self.report(result)
                evaluated = finished or (run.eval_every and self.step % run.eval_every == 0)
                best = self.evaluate() if evaluated else False
                self.alive()
                stopped = None if finished else self.stop.after(self.steps_taken)
                due = run.save_every and self.step % run.save_every == 0
                full = finished or stopped or (due and not self.nonfinite.in_a_row)  # not while weights may be broken
                if full or best:
                    self.count_broken()
                    if self.log is not None:
                        self.log.flush()
                    self.checkpoints.save(self.position(), self.card_and_config(), full=bool(full), best=best)
                if finished or stopped:
                    return Ending(self.checkpoints.finish_last(), stopped)
            if self.epoch_step == job.loader.steps_per_epoch:
                self.epoch, self.epoch_step = self.epoch + 1, 0
        raise AssertionError("a loop that only returns")

    def batches(self) -> Iterator[Batch]:
        """The remaining batches of this epoch, on the device; the time spent waiting for them is counted."""
        batches = self.job.loader.epoch(self.epoch, start=self.epoch_step)
        batches = on_device(batches, self.job.device, self.job.dtype, self.job.pack)
        while True:
            began = time.perf_counter()
            batch = next(batches, None)
            self.clock.waited += time.perf_counter() - began
            if batch is None:
                return
            self.uncounted.append((len(batch), dict(batch.broken), batch.examples))
            if self.job.context.ranks.size == 1:
                self.count_broken()
            yield batch

    def count_broken(self) -> None:
        """Add up the broken samples of all ranks; too many of them end the run on every rank."""
        uncounted, self.uncounted = self.uncounted, []
        try:
            for entries in self.job.context.ranks.all_gather_objects(uncounted):
                for entry in entries:
                    self.broken.add(*entry)
        except UserError as error:
            error.shown = not self.job.context.ranks.first
            raise

    def take_step(self, batch: Batch) -> StepResult:
        job, optim = self.job, self.job.config.optim
        assert optim.lr is not None
        self.lr = scheduled(optim, self.step, steps=job.steps, steps_per_epoch=job.loader.steps_per_epoch)
        set_learning_rate(job.context.optimizer, self.lr, peak=optim.lr)
        TRAFFIC_COUNTER.clear()
        began = time.perf_counter()
        result = training_step(job.context, batch)
        if job.compiled and self.step == job.position.step:
            took = time.perf_counter() - began
            self.progress.print(
                f"the first step took {took:.0f} s, mostly to compile the towers (--compile off skips that)"
            )
        self.skipped += result.skipped
        if job.ema is not None and not result.skipped:
            job.ema.update()
        self.steps_taken += 1
        self.step += 1
        self.epoch_step += 1
        self.samples += job.loader.batch
        self.clock.samples += job.loader.batch
        if job.context.ranks.size > 1 and not self.sent:
            self.print_traffic()
        return result

    def judge(self, result: StepResult) -> Verdict:
        """Whether to continue after a step. Prints a warning where it was skipped."""
        scale = self.job.context.scale
        finite_loss = not result.skipped or math.isfinite(float(result.loss))
        if result.skipped:
            remedy = "lower --lr, or set --grad-clip-norm 1"
            if scale.lowered:
                remedy = f"the loss scale is now {scale.value:g}"
            self.progress.print(
                f"warning: step {self.step} was skipped, its {'gradient' if finite_loss else 'loss'} is not finite"
                f" ({self.skipped} so far): {remedy}"
            )
        excused = result.skipped and scale.lowered and finite_loss
        return self.nonfinite(skipped=result.skipped, excused=excused)

    def reload(self) -> bool:
        """Load the newest checkpoint, on all ranks. False where there is none."""
        job = self.job
        self.checkpoints.finish()
        path = job.context.ranks.broadcast_from_first(self.newest_checkpoint)
        if path is None:
            return False
        saved = SavedRun.open(path)
        saved.load(job.state, job.group, reset_loss=False)
        self.reloaded = saved.path
        self.progress.print(
            f"warning: steps {self.step - self.nonfinite.limit + 1} to {self.step} were not finite; the run continues"
            f" from {saved.path.name}. A second time it stops"
        )
        skipped = self.skipped
        self.start_at(saved.position)
        self.skipped = skipped
        if self.log is not None:
            self.log.rewind(self.step)
        self.clock.lap()
        return True

    def newest_checkpoint(self) -> Path | None:
        """Of this run, or the one it was resumed from, which must be one of ours with the same loss state."""
        steps = [step for step, _ in step_directories(self.directory.checkpoints)]
        if steps and (self.job.same_loss or max(steps) > self.job.position.step):
            newest = find_checkpoint(LATEST, self.directory.path)[0]
            assert newest is not None
            move_aside(self.directory.checkpoints, int(newest.name[5:]))
            return newest
        resumed = self.job.resume_from
        return resumed if resumed is not None and resumed.is_dir() and self.job.same_loss else None

    def give_up(self, result: StepResult, batch: Batch) -> NoReturn:
        """Write a diagnosis, and end the run on all ranks."""
        job, context = self.job, self.job.context
        facts = {
            "step": self.step,
            "epoch": self.epochs_done,
            "nonfinite_steps_in_a_row": self.nonfinite.limit,
            "skipped_steps": self.skipped,
            "reloaded_checkpoint": None if self.reloaded is None else str(self.reloaded),
            "lr": self.lr,
            "loss_scale": context.scale.value if context.scale.grows else None,
            "grad_clip_norm": context.grad_clip_norm,
        } | to_host({"loss": result.loss, "grad_norm": result.grad_norm} | dict(result.metrics))
        facts["tau"] = float(job.context.loss.temperature())
        report = diagnosis(context, batch, result.gradient_norms, facts)
        path = self.directory.diagnosis
        if self.log is not None:
            with suppress(OSError):
                write_diagnosis(path, report)
        again = "and there is no checkpoint to continue from"
        if self.reloaded is not None:
            again = f"again after it was continued from {self.reloaded.name}"
        error = NotFiniteError(
            f"stopped at step {self.step}: loss or gradient was not finite {self.nonfinite.limit} times in a row,"
            f" {again}; {advice(report)}. {path} has the details",
            code="training.not_finite",
        )
        error.shown = not job.context.ranks.first
        raise error

    def print_traffic(self) -> None:
        """Once a run: what its loss receives in a step, compared with other methods."""
        self.sent = compare_traffic(TRAFFIC_COUNTER, ranks=self.job.context.ranks.size)
        if self.log is not None:
            with suppress(OSError):
                self.directory.describe(communication=self.sent._asdict())
        ours, openclip, disco = (f"{amount / 1e6:,.2f} MB" for amount in self.sent)
        self.progress.print(
            f"{self.job.context.ranks.size} processes; for the loss each receives {ours} a step"
            f" (OpenCLIP's local loss {openclip}, DisCo-CLIP {disco})"
        )

    @property
    def epochs_done(self) -> float:
        return round(self.epoch + self.epoch_step / self.job.loader.steps_per_epoch, 6)

    def report(self, result: StepResult) -> None:
        if self.job.context.ranks.size > 1:
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
        metrics: dict[str, float] = {}
        if self.job.context.ranks.size > 1:
            calls, size = TRAFFIC_COUNTER.loss_total()
            metrics |= {"loss_collectives": calls, "loss_bytes": size}
        if self.job.context.scale.grows:
            metrics["loss_scale"] = self.job.context.scale.value
        return metrics

    def evaluate(self) -> bool:
        """Evaluate on held-out data. Whether the result is the best so far."""
        if self.step:
            self.log_state()
        metrics = self.held_out(self.step, self.epochs_done)
        value = metrics.get(self.job.config.run.best_metric)
        best_so_far = None if self.checkpoints.best_lost else self.best
        best = value is not None and self.step > 0 and (best_so_far is None or value > best_so_far)
        self.best = value if best else self.best
        if metrics:
            self.alive()
            self.clock.lap()
        return best

    def log_state(self) -> None:
        """Histograms of the per-sample state. All ranks call it together."""
        histograms = state_histograms(self.job.context.loss)
        if self.log is not None:
            self.log.histograms(step=self.step, epoch=self.epochs_done, histograms=histograms)

    def position(self) -> Position:
        full = self.epoch_step == self.job.loader.steps_per_epoch
        return Position(
            step=self.step,
            epoch=self.epoch + full,
            epoch_step=0 if full else self.epoch_step,
            samples=self.samples,
            seconds=self.clock.total(),
            best=self.best,
            skipped=self.skipped,
            seen=self.broken.seen,
            broken=dict(self.broken.kinds),
        )

    def card_and_config(self) -> dict[str, str]:
        """The files beside saved weights: the config, and the model card, which the run directory gets, too."""
        if self.log is None:
            return {}
        card = model_card(self.directory.facts(), self.log.results, step=self.step)
        write_if_possible(self.directory.card, card, self.progress.print)
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
        "processes": job.context.ranks.size,
        "micro_batches": job.context.micro_batches,
        "steps": job.steps,
        "epochs": config.run.epochs,
        "ema": config.run.ema,
        "environment": environment(job.device),
        "notes": [job.data.note] if job.data.note else [],
    }

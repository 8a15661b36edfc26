"""The training loop: take steps, log metrics, evaluate, save checkpoints."""

import json
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, count, islice
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from leanclip.checkpointing.checkpoint import Checkpoints, Position, move_aside
from leanclip.checkpointing.resume import LATEST, SavedRun, find_checkpoint, settings
from leanclip.data import Batch, BrokenCount, on_device
from leanclip.distributed import TRAFFIC_COUNTER
from leanclip.errors import UserError
from leanclip.models import step_directories
from leanclip.optim import scheduled, set_learning_rate
from leanclip.progress import ACTIVITY
from leanclip.runs.metrics import finite, to_host
from leanclip.runs.run_directory import RunDirectory
from leanclip.runs.stopping import Stopping
from leanclip.training.evaluation import HeldOutData
from leanclip.training.nonfinite import NonFiniteSteps, NotFiniteError, Verdict, advice, diagnosis
from leanclip.training.run_output import RunOutput, open_output
from leanclip.training.setup import Job
from leanclip.training.step import StepResult, training_step


class Ending(NamedTuple):
    """How a run ended, if it did not fail."""

    directory: RunDirectory
    checkpoint: Path  # the last one
    stopped: str | None = None  # why before its last step


def train(
    job: Job,
    directory: RunDirectory,
    console: Console | None = None,
    stop: Stopping | None = None,
) -> Ending:
    """Run a job to its last step, or until `stop` ends it.

    All ranks call it; the first one prints and writes.
    """
    with open_output(job, directory, console) as output:
        trainer = _Trainer(job, output, stop or Stopping())
        try:
            ending = trainer.run()
        except BaseException as error:
            if not isinstance(error, KeyboardInterrupt):  # the second Ctrl-C ends the run at once
                trainer.checkpoints.settle()  # a checkpoint that is being written is finished first
            raise
        output.status = "stopped" if ending.stopped else "finished"
    return ending


class _Trainer:
    def __init__(self, job: Job, output: RunOutput, stop: Stopping) -> None:
        self.job, self.output, self.stop, run = job, output, stop, job.config.run
        self.checkpoints = Checkpoints(
            output.directory.checkpoints,
            job.state,
            facts={
                "settings": settings(job.config),
                "architecture": job.model.open_clip_config(),
                "samples": len(job.data.train.source),
                "manifest": job.data.train.source.manifest(),
                "processes": job.context.ranks.size,
                "threads": job.threads,
            },
            group=job.group,
            keep_last=run.keep_last,
            keep_every=run.keep_every,
            stop_on_error=run.stop_on_save_error,
            notify=output.print,
        )
        self.start_at(job.position)
        self.steps_taken = 0  # by this process: a run that reloads a checkpoint repeats step numbers
        self.nonfinite = NonFiniteSteps(run.max_bad_steps)
        self.reloaded: Path | None = None
        self.held_out = HeldOutData(job, output)

    def start_at(self, position: Position) -> None:
        """Continue with the counts of a checkpoint."""
        self.at = replace(position)
        self.broken = BrokenCount(self.job.config.data.max_broken, seen=position.seen, kinds=position.broken)
        self.uncounted: list[tuple[int, dict[str, int], tuple[str, ...]]] = []  # batches: size, broken, examples

    def run(self) -> Ending:
        job, run, at = self.job, self.job.config.run, self.at
        if job.finished and job.resume_from is not None:
            limit = "--epochs" if run.max_steps is None else "--max-steps"
            self.output.print(f"the run is finished: step {at.step} of {job.steps}; raise {limit} to continue")
            return Ending(self.output.directory, job.resume_from)
        job.model.train()
        job.context.loss.train()
        if at.step == 0:
            self.evaluate()
        texts = self.output.card_and_config(at.step)
        if at.step == 0 and job.config.model.from_weights and not run.discard_start:
            self.checkpoints.save_start(texts)
        self.stop.notify = self.output.print
        while True:
            for batch in self.batches():
                result = self.take_step(batch)
                verdict = self.judge(result)
                if verdict == "reload" and self.reload():
                    break
                if verdict != "continue":
                    raise self.not_finite(result, batch)
                finished = self.at.step == job.steps
                logged = finished or self.at.step % run.log_every == 0
                if logged:
                    self.report(result)
                evaluated = finished or (run.eval_every and self.at.step % run.eval_every == 0)
                best = self.evaluate() if evaluated else False
                ACTIVITY.advance()
                stopped = None if finished else self.stop.after(self.steps_taken)
                if stopped and not logged:  # the last line is that of the checkpoint
                    self.report(result)
                due = run.save_every and self.at.step % run.save_every == 0
                full = finished or stopped or (due and not self.nonfinite.in_a_row)  # not while weights may be broken
                if full or best:
                    self.save(full=bool(full), best=best)
                if finished or stopped:
                    if self.broken.kinds:
                        self.output.print(f"{self.broken} and replaced by others")
                    return Ending(self.output.directory, self.checkpoints.finish_last(), stopped)

    def batches(self) -> Iterator[Batch]:
        """The remaining batches of the run, on the device; the time spent waiting for them is counted."""
        job, at = self.job, self.at
        firsts = chain([(at.epoch, at.epoch_step)], ((epoch, 0) for epoch in count(at.epoch + 1)))
        batches = chain.from_iterable(job.loader.epoch(epoch, start=step) for epoch, step in firsts)
        batches = on_device(islice(batches, job.steps - at.step), job.device, job.dtype, job.pack)
        while True:
            began = time.perf_counter()
            batch = next(batches, None)
            self.output.clock.waited += time.perf_counter() - began
            if batch is None:
                return
            self.uncounted.append((len(batch), dict(batch.broken), batch.examples))
            if self.job.context.ranks.size == 1:
                self.count_broken()
            yield batch

    def count_broken(self) -> None:
        """Add up the broken samples of all ranks; too many of them end the run on every rank."""
        ranks, uncounted, self.uncounted = self.job.context.ranks, self.uncounted, []
        try:
            for entries in ranks.all_gather_objects(uncounted):
                for entry in entries:
                    self.broken.add(*entry)
        except UserError as error:
            raise ranks.shown_once(error) from None

    def take_step(self, batch: Batch) -> StepResult:
        job, optim, at = self.job, self.job.config.optim, self.at
        assert optim.lr is not None
        self.lr = scheduled(optim, at.step, steps=job.steps, steps_per_epoch=job.loader.steps_per_epoch)
        set_learning_rate(job.context.optimizer, self.lr, peak=optim.lr)
        job.context.loss.set_epoch(self.epoch, job.epochs)
        weights = job.context.loss.pair_weights
        if weights is not None and (refit := weights.take_refit()) is not None:
            self.output.pair_weights(at.step + 1, round(self.epoch, 6), refit)
        TRAFFIC_COUNTER.clear()
        began = time.perf_counter()
        result = training_step(job.context, batch)
        if job.ema is not None and not result.skipped:
            job.ema.update()
        if self.steps_taken == 0:
            self.after_first_step(time.perf_counter() - began)
        self.steps_taken += 1
        at.advance(job.loader.batch, job.loader.steps_per_epoch)
        at.skipped += result.skipped
        self.output.clock.samples += job.loader.batch
        return result

    def after_first_step(self, seconds: float) -> None:
        if self.job.compiled:
            self.output.print(
                f"the first step took {seconds:.0f} s, mostly to compile the towers (--compile off skips that)"
            )
        if self.job.device.type == "cuda":
            self.checkpoints.prepare()
        if self.job.context.ranks.size > 1:
            self.output.traffic()

    def judge(self, result: StepResult) -> Verdict:
        """Whether to continue after a step. Prints a warning where it was skipped."""
        scale = self.job.context.scale
        finite_loss = not result.skipped or math.isfinite(float(result.loss))
        if result.skipped:
            remedy = (
                f"the loss scale is now {scale.value:g}" if scale.lowered else "lower --lr, or set --grad-clip-norm 1"
            )
            self.output.print(
                f"warning: step {self.at.step} was skipped, its {'gradient' if finite_loss else 'loss'} is not finite"
                f" ({self.at.skipped} so far): {remedy}"
            )
        return self.nonfinite(skipped=result.skipped, excused=result.skipped and scale.lowered and finite_loss)

    def reload(self) -> bool:
        """Load the newest checkpoint, on all ranks. False where there is none."""
        job, step = self.job, self.at.step
        self.checkpoints.finish()
        path = job.context.ranks.broadcast_from_first(self.newest_checkpoint)
        if path is None:
            return False
        saved = SavedRun.open(path)
        saved.load(job.state, job.group, reset_loss=False)
        self.reloaded = saved.path
        self.output.print(
            f"warning: steps {step - self.nonfinite.limit + 1} to {step} were not finite; the run continues"
            f" from {saved.path.name}. A second time it stops"
        )
        self.start_at(replace(saved.position, skipped=self.at.skipped))
        if self.output.log is not None:
            self.output.log.rewind(self.at.step)
        self.output.clock.lap()
        return True

    def newest_checkpoint(self) -> Path | None:
        """Of this run, or the one it was resumed from, which must be one of ours with the same loss state."""
        directory, resumed = self.output.directory, self.job.resume_from
        steps = [step for step, _ in step_directories(directory.checkpoints)]
        if steps and (self.job.same_loss or max(steps) > self.job.position.step):
            newest = find_checkpoint(LATEST, directory.path)[0]
            assert newest is not None
            move_aside(directory.checkpoints, int(newest.name[5:]))
            return newest
        return resumed if resumed is not None and resumed.is_dir() and self.job.same_loss else None

    def not_finite(self, result: StepResult, batch: Batch) -> NotFiniteError:
        """Write a diagnosis. The error ends the run on all ranks."""
        context, path = self.job.context, self.output.directory.diagnosis
        facts = {
            "step": self.at.step,
            "epoch": round(self.epoch, 6),
            "nonfinite_steps_in_a_row": self.nonfinite.limit,
            "skipped_steps": self.at.skipped,
            "reloaded_checkpoint": None if self.reloaded is None else str(self.reloaded),
            "loss_scale": context.scale.value if context.scale.grows else None,
            "grad_clip_norm": context.grad_clip_norm,
        } | self.metrics(result)
        facts["tau"] = float(context.loss.temperature())
        report = diagnosis(context, batch, result.gradient_norms, facts)
        self.output.write(path, json.dumps(finite(report, as_text=True), indent=1))
        again = "and there is no checkpoint to continue from"
        if self.reloaded is not None:
            again = f"again after it was continued from {self.reloaded.name}"
        error = NotFiniteError(
            f"stopped at step {self.at.step}: loss or gradient was not finite {self.nonfinite.limit} times in a row,"
            f" {again}; {advice(report)}. {path} has the details",
            code="training.not_finite",
        )
        return context.ranks.shown_once(error)

    @property
    def epoch(self) -> float:
        """Epochs done, with a fraction."""
        return self.at.epoch + self.at.epoch_step / self.job.loader.steps_per_epoch

    def metrics(self, result: StepResult) -> dict[str, float | str]:
        """Of a step, with the learning rate. Waits for the device."""
        return {"lr": self.lr} | to_host({"loss": result.loss, "grad_norm": result.grad_norm} | dict(result.metrics))

    def report(self, result: StepResult) -> None:
        if self.job.context.ranks.size > 1:
            self.count_broken()
        if self.output.log is not None:
            self.output.step(self.at, round(self.epoch, 6), self.metrics(result), self.broken.metrics())

    def evaluate(self) -> bool:
        """Evaluate on held-out data. Whether the result is the best so far."""
        at, epoch = self.at, round(self.epoch, 6)
        if at.step:
            self.output.histograms(at.step, epoch)
        metrics = self.held_out(at.step, epoch)
        value = metrics.get(self.job.config.run.best_metric)
        best_so_far = None if self.checkpoints.best_lost else at.best
        best = value is not None and at.step > 0 and (best_so_far is None or value > best_so_far)
        at.best = value if best else at.best
        if metrics:
            ACTIVITY.advance()
            self.output.clock.lap()
        return best

    def save(self, *, full: bool, best: bool) -> None:
        self.count_broken()
        counts = {"seen": self.broken.seen, "broken": dict(self.broken.kinds)}
        position = replace(self.at, seconds=self.output.clock.total(), **counts)
        self.checkpoints.save(position, self.output.card_and_config(self.at.step), full=full, best=best)

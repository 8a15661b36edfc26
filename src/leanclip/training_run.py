"""A training run from its configuration to its last checkpoint, without a command line."""

import contextlib
import csv
import io
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote

import numpy as np
from rich.console import Console

from leanclip.checkpointing.checkpoint import clean_up, copy_best, move_aside, step_directories
from leanclip.checkpointing.resume import AUTO, LATEST
from leanclip.config import save_toml
from leanclip.data import Subset
from leanclip.device import device_of
from leanclip.distributed import Heartbeat, Ranks, detect_launch, device_for, launch_id, process_group
from leanclip.errors import UserError
from leanclip.filesystem import remove_litter, write_atomically, writing
from leanclip.progress import make_console
from leanclip.runs import RunDirectory, TrainConfig
from leanclip.runs.config import RunConfig
from leanclip.runs.defaults import default_name
from leanclip.runs.stopping import Stopping
from leanclip.training import Ending, Job, describe, set_up, train
from leanclip.training.summary import summary
from leanclip.version import __version__


def run_training(config: TrainConfig, *, began: float | None = None, quiet: bool = False) -> Ending:
    """Train. --max-hours counts from `began`, a time.monotonic(). Signal handlers are restored at the end."""
    began = time.monotonic() if began is None else began
    with joined_processes(config) as (config, heartbeat):
        config = continued(config, Ranks.current())
        stop = Stopping(heartbeat.store, hours=config.run.max_hours, began=began)
        with stop.handling_signals(), contextlib.ExitStack() as lock:
            # Before the checkpoint to resume from is chosen: another process may be writing the run.
            locked = Ranks.current().broadcast_from_first(lambda: lock_existing(config.run, lock))
            job = set_up(config)
            directory, console = directory_of(job), console_of(job, quiet=quiet)
            with removed_if_it_fails(directory, new=job.context.ranks.first and not directory.has_content()):
                job.context.ranks.broadcast_from_first(
                    lambda: prepare_locked(job, directory, None if locked else lock)
                )
                announce(job, directory, console)
                ending = train(job, directory, console, stop)
    if ending.stopped:
        name = "" if config.run.name else f"--name {quote(directory.path.name)} "
        console.print(f"stopped, since {ending.stopped}: the same command with {name}--resume auto continues the run")
    report = f"leanclip report {quote(str(directory.path))}"
    console.print(f"checkpoint: {ending.checkpoint}", f"report:     {report}", sep="\n")
    return ending


@contextlib.contextmanager
def removed_if_it_fails(directory: RunDirectory, *, new: bool) -> Iterator[None]:
    """A new run that fails before it has logged or saved anything leaves nothing that blocks a corrected command."""
    try:
        yield
    except Exception:
        with contextlib.suppress(OSError):
            if new and directory.is_held:  # otherwise another process writes it
                directory.discard()
        raise


@contextlib.contextmanager
def joined_processes(config: TrainConfig) -> Iterator[tuple[TrainConfig, Heartbeat]]:
    """Inside, this process has joined the others of the run. Yields the configuration with its device filled in."""
    launch = detect_launch()
    config = replace(config, run=replace(config.run, device=device_for(launch, config.run.device)))
    device, parallel = device_of(config.run.device), config.parallel
    with process_group(launch, device, timeout=parallel.dist_timeout, always=parallel.fsdp) as heartbeat:
        yield config, heartbeat


def directory_of(job: Job) -> RunDirectory:
    assert job.config.run.name is not None
    return RunDirectory(Path(job.config.run.logs) / job.config.run.name)


def console_of(job: Job, *, quiet: bool = False) -> Console:
    """Where the first process prints; the others print nothing."""
    return make_console(quiet=quiet or not job.context.ranks.first)


def continued(config: TrainConfig, ranks: Ranks) -> TrainConfig:
    """The configuration with which all ranks go on where torchrun restarts them. Each keeps its GPU."""
    launches = ranks.all_gather_objects(launch_id())  # each host has its own
    run = ranks.broadcast_from_first(lambda: _continued(config, launches))
    return replace(config, run=replace(run, device=config.run.device))


def _continued(config: TrainConfig, launches: Sequence[str | None]) -> RunConfig:
    """A run that one of these torchruns has begun in other processes resumes and is not overwritten.

    The count of restarts does not tell: it is 0 where one host has joined or left without a failure.
    """
    run = config.run
    name = run.name or default_name(config)
    directory = RunDirectory(Path(run.logs) / name)
    facts = directory.facts()
    launch, pid = facts.get("launch"), facts.get("pid")
    if launch is None or launch not in launches or (launch, pid) == (launch_id(), os.getpid()):
        return run
    if directory.can_put_back:  # the next start puts the old run back: overwrite it again
        return replace(run, name=name)
    saved = bool(step_directories(directory.checkpoints))
    resume = AUTO if saved or run.resume in (None, LATEST) else run.resume
    reset = run.reset_loss_state and not saved
    return replace(run, name=name, resume=resume, reset_loss_state=reset, overwrite=False)


def announce(job: Job, directory: RunDirectory, console: Console) -> None:
    """Print what the user should know before the first step."""
    console.print(*summary(job, directory), sep="\n")
    if broken := job.data.train.source.broken:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in broken.items())
        console.print(f"left out of the training data: {kinds}")
    for note in (job.data.note, *job.data.messages, *job.notes):
        if note:
            console.print(note)
    if job.resume_from is not None:
        console.print(f"resumed from {job.resume_from} at step {job.position.step} of {job.steps}")
    if reason := job.model.padding_reason:
        console.print(f"captions run padded to the context length: {reason}")


def lock_existing(run: RunConfig, lock: contextlib.ExitStack) -> bool:
    """Lock the run directory if the run exists; a new one is locked when its directory is made."""
    directory = RunDirectory(Path(run.logs) / (run.name or ""))
    if run.name is None or not directory.is_run:
        return False
    with writing(directory.path, code="run.not_writable", remedy="give another --logs"):
        lock.enter_context(directory.held())
    return True


def prepare_locked(job: Job, directory: RunDirectory, lock: contextlib.ExitStack | None) -> None:
    """Prepare the run directory, and lock it first unless that has been done."""
    with writing(directory.path, code="run.not_writable", remedy="give another --logs"):
        if lock is not None and lock.enter_context(directory.held()):
            raise UserError(f"{directory.path} was written by another run meanwhile; retry", code="run.in_use")
        prepare(job, directory)


def prepare(job: Job, directory: RunDirectory) -> None:
    """Write what a run directory holds before the first step; later checkpoints than the resumed one move aside."""
    run = job.config.run
    directory.prepare(overwrite=run.overwrite, beginning=run.resume == AUTO, resume_from=job.resume_from)
    remove_litter(directory.path)
    clean_up(directory.checkpoints)
    if names := move_aside(directory.checkpoints, job.position.step):
        if best := copy_best(directory.checkpoints):
            print(f"leanclip: the best weights so far are kept as {best}", file=sys.stderr)
        for name in names:
            print(f"leanclip: a checkpoint after this step was moved aside, kept as {name}", file=sys.stderr)
    if job.finished and directory.config.is_file():  # nothing is trained: what the run says of itself stays
        return
    directory.describe(**describe(job, __version__), launch=launch_id(), pid=os.getpid())
    save_toml(repeatable(job.config), directory.config)
    if (manifest := job.data.train.source.manifest()) is not None:
        write_atomically(directory.manifest, json.dumps(manifest, indent=1))
    if job.config.data.val_split and job.data.val is not None:
        write_atomically(directory.held_out, table_of(job.data.val))


def refusal_of(job: Job, directory: RunDirectory) -> UserError | None:
    """Why `prepare` would refuse to start this run, if it would."""
    run = job.config.run
    return directory.refusal(overwrite=run.overwrite, beginning=run.resume == AUTO, resume_from=job.resume_from)


def table_of(held_out: Subset) -> str:
    """The samples that --val-split holds out, as CSV."""
    text, source = io.StringIO(), held_out.source
    writer = csv.writer(text)
    writer.writerow(["id", "key", "shard", "evaluated"])
    for index in np.union1d(held_out.ids, held_out.copies).tolist():
        evaluated = "no" if index in held_out.copies else "yes"
        writer.writerow([index, source.key(index), source.file(index), evaluated])
    return text.getvalue()


def repeatable(config: TrainConfig) -> TrainConfig:
    """The configuration as it is saved, without the settings that only say how this process was started."""
    return replace(config, run=replace(config.run, resume=None, reset_loss_state=False, overwrite=False, device=None))

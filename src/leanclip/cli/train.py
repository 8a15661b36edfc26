"""leanclip train: from the command line to the training loop."""

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from leanclip import __version__
from leanclip.checkpointing.checkpoint import copy_best, set_aside, tidy
from leanclip.checkpointing.resume import AUTO, LATEST
from leanclip.cli.openclip_flags import from_openclip
from leanclip.cli.parse import parse
from leanclip.config import load_toml, override, save_toml
from leanclip.device import device_of
from leanclip.distributed import Ranks, detect_launch, device_for, launch_id, process_group, was_restarted
from leanclip.errors import UserError
from leanclip.filesystem import write_atomically
from leanclip.losses import LossConfig
from leanclip.models import step_directories
from leanclip.planning.profile import profile, summary
from leanclip.progress import ACTIVITY
from leanclip.recipes import load_recipe
from leanclip.runs import RunDirectory, TrainConfig
from leanclip.runs.config import RunConfig
from leanclip.runs.defaults import default_name
from leanclip.runs.stopping import Stopping, exit_code
from leanclip.settings import common
from leanclip.training import Job, describe, set_up, train
from leanclip.training.preview import preview

DESCRIPTION = """Train a CLIP model.

A run is a recipe, a TOML file, flags, or any mix; flags win. Without --train-data it trains on the bundled emoji.
LOGS/NAME gets config.toml, metrics.jsonl, TensorBoard files and checkpoints that open_clip loads. Ctrl-C saves before
it ends the run; the same command with --name NAME --resume auto continues it. OpenCLIP's flags work too
(docs/from-openclip.md).

  leanclip train --recipe demo
  leanclip train --train-data 'shards/{00000..00331}.tar' --val-data val.tar --global-batch-size 1024
  torchrun --nproc-per-node 4 -m leanclip train --train-data shards/ --global-batch-size 4096
"""


@dataclass(frozen=True, kw_only=True)
class TrainCommand:
    recipe: str | None = common(None)
    """Start from a recipe; `--recipe list` lists them."""
    config: str | None = common(None)
    """Start from a TOML file, such as a run's config.toml. It overrides the recipe."""
    dry_run: bool = common(False)
    """Print the resolved run, draw one augmented batch, and stop."""
    profile: bool = False
    """Time a few steps, print what bounds the run, and stop."""
    settings: TrainConfig = field(default_factory=TrainConfig)


def run(arguments: list[str]) -> None:
    began = time.monotonic()
    arguments, notes = from_openclip(arguments)
    command = parse_command(arguments)
    launch = detect_launch()
    for note in notes if launch.rank == 0 else ():
        print(f"note: {note}", file=sys.stderr)
    if command.recipe == "list":
        from leanclip.recipes import list_recipes

        for name, summary in list_recipes():
            print(f"{name:<24} {summary}")
        return
    settings = command.settings
    settings = replace(settings, run=replace(settings.run, device=device_for(launch, settings.run.device)))
    device, timeout = device_of(settings.run.device), settings.parallel.dist_timeout
    with process_group(launch, device, timeout=timeout, always=settings.parallel.fsdp) as heartbeat:
        if was_restarted():
            settings = replace(settings, run=Ranks.current().broadcast_from_first(lambda: going_on(settings).run))
        stop = Stopping(heartbeat.store, hours=settings.run.max_hours, began=began)
        with stop.listening():
            stopped = start(
                settings, dry_run=command.dry_run, profiled=command.profile, alive=ACTIVITY.advance, stop=stop
            )
    if stopped:
        sys.exit(exit_code(stopped))


def going_on(settings: TrainConfig) -> TrainConfig:
    """The same command, started again by torchrun: it must neither begin anew nor replace what there is."""
    run = settings.run
    name = run.name or default_name(settings)
    directory = RunDirectory(Path(run.logs) / name)
    if directory.facts().get("launch") != launch_id():  # another's: this torchrun has begun nothing yet
        return settings
    begun = bool(step_directories(directory.checkpoints))
    resume = AUTO if begun or run.resume in (None, LATEST) else run.resume
    reset = run.reset_loss_state and not begun
    return replace(settings, run=replace(run, name=name, resume=resume, reset_loss_state=reset, overwrite=False))


def start(
    settings: TrainConfig, *, dry_run: bool, profiled: bool = False, alive: Callable[[], None], stop: Stopping
) -> str | None:
    """This process's part of a run: the first one speaks and writes. Says why it was stopped, if it was."""
    with contextlib.ExitStack() as held:
        # Before it is looked at what there is to go on from: the run that writes it may be about to end.
        known = (
            not dry_run and not profiled and Ranks.current().broadcast_from_first(lambda: hold(settings.run, held))
        )
        job = set_up(settings, kernels=not dry_run)
        assert job.config.run.name is not None
        console = Console(soft_wrap=True, highlight=False, quiet=not job.context.ranks.first)
        directory = RunDirectory(Path(job.config.run.logs) / job.config.run.name)
        if dry_run:
            job.context.ranks.broadcast_from_first(lambda: preview(job, directory, console))
            return None
        if profiled:
            found = profile(job)
            console.print(found.table(), *summary(found, job), sep="\n")
            return None
        job.context.ranks.broadcast_from_first(lambda: prepared(job, directory, None if known else held))
        announce(job, console)
        last, stopped = train(job, directory, console, alive, stop)
    if stopped:
        name = "" if settings.run.name else f"--name {job.config.run.name} "
        console.print(f"stopped, since {stopped}: the same command with {name}--resume auto goes on")
    console.print(f"checkpoint: {last}", f"report:     leanclip report {directory.path}", sep="\n")
    return stopped


def announce(job: Job, console: Console) -> None:
    """What the user should know before the first step."""
    if left_out := job.data.train.source.broken:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in left_out.items())
        console.print(f"left out of the training data: {kinds}")
    if job.data.note:
        console.print(job.data.note)
    for note in job.notes:
        console.print(note)
    if job.resume_from is not None:
        console.print(f"resumed from {job.resume_from} at step {job.position.step} of {job.steps}")
    if reason := job.model.padded_because:
        console.print(f"captions run padded to the context length: {reason}")
    if job.context.micro_batches > 1:
        each = -(-job.context.ranks.largest_share(job.loader.batch) // job.context.micro_batches)
        console.print(f"micro-batches: {job.context.micro_batches} of {each} samples a step")


def hold(run: RunConfig, held: contextlib.ExitStack) -> bool:
    """Keep others from a run that is there. One that is not is held when its directory is made."""
    directory = RunDirectory(Path(run.logs) / (run.name or ""))
    if run.name is None or not directory.is_run:
        return False
    with writable(directory):
        held.enter_context(directory.held())
    return True


def prepared(job: Job, directory: RunDirectory, held: contextlib.ExitStack | None) -> None:
    """Make the directory ready, and keep others from it, unless that has been done."""
    with writable(directory):
        if held is not None and held.enter_context(directory.held()):
            raise UserError(f"another run has written {directory.path} meanwhile; give the command again")
        prepare(job, directory)


@contextlib.contextmanager
def writable(directory: RunDirectory) -> Iterator[None]:
    """A disk that cannot be written is the user's to mend."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {directory.path} ({error.strerror}); give another --logs") from error


def prepare(job: Job, directory: RunDirectory) -> None:
    run = job.config.run
    directory.prepare(overwrite=run.overwrite, beginning=run.resume == AUTO, resume_from=job.resume_from)
    tidy(directory.checkpoints)
    if names := set_aside(directory.checkpoints, job.position.step):
        if best := copy_best(directory.checkpoints):
            print(f"leanclip: {best} has the best weights so far; `best` may be overwritten", file=sys.stderr)
        for name in names:
            print(
                f"leanclip: {name} is a checkpoint of what came after, and stays until you remove it", file=sys.stderr
            )
    directory.describe(**describe(job, __version__), launch=launch_id())
    save_toml(repeatable(job.config), directory.config)
    if (manifest := job.data.train.source.manifest()) is not None:
        write_atomically(directory.manifest, json.dumps(manifest, indent=1))


def parse_command(arguments: list[str]) -> TrainCommand:
    """Recipe, then TOML file, then flags."""
    return parse(
        TrainCommand,
        arguments,
        command="train",
        description=DESCRIPTION,
        below=lambda typed: TrainCommand(settings=settings_below(typed)),
    )


def settings_below(typed: Mapping[str, Any]) -> TrainConfig:
    """The settings of the recipe and the file that the flags name, which the flags then override."""
    settings = TrainConfig()
    recipe, file = typed.get("recipe"), typed.get("config")
    if recipe not in (None, "list"):
        settings = override(settings, load_recipe(recipe), f"recipe {recipe}")
    if file is not None:
        settings = override(settings, load_toml(Path(file)), file)
    for flag, other in (("batch_size", "global_batch_size"), ("global_batch_size", "batch_size")):
        if flag in typed:
            settings = replace(settings, data=replace(settings.data, **{other: None}))
    for flag, other in (("save_frequency", "save_every"), ("val_frequency", "eval_every")):
        if flag in typed and other not in typed:
            settings = replace(settings, run=replace(settings.run, **{other: None}))
    if typed.get("loss", settings.run.loss) != settings.run.loss:
        settings = replace(settings, loss=LossConfig())  # hyper-parameters of the other loss
    return settings


def repeatable(config: TrainConfig) -> TrainConfig:
    """What is saved: everything that decides the run, without what only said how it was started."""
    return replace(config, run=replace(config.run, resume=None, reset_loss_state=False, overwrite=False, device=None))


if __name__ == "__main__":
    run(sys.argv[1:])

"""leanclip train: from the command line to the training loop."""

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from leanclip.cli.openclip_flags import from_openclip
from leanclip.cli.parse import parse
from leanclip.config import load_toml
from leanclip.distributed import detect_launch
from leanclip.errors import UserError
from leanclip.planning.profile import StartUp, profile
from leanclip.planning.profile import summary as profile_summary
from leanclip.recipes import list_recipes, recipe_path, settings_below
from leanclip.runs import TrainConfig
from leanclip.runs.stopping import exit_code
from leanclip.settings import common
from leanclip.training import set_up
from leanclip.training.summary import preview
from leanclip.training_run import announce, console_of, directory_of, joined_processes, refusal_of, run_training

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
    """Start from a recipe; `list` lists them, `show NAME` prints one."""
    config: str | None = common(None)
    """Start from a TOML file, such as a run's config.toml. It overrides the recipe."""
    dry_run: bool = common(False)
    """Print the summary of the run, draw one augmented batch, and stop."""
    profile: bool = False
    """Time a few steps, print what bounds the run, and stop."""
    settings: TrainConfig = field(default_factory=TrainConfig)


def run(arguments: list[str]) -> None:
    began, start_up = time.monotonic(), StartUp()
    if "show" in arguments and arguments[arguments.index("show") - 1] == "--recipe":
        name = "".join(arguments[arguments.index("show") + 1 :][:1])
        print(recipe_path(name).read_text(encoding="utf-8"), end="")
        return
    arguments, notes = from_openclip(arguments)
    command = parse_command(arguments)
    notes += kept_from_scratch(command)
    for note in notes if detect_launch().rank == 0 else ():
        print(f"note: {note}", file=sys.stderr)
    if command.recipe == "list":
        for name, summary in list_recipes():
            print(f"{name:<24} {summary}")
    elif command.recipe == "finetune" and not command.settings.model.from_weights:
        message = "--recipe finetune starts from weights; give --pretrained (a run, a file or an open_clip tag)"
        raise UserError(message, code="recipe.needs_weights")
    elif command.dry_run or command.profile:
        with joined_processes(command.settings) as (config, _):
            show_preview(config) if command.dry_run else show_profile(config, start_up)
    elif stopped := run_training(command.settings, began=began).stopped:
        sys.exit(exit_code(stopped))


def kept_from_scratch(command: TrainCommand) -> list[str]:
    """A note where the file of a run from scratch is given to a run from weights."""
    config = command.settings
    if command.config is None or not config.model.from_weights:
        return []
    file = load_toml(Path(command.config))
    values = {"loss": config.run.loss, "lr": config.optim.lr}
    kept = [f"--{name} {value}" for name, value in values.items() if name in file and file[name] == value]
    if not kept or file.keys() & {"pretrained", "pretrained_image", "pretrained_text"}:
        return []
    return [f"{command.config} sets {' '.join(kept)}, as for a run from scratch; leave them out for fine-tuning"]


def show_preview(config: TrainConfig) -> None:
    job = set_up(config, kernels=False)
    directory, console = directory_of(job), console_of(job)
    announce(job, directory, console)
    if refusal := refusal_of(job, directory):
        console.print(f"note: without --dry-run this command is refused: {refusal}")
    path = job.context.ranks.broadcast_from_first(lambda: preview(job, directory))
    console.print(f"dry run: nothing was trained; one augmented batch with its captions: {path}")


def show_profile(config: TrainConfig, start_up: StartUp) -> None:
    start_up.end("processes and device")
    job = set_up(config, done=start_up.end)
    profiled = profile(job, done=start_up.end)
    tables = [start_up.table(), profiled.table(), *([profiled.communication_table()] if profiled.collectives else [])]
    console_of(job).print(*tables, *profile_summary(profiled, job), sep="\n")


def parse_command(arguments: list[str]) -> TrainCommand:
    """Recipe, then TOML file, then flags."""
    return parse(
        TrainCommand,
        arguments,
        command="train",
        description=DESCRIPTION,
        below=lambda typed: TrainCommand(settings=settings_below(typed)),
    )

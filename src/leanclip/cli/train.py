"""leanclip train: from the command line to the training loop."""

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from leanclip.cli.openclip_flags import from_openclip
from leanclip.cli.parse import parse
from leanclip.config import load_toml, override
from leanclip.distributed import detect_launch
from leanclip.losses import LossConfig
from leanclip.planning.profile import profile
from leanclip.planning.profile import summary as profile_summary
from leanclip.recipes import list_recipes, load_recipe
from leanclip.runs import TrainConfig
from leanclip.runs.stopping import exit_code
from leanclip.settings import common
from leanclip.training import set_up
from leanclip.training.preview import preview
from leanclip.training_run import console_of, directory_of, joined_processes, run_training

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
    for note in notes if detect_launch().rank == 0 else ():
        print(f"note: {note}", file=sys.stderr)
    if command.recipe == "list":
        for name, summary in list_recipes():
            print(f"{name:<24} {summary}")
    elif command.dry_run or command.profile:
        with joined_processes(command.settings) as (config, _):
            (show_preview if command.dry_run else show_profile)(config)
    elif stopped := run_training(command.settings, began=began).stopped:
        sys.exit(exit_code(stopped))


def show_preview(config: TrainConfig) -> None:
    job = set_up(config, kernels=False)
    job.context.ranks.broadcast_from_first(lambda: preview(job, directory_of(job), console_of(job)))


def show_profile(config: TrainConfig) -> None:
    job = set_up(config)
    profiled = profile(job)
    console_of(job).print(profiled.table(), *profile_summary(profiled, job), sep="\n")


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


if __name__ == "__main__":
    run(sys.argv[1:])

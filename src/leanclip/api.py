"""The commands as functions, for scripts and notebooks: `leanclip.train` and `leanclip.evaluate`."""

import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from leanclip.config import override
from leanclip.errors import ArgumentError, UserError
from leanclip.evaluation.results import SetResult
from leanclip.evaluation_run import (
    EvaluationConfig,
    evaluate_compared,
    joined_processes,
    open_sets,
)
from leanclip.inference import find_model, load
from leanclip.models import TwoTower
from leanclip.progress import make_console
from leanclip.recipes import settings_below
from leanclip.runs import RunDirectory, TrainConfig
from leanclip.training_run import run_training

__all__ = ["EvaluationConfig", "SetResult", "TrainConfig", "TrainedRun", "evaluate", "load", "train"]


@dataclass(frozen=True)
class TrainedRun:
    """A run that has ended."""

    directory: Path
    """Holds config.toml, metrics.jsonl and the checkpoints."""
    checkpoint: Path
    """The last checkpoint, which open_clip loads."""
    stopped: str | None = None
    """Why the run ended before its last step, if it did."""

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The records of metrics.jsonl: steps, with `step`, `loss`, `tau` and others, and evaluations."""
        lines = RunDirectory(self.directory).metrics.read_text().splitlines()
        return [json.loads(line) for line in lines]

    @cached_property
    def model(self) -> TwoTower:
        """The trained model in evaluation mode, on the CPU, with its `transform()` of images and its `tokenizer`."""
        return load(self.checkpoint)[0]


def train(
    config: TrainConfig | str | Path | None = None,
    *,
    recipe: str | None = None,
    quiet: bool = False,
    **settings: Any,
) -> TrainedRun:
    """Train a model, as `leanclip train` does.

    Args:
        config: a configuration, or the path of a TOML file such as a run's config.toml.
        recipe: the name of a recipe whose values `config` overrides.
        quiet: print nothing.
        **settings: any setting of `leanclip train --help-all`, with underscores: `train_data="captions.csv"`,
            `model="ViT-B-32"`, `epochs=10`. They override recipe and config.

    Returns:
        The run's directory, metrics and model.

    Raises:
        UserError: the settings or the data are wrong; its `code` is stable.

    Ctrl-C saves a checkpoint and returns with `stopped` set. Signal handlers are restored at the end, and the process
    never exits. In a process started by torchrun, all processes call this together.
    """
    values = {name: _plain(value) for name, value in settings.items()}
    if isinstance(config, TrainConfig):
        if recipe is not None:
            raise UserError("give a recipe or a TrainConfig, not both", code="config.two_sources")
        below = config
    else:
        path = None if config is None else str(config)
        below = settings_below(values | {"recipe": recipe, "config": path})
    run = run_training(override(below, values, "leanclip.train"), quiet=quiet)
    return TrainedRun(run.directory.path, run.checkpoint, run.stopped)


def evaluate(
    model: str | Path | TrainedRun, config: EvaluationConfig | None = None, *, quiet: bool = True, **settings: Any
) -> list[SetResult]:
    """Evaluate a model, as `leanclip evaluate` does: retrieval, zero-shot classification, CLIP_benchmark, DataComp.

    Args:
        model: a run, a checkpoint directory, an exported file, or an open_clip MODEL:TAG or MODEL:FILE.
        config: what to evaluate on, and how. By default a run is evaluated on its held-out data.
        quiet: show no progress.
        **settings: fields of `EvaluationConfig`, which override those of `config`: `val_data=("test.tar",)`,
            `zero_shot=("cifar10/",)`, `precision="amp_bf16"`.

    Returns:
        One result per set, with `name`, `kind` and `metrics` such as `text_to_image_recall@10` or `top1`. Of a run
        that started from trained weights, `baseline` has theirs and `difference` what training changed
        (`after_only=True` leaves them out).

    Raises:
        UserError: the settings or the data are wrong; its `code` is stable.
    """
    if not isinstance(model, (str, Path, TrainedRun)):
        message = f"evaluate takes a run or the path of a model, not a {type(model).__name__}"
        raise ArgumentError(message, code="config.bad_value")
    known = set(EvaluationConfig.__dataclass_fields__)
    if unknown := set(settings) - known:
        message = f"unknown settings {sorted(unknown)}; the settings are {', '.join(sorted(known))}"
        raise UserError(message, code="config.unknown_key")
    try:
        config = replace(config or EvaluationConfig(), **settings)
    except ValueError as error:
        raise UserError(str(error), code="config.bad_value") from error
    candidate = find_model(str(model.checkpoint if isinstance(model, TrainedRun) else model))
    with joined_processes(config) as config:
        return evaluate_compared(config, candidate, open_sets(config, candidate), make_console(quiet=quiet))[0]


def _plain(value: Any) -> Any:
    """A value as a TOML file would hold it."""
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value

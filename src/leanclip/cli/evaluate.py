"""leanclip evaluate: how good a trained model is, on several sets at once."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from leanclip.cli.parse import parse
from leanclip.distributed import Ranks
from leanclip.errors import UserError
from leanclip.evaluation import summary
from leanclip.evaluation.results import SetResult, as_csv, as_json, retrieval_rows, zero_shot_rows
from leanclip.evaluation_run import (
    EvaluationConfig,
    evaluate_candidate,
    find_candidate,
    joined_processes,
    open_sets,
)
from leanclip.settings import common

DESCRIPTION = """Figures of a trained model: retrieval on images with captions, accuracy on images with classes.

Without any data, on what the run itself was evaluated on. All sets of a call share one table:

  leanclip evaluate logs/demo
  leanclip evaluate logs/mine --val-data flickr8k-test.tar --zero-shot cifar10/ --imagenet-val imagenet/val
  leanclip evaluate logs/mine --zero-shot pets/ --templates prompts.txt --per-class --baseline logs/other
  leanclip evaluate ViT-B-32:laion2b.safetensors --zero-shot cifar10/ --json figures.json --csv figures.csv
  leanclip evaluate logs/mine --suite clip_benchmark --suite-data benchmark/wds_cifar10
  torchrun --nproc-per-node 4 -m leanclip evaluate logs/mine --imagenet-val imagenet/val     (4 GPUs)
"""
WIDTH = 120  # of a table that goes to a file


@dataclass(frozen=True, kw_only=True)
class EvaluateCommand:
    checkpoint: str
    """A run (its last checkpoint), a checkpoint directory, or an open_clip MODEL:TAG or MODEL:FILE."""
    baseline: str | None = common(None)
    """Compare with this model, given as CHECKPOINT is: the table shows differences in percentage points."""
    per_class: bool = common(False)
    """Also show the figures of each class."""
    json: str | None = common(None)
    """Also write all figures and confusion counts to this file."""
    csv: str | None = common(None)
    """Also write the figures to this file, one per line."""
    settings: EvaluationConfig = field(default_factory=EvaluationConfig)


def run(arguments: list[str]) -> None:
    command = parse(EvaluateCommand, arguments, command="evaluate", description=DESCRIPTION)
    candidate = find_candidate(command.checkpoint)
    baseline = None if command.baseline is None else find_candidate(command.baseline)
    for path in (command.json, command.csv):
        if path is not None and not Path(path).absolute().parent.is_dir():
            message = f"cannot write {path}: there is no folder {Path(path).parent}"
            raise UserError(message, code="evaluation.not_writable")
    with joined_processes(command.settings) as config:
        console = Console(soft_wrap=True, highlight=False, markup=False, quiet=not Ranks.current().first)
        if not console.is_terminal:
            console.width = WIDTH
        sets = open_sets(config, candidate)
        results = evaluate_candidate(config, candidate, sets, console)
        baselines = [] if baseline is None else evaluate_candidate(config, baseline, sets, console)
        label = None if baseline is None else baseline.label
        if not Ranks.current().first:
            return
        show(console, candidate.label, results, label, baselines, command)
        for note in sets.notes:
            console.print(note)
        if command.json is not None:
            Path(command.json).write_text(json.dumps(as_json(candidate.label, results, label, baselines), indent=1))
        if command.csv is not None:
            Path(command.csv).write_text(as_csv(results, baselines))


def show(
    console: Console,
    model: str,
    results: Sequence[SetResult],
    baseline: str | None,
    baselines: Sequence[SetResult],
    command: EvaluateCommand,
) -> None:
    title = model if baseline is None else f"{model}, in brackets how far above {baseline}"
    retrieval, zero_shot = retrieval_rows(results, baselines), zero_shot_rows(results, baselines)
    if retrieval:
        headings = ("retrieval", "direction", "recall@1", "recall@5", "recall@10", "median rank")
        console.print(_table(title, headings, retrieval, left=2))
    if zero_shot:
        headings = ("zero-shot", "images", "top-1", "top-5", "mean per class", "chance")
        console.print(_table(None if retrieval else title, headings, zero_shot, left=1))
    for found in results:
        if found.classified is not None and command.per_class:
            rows = [
                [row["class"], f"{row['images']:,}", "–" if row["recall"] is None else f"{row['recall']:.1%}",
                 "" if row["mistaken_for"] is None else f"{row['mistaken_for']} ({row['times']})"]
                for row in found.classified.per_class()
            ]  # fmt: skip
            headings = (f"class of {found.name}", "images", "recall", "most often mistaken for")
            console.print(_table(None, headings, rows, left=1))
    for found in results:
        if found.kind == "retrieval" and found.by == "leanclip":
            console.print(
                f"{found.name}: held-out text-to-image recall@10 {found.metrics['text_to_image_recall@10']:.1%} of"
                f" {found.metrics['captions']:,} captions among {found.metrics['images']:,} images"
                f" (chance {found.metrics['chance@10']:.1%})"
            )
        if found.classified is not None:
            console.print(summary(found.classified))
        for note in found.notes:
            console.print(note)


def _table(title: str | None, headings: Sequence[str], rows: list[list[str]], *, left: int) -> Table:
    table = Table(title=title)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number < left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table

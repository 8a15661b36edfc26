"""leanclip evaluate: the metrics of a trained model on several sets."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from leanclip.cli.parse import parse
from leanclip.distributed import Ranks
from leanclip.evaluation import summary
from leanclip.evaluation.results import SetResult, as_csv, as_json, retrieval_rows, zero_shot_rows
from leanclip.evaluation_run import (
    EvaluationConfig,
    evaluate_candidate,
    joined_processes,
    open_sets,
)
from leanclip.filesystem import check_target, write_atomically, writing
from leanclip.inference import find_model
from leanclip.progress import make_console
from leanclip.settings import common

DESCRIPTION = """Evaluate a trained model: retrieval on images with captions, accuracy on images with classes.

Without any data, a run is evaluated on its own held-out data. The results of all sets are in one table.

  leanclip evaluate logs/demo
  leanclip evaluate logs/mine --val-data flickr8k-test.tar --zero-shot cifar10/ --imagenet-val imagenet/val
  leanclip evaluate logs/mine --zero-shot pets/ --templates prompts.txt --per-class --baseline logs/other
  leanclip evaluate ViT-B-32:laion2b.safetensors --zero-shot cifar10/ --json figures.json --csv figures.csv
  torchrun --nproc-per-node 4 -m leanclip evaluate logs/mine --imagenet-val imagenet/val     (4 GPUs)
"""
WIDTH = 120  # of a table that is not printed on a terminal


@dataclass(frozen=True, kw_only=True)
class EvaluateCommand:
    checkpoint: str
    """A run (its last checkpoint), a checkpoint directory, an exported file, or an open_clip MODEL:TAG or
    MODEL:FILE."""
    baseline: str | None = common(None)
    """A model to compare with, given like CHECKPOINT: the table shows differences in percentage points."""
    per_class: bool = common(False)
    """Also show the metrics of each class."""
    json: str | None = common(None)
    """Also write all metrics and confusion counts to this file."""
    csv: str | None = common(None)
    """Also write the metrics to this file, one per line."""
    settings: EvaluationConfig = field(default_factory=EvaluationConfig)


def run(arguments: list[str]) -> None:
    command = parse(EvaluateCommand, arguments, command="evaluate", description=DESCRIPTION)
    candidate = find_model(command.checkpoint)
    baseline = None if command.baseline is None else find_model(command.baseline)
    for path in (command.json, command.csv):
        if path is not None:
            with writing(Path(path), code="evaluation.not_writable"):
                check_target(Path(path))  # before the evaluation, which takes long
    with joined_processes(command.settings) as config:
        console = make_console(quiet=not Ranks.current().first)
        if not console.is_terminal:
            console.width = WIDTH
        sets = open_sets(config, candidate)
        results = evaluate_candidate(config, candidate, sets, console)
        if baseline is not None:
            metrics = {result.name: result.metrics for result in evaluate_candidate(config, baseline, sets, console)}
            results = [replace(result, baseline=metrics.get(result.name)) for result in results]
        if not Ranks.current().first:
            return
        label = None if baseline is None else baseline.label
        show(console, candidate.label if label is None else f"{candidate.label} (difference from {label})", results)
        if command.per_class:
            show_classes(console, results)
        for note in [note for result in results for note in _notes(result)] + sets.notes:
            console.print(note)
        content = json.dumps(as_json(candidate.label, results, label), indent=1)
        for path, text in ((command.json, content), (command.csv, as_csv(results))):
            if path is not None:
                with writing(Path(path), code="evaluation.not_writable"):
                    write_atomically(Path(path), text)


def show(console: Console, title: str, results: Sequence[SetResult]) -> None:
    retrieval, zero_shot = retrieval_rows(results), zero_shot_rows(results)
    if retrieval:
        headings = ("retrieval", "direction", "recall@1", "recall@5", "recall@10", "median rank")
        console.print(_table(title, headings, retrieval, left=2))
    if zero_shot:
        headings = ("zero-shot", "images", "top-1", "top-5", "mean per class", "chance")
        console.print(_table(None if retrieval else title, headings, zero_shot, left=1))


def show_classes(console: Console, results: Sequence[SetResult]) -> None:
    for result in results:
        if result.classified is not None:
            rows = [
                [row["class"], f"{row['images']:,}", "–" if row["recall"] is None else f"{row['recall']:.1%}",
                 "" if row["mistaken_for"] is None else f"{row['mistaken_for']} ({row['times']})"]
                for row in result.classified.per_class()
            ]  # fmt: skip
            headings = (f"class of {result.name}", "images", "recall", "most often mistaken for")
            console.print(_table(None, headings, rows, left=1))


def _notes(result: SetResult) -> tuple[str, ...]:
    if result.classified is not None:
        return summary(result.classified), *result.notes
    if result.by != "leanclip":
        return result.notes
    recall = (
        f"{result.name}: held-out text-to-image recall@10 {result.metrics['text_to_image_recall@10']:.1%} of"
        f" {result.metrics['captions']:,} captions among {result.metrics['images']:,} images"
        f" (chance {result.metrics['chance@10']:.1%})"
    )
    return recall, *result.notes


def _table(title: str | None, headings: Sequence[str], rows: list[list[str]], *, left: int) -> Table:
    table = Table(title=title)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number < left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table

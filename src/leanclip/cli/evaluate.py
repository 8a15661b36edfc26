"""leanclip evaluate: the metrics of a trained model on several sets."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from leanclip.cli.parse import parse
from leanclip.distributed import Ranks
from leanclip.evaluation import summary
from leanclip.evaluation.results import SetResult, as_csv, as_json, datacomp_rows, retrieval_rows, zero_shot_rows
from leanclip.evaluation_run import (
    EvaluationConfig,
    evaluate_compared,
    evaluate_interpolated,
    joined_processes,
    open_sets,
)
from leanclip.filesystem import check_target, write_atomically, writing
from leanclip.inference import SavedModel, find_model, find_start
from leanclip.progress import make_console, make_table
from leanclip.reporting.interpolation import write_plot
from leanclip.runs import RunDirectory
from leanclip.settings import common

DESCRIPTION = """Evaluate a trained model: retrieval on images with captions, accuracy on images with classes.

Without any data, a run is evaluated on its own held-out data. The results of all sets are in one table. A run that
started from trained weights is compared with them: before, after and the difference.

  leanclip evaluate logs/demo
  leanclip evaluate logs/mine --val-data flickr8k-test.tar --zero-shot cifar10/ --imagenet-val imagenet/val
  leanclip evaluate logs/mine --zero-shot pets/ --templates prompts.txt --per-class --baseline logs/other
  leanclip evaluate logs/mine --interpolate 0,0.25,0.5,0.75,1        (what fine-tuning kept and what it gained)
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
    interpolate: str | None = common(None)
    """Evaluate weights between those that the run started from (0) and its own (1), such as 0,0.5,1; draw a plot."""
    start: str | None = None
    """With --interpolate: where it starts, given like CHECKPOINT. Default: what the run started from."""
    per_class: bool = common(False)
    """Also show the metrics of each class."""
    json: str | None = common(None)
    """Also write all metrics and confusion counts to this file."""
    csv: str | None = common(None)
    """Also write the metrics to this file, one per line."""
    settings: EvaluationConfig = field(default_factory=EvaluationConfig)

    def __post_init__(self) -> None:
        if self.interpolate is not None:
            if not self.weights or not all(0 <= weight <= 1 for weight in self.weights):
                raise ValueError(f"interpolate is {self.interpolate}; give numbers in [0, 1], such as 0,0.5,1")
            if self.baseline is not None or self.settings.suite is not None:
                raise ValueError("--interpolate works without --baseline and --suite (export the weights for that)")
        elif self.start is not None:
            raise ValueError("--start needs --interpolate")

    @property
    def weights(self) -> list[float]:
        """Of --interpolate, without repetition; empty where one is no number."""
        try:
            return sorted({float(word) for word in (self.interpolate or "").split(",")})
        except ValueError:
            return []


def run(arguments: list[str]) -> None:
    command = parse(EvaluateCommand, arguments, command="evaluate", description=DESCRIPTION)
    candidate = find_model(command.checkpoint)
    baseline = None if command.baseline is None else find_model(command.baseline)
    start = None if command.interpolate is None else find_start(command.start, candidate)
    plot = None if start is None else plot_path(command, candidate)
    for path in (command.json, command.csv, plot):
        if path is not None:
            with writing(Path(path), code="evaluation.not_writable"):
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                check_target(Path(path))  # before the evaluation, which takes long
    with joined_processes(command.settings) as config:
        console = make_console(quiet=not Ranks.current().first)
        if not console.is_terminal:
            console.width = WIDTH
        sets = open_sets(config, candidate)
        if start is not None:
            results, other = evaluate_interpolated(config, (start, candidate), command.weights, sets, console), start
        else:
            results, other = evaluate_compared(config, candidate, sets, console, baseline)
        if not Ranks.current().first:
            return
        label = None if other is None else other.label
        named = label if command.baseline or command.start else "the weights that it started from"
        show(console, candidate.label if label is None else f"{candidate.label}, compared with {named}", results)
        if command.per_class:
            show_classes(console, results)
        for note in dict.fromkeys([note for result in results for note in _notes(result)] + sets.notes):
            console.print(note)
        if plot is not None:
            with writing(plot, code="evaluation.not_writable"):
                write_plot(results, plot)
            console.print(f"plot: {plot}")
        content = json.dumps(as_json(candidate.label, results, label), indent=1)
        for path, text in ((command.json, content), (command.csv, as_csv(results))):
            if path is not None:
                with writing(Path(path), code="evaluation.not_writable"):
                    write_atomically(Path(path), text)


def plot_path(command: EvaluateCommand, candidate: SavedModel) -> Path | None:
    """Beside the JSON file, else in the run."""
    if command.json is not None:
        return Path(command.json).with_suffix(".svg")
    run = None if candidate.directory is None else RunDirectory.containing(candidate.directory)
    return None if run is None else run.path / "interpolation.svg"


def show(console: Console, title: str | None, results: Sequence[SetResult]) -> None:
    """One table of each kind; the column that says which weights are meant is left out if all are the model's."""
    retrieval = ("retrieval", "direction", "weights", "recall@1", "recall@5", "recall@10", "median rank")
    zero_shot = ("zero-shot", "images", "weights", "top-1", "top-5", "mean per class", "chance")
    tables = (
        (retrieval, retrieval_rows(results), 3),
        (zero_shot, zero_shot_rows(results), 1),
        (("DataComp", "metric", "weights", "value"), datacomp_rows(results), 3),
    )
    for headings, rows, left in tables:
        if rows:
            console.print(_table(title, headings, rows, left=left))
            title = None


def show_classes(console: Console, results: Sequence[SetResult]) -> None:
    for result in results:
        if result.classified is not None:
            rows = [
                [row["class"], f"{row['images']:,}", "–" if row["recall"] is None else f"{row['recall']:.1%}",
                 "" if row["mistaken_for"] is None else f"{row['mistaken_for']} ({row['times']})"]
                for row in result.classified.per_class()
            ]  # fmt: skip
            weight = "" if result.weight is None else f" at {result.weight:g}"
            headings = (f"class of {result.name}{weight}", "images", "recall", "most often mistaken for")
            console.print(_table(None, headings, rows, left=1))


def _notes(result: SetResult) -> tuple[str, ...]:
    if result.weight is not None:
        return result.notes
    if result.classified is not None:
        return summary(result.classified), *result.notes
    if (result.kind, result.by) != ("retrieval", "leanclip"):
        return result.notes
    recall = (
        f"{result.name}: held-out text-to-image recall@10 {result.metrics['text_to_image_recall@10']:.1%} of"
        f" {result.metrics['captions']:,} captions among {result.metrics['images']:,} images"
        f" (chance {result.metrics['chance@10']:.1%})"
    )
    return recall, *result.notes


def _table(title: str | None, headings: Sequence[str], rows: list[list[str]], *, left: int) -> Table:
    shown = [n for n, heading in enumerate(headings) if heading != "weights" or any(row[n] for row in rows)]
    return make_table(
        title,
        [headings[n] for n in shown],
        [[row[n] for n in shown] for row in rows],
        texts=sum(n < left for n in shown),
        no_wrap=True,
    )

"""leanclip evaluate: how good a trained model is, on several sets at once."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple

from rich.console import Console
from rich.table import Table

from leanclip.cli.parse import parse
from leanclip.config import load_toml, override
from leanclip.data import Subset, load_manifest, open_validation
from leanclip.device import autocast_of, device_of
from leanclip.distributed import Ranks, detect_launch, device_for, process_group
from leanclip.errors import UserError
from leanclip.evaluation import (
    ClassifierCache,
    LabelledSet,
    Prompts,
    classify,
    embed,
    labelled_sets,
    prompts_for,
    retrieval_metrics,
    summary,
)
from leanclip.evaluation.clip_benchmark import SuiteSet, run_suite, suite_sets
from leanclip.evaluation.held_out import open_held_out
from leanclip.evaluation.results import SetResult, as_csv, as_json, retrieval_rows, zero_shot_rows
from leanclip.inference import find_model, load_model
from leanclip.models import ModelConfig, TwoTower, create_model, is_model_name
from leanclip.progress import progress_bar
from leanclip.runs import RunDirectory, TrainConfig
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
MANY_SAMPLES = 2000  # decoded in a few seconds; more are worth some processes
WIDTH = 120  # of a table that goes to a file
TIMEOUT = 1800.0  # seconds that one process waits for another


@dataclass(frozen=True, kw_only=True)
class EvaluateCommand:
    checkpoint: str
    """A run (its last checkpoint), a checkpoint directory, or an open_clip MODEL:TAG or MODEL:FILE."""
    val_data: tuple[str, ...] = common(())
    """Images with captions, for retrieval: as for training, or a folder in CLIP_benchmark's layout. May be given
    several times. Default: those of the run."""
    csv_img_key: str | None = None
    """The column of a .csv or .tsv that holds image paths. Default: as for the run, filepath where there is none."""
    csv_caption_key: str | None = None
    """The column that holds captions. Default: as for the run, title where there is none."""
    csv_separator: str | None = None
    """What separates the columns, such as ',' or '\\t'. Default: as for the run, else what splits the header."""
    zero_shot: tuple[str, ...] = common(())
    """Images with classes: tar shards with .cls files and a classnames.txt, a folder for each class, or emoji, the
    bundled ones. May be given several times. Default: those of the run."""
    imagenet_val: str | None = common(None)
    """ImageNet's validation images: a folder for each of the 1,000 classes."""
    imagenet_v2: str | None = common(None)
    """ImageNet-V2, likewise; its folders are numbered."""
    templates: str | None = common(None)
    """Prompts for class names: openai (80), simple (7), or a file with one per line, {} standing for the name.
    Default: the set's own, else openai for ImageNet and simple for others."""
    baseline: str | None = common(None)
    """Compare with this model, given as CHECKPOINT is: the table shows differences in percentage points."""
    suite: Literal["clip_benchmark"] | None = common(None)
    """Let CLIP_benchmark evaluate the checkpoint on its data sets."""
    suite_data: tuple[str, ...] = common(())
    """A WebDataset in CLIP_benchmark's layout, a folder of such, or NAME=ROOT for a data set that it knows. May be
    given several times."""
    per_class: bool = common(False)
    """Also show the figures of each class."""
    json: str | None = common(None)
    """Also write all figures and confusion counts to this file."""
    csv: str | None = common(None)
    """Also write the figures to this file, one per line."""
    precision: Literal["fp32", "amp_bf16", "amp"] = common("fp32")
    """amp_bf16 and amp (fp16) are faster on a GPU and move figures by some tenths of a point."""
    batch_size: int = common(256)
    """Images or texts embedded at a time."""
    workers: int | None = None
    """Processes that decode images. Default: up to 4 for large sets."""
    device: str | None = common(None)
    """cpu or cuda. Default: a GPU if there is one."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}; it must be at least 1")
        if self.suite_data and self.suite is None:
            raise ValueError("--suite-data needs --suite clip_benchmark")

    @property
    def names_data(self) -> bool:
        return bool(self.val_data or self.zero_shot or self.imagenet_val or self.imagenet_v2 or self.suite)


class Candidate(NamedTuple):
    """A model to evaluate, not loaded yet."""

    label: str
    load: Callable[[], TwoTower]
    directory: Path | None  # of the checkpoint
    model: str  # as open_clip takes it
    pretrained: str


class Sets(NamedTuple):
    """What a call evaluates on."""

    retrieval: dict[str, Subset]
    zero_shot: list[tuple[LabelledSet, Prompts]]
    suite: list[SuiteSet]
    notes: list[str]


def run(arguments: list[str]) -> None:
    command = parse(EvaluateCommand, arguments, command="evaluate", description=DESCRIPTION)
    candidate = find_candidate(command.checkpoint)
    baseline = None if command.baseline is None else find_candidate(command.baseline)
    for path in (command.json, command.csv):
        if path is not None and not Path(path).absolute().parent.is_dir():
            raise UserError(f"cannot write {path}: there is no folder {Path(path).parent}")
    launch = detect_launch()
    command = replace(command, device=device_for(launch, command.device))
    with process_group(launch, device_of(command.device), timeout=TIMEOUT):
        console = Console(soft_wrap=True, highlight=False, markup=False, quiet=not Ranks.current().first)
        if not console.is_terminal:
            console.width = WIDTH
        sets = open_sets(command, candidate.directory)
        results = evaluate(command, candidate, sets, console)
        baselines = [] if baseline is None else evaluate(command, baseline, sets, console)
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


def find_candidate(given: str) -> Candidate:
    """A run, a checkpoint directory, or an open_clip model with its tag or weights file."""
    name, colon, weights = given.partition(":")
    if is_model_name(given) and not Path(given).exists():
        raise UserError(f"no such run or checkpoint: {given}; for the model give {given}:TAG or {given}:FILE")
    if Path(given).exists() or not colon:
        directory = find_model(Path(given))
        local = f"local-dir:{directory.resolve()}"
        return Candidate(str(directory), lambda: load_model(directory), directory, local, "")
    config = ModelConfig(model=name, pretrained=weights)
    full = str(Path(weights).resolve()) if Path(weights).exists() else weights
    return Candidate(given, lambda: create_model(config), None, name, full)


def open_sets(command: EvaluateCommand, directory: Path | None) -> Sets:
    """The sets that were named, or the run's own."""
    config, manifest = TrainConfig(), None
    for parent in directory.resolve().parents if directory is not None else ():
        if (parent / "config.toml").is_file():
            config = override(TrainConfig(), load_toml(parent / "config.toml"), str(parent / "config.toml"))
            manifest = load_manifest(RunDirectory(parent).manifest)
            break
    else:
        if not command.names_data:
            raise UserError(f"{command.checkpoint} belongs to no run; give --val-data, --zero-shot or --imagenet-val")
    names = ("csv_img_key", "csv_caption_key", "csv_separator")
    columns = {name: value for name in names if (value := getattr(command, name)) is not None}
    config = replace(config, data=replace(config.data, **columns))
    retrieval: dict[str, Subset] = {}
    notes: list[str] = []
    templates = command.templates
    if command.names_data:
        for given in dict.fromkeys(command.val_data):
            name = PurePosixPath(given.rstrip("/")).name.removesuffix(".tar")
            retrieval[_unused(name, retrieval)] = open_held_out(given, config.data)
        labelled = labelled_sets(
            command.zero_shot, imagenet_val=command.imagenet_val, imagenet_v2=command.imagenet_v2
        )
    else:
        own, note = open_validation(config.data, seed=config.run.seed, manifest=manifest)
        retrieval |= {} if own is None else {"val": own}
        notes += [note] if note else []
        run, bundled = config.run, config.data.train_data is None and config.data.val_data is None
        labelled = labelled_sets(
            run.zero_shot, imagenet_val=run.imagenet_val, imagenet_v2=run.imagenet_v2, bundled=bundled
        )
        templates = templates or run.templates
        if not retrieval and not labelled:
            raise UserError("the run has no validation data; give --val-data, --zero-shot or --imagenet-val")
    labelled = [replace(each, name=_unused(each.name, retrieval)) for each in labelled]
    notes += [each.note for each in labelled if each.note and templates is None]
    prompts = [(each, prompts_for(each, templates)) for each in labelled]
    return Sets(retrieval, prompts, suite_sets(command.suite_data) if command.suite else [], notes)


def _unused(name: str, taken: dict[str, Subset]) -> str:
    numbered = (f"{name}-{number}" for number in range(2, len(taken) + 3))
    return name if name not in taken else next(each for each in numbered if each not in taken)


def evaluate(command: EvaluateCommand, candidate: Candidate, sets: Sets, console: Console) -> list[SetResult]:
    """One model on all sets."""
    results: list[SetResult] = []
    device = device_of(command.device)
    shown = Ranks.current().first
    model = candidate.load()  # for the suite alone, too: what is refused here must not reach it
    if sets.retrieval or sets.zero_shot:
        model = model.to(device).eval()
        for name, subset in sets.retrieval.items():
            results.append(retrieve(command, model, name, subset, shown))
        cache = ClassifierCache(model, precision=command.precision) if sets.zero_shot else None
        for labelled, prompts in sets.zero_shot:
            found = classify(
                model,
                labelled,
                prompts,
                device=device,
                autocast=autocast_of(command.precision, device),
                batch=command.batch_size,
                workers=_workers(command, len(labelled)),
                cache=cache,
                shown=shown,
            )
            results.append(
                SetResult(name=found.name, kind="zero-shot", metrics=found.metrics(), classified=found,
                          notes=_left_out(found.name, found.broken))
            )  # fmt: skip
    del model
    if sets.suite:
        results += run_suite(
            sets.suite,
            model=candidate.model,
            pretrained=candidate.pretrained,
            device=device,
            precision=command.precision,
            batch=command.batch_size,
            workers=2 if command.workers is None else command.workers,
            quiet=not console.is_terminal,
            tell=console.print,
        )
    return results


def retrieve(command: EvaluateCommand, model: TwoTower, name: str, subset: Subset, shown: bool) -> SetResult:
    device = device_of(command.device)
    with progress_bar(name, len(subset), shown=shown) as advance:
        embedded = embed(
            model,
            subset,
            device=device,
            autocast=autocast_of(command.precision, device),
            batch=command.batch_size,
            workers=_workers(command, len(subset)),
            advance=advance,
        )
    with progress_bar(f"{name}: ranks", len(embedded.texts), shown=shown) as advance:
        metrics = retrieval_metrics(embedded.images, embedded.texts, embedded.image_of_text, advance=advance)
    return SetResult(
        name=name, kind="retrieval", metrics=metrics, details={"broken": embedded.broken},
        notes=(*_left_out(name, embedded.broken), *([shared] if (shared := embedded.shared_captions(name)) else ())),
    )  # fmt: skip


def _workers(command: EvaluateCommand, samples: int) -> int:
    if command.workers is not None:
        return command.workers
    return min(4, os.cpu_count() or 1) if samples > MANY_SAMPLES else 0


def _left_out(name: str, broken: int) -> tuple[str, ...]:
    return (f"{broken} held-out samples could not be used, of {name}",) if broken else ()


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

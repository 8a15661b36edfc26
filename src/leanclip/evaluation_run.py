"""An evaluation from its configuration to its results, without a command line."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from rich.console import Console

from leanclip.config import load_toml, override
from leanclip.data import Subset, load_manifest, open_validation
from leanclip.device import autocast_of, device_of
from leanclip.distributed import Ranks, detect_launch, device_for, process_group
from leanclip.errors import UserError
from leanclip.evaluation import (
    EvaluationSettings,
    LabelledSet,
    Prompts,
    classify,
    embed,
    labelled_sets,
    prompts_for,
    retrieval_metrics,
)
from leanclip.evaluation.clip_benchmark import SuiteSet, run_suite, suite_sets
from leanclip.evaluation.datacomp import datacomp_sets, with_means
from leanclip.evaluation.held_out import open_held_out
from leanclip.evaluation.labelled_sets import set_name, unused_name
from leanclip.evaluation.results import SetResult
from leanclip.inference import SavedModel, interpolated, start_of
from leanclip.models import TwoTower
from leanclip.runs import RunDirectory, TrainConfig
from leanclip.settings import at_least, between, check_limits, common, setting
from leanclip.worker_pool import MOST_WORKERS

TIMEOUT = 1800.0  # seconds that one process waits for another


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Data and precision"""

    val_data: tuple[str, ...] = common(())
    """Images with captions, for retrieval: as for training, or a folder in CLIP_benchmark's layout. Repeatable.
    Default: those of the run."""
    zero_shot: tuple[str, ...] = common(())
    """Images with classes: tar shards with .cls files and a classnames.txt, a folder for each class, or emoji, the
    bundled ones. Repeatable. Default: those of the run."""
    imagenet_val: str | None = common(None)
    """ImageNet's validation images: a folder for each of the 1,000 classes."""
    imagenet_v2: str | None = None
    """ImageNet-V2, likewise; its folders are numbered."""
    templates: str | None = common(None)
    """Prompts for class names: openai (80), simple (7), or a file with one per line, {} standing for the name.
    Default: those of the set, else openai for ImageNet and simple for others."""
    suite: Literal["clip_benchmark", "datacomp"] | None = common(None)
    """Run CLIP_benchmark on the checkpoint; datacomp: on DataComp's 38 sets, with its means and those of FastCLIP."""
    suite_data: tuple[str, ...] = common(())
    """A WebDataset in CLIP_benchmark's layout, a folder of such, or NAME=ROOT for a data set that it knows; for
    datacomp also its eval_results.jsonl. Repeatable."""
    csv_img_key: str | None = None
    """The column of a .csv or .tsv that holds image paths. Default: that of the run, else filepath."""
    csv_caption_key: str | None = None
    """The column that holds captions. Default: that of the run, else title."""
    csv_separator: str | None = None
    """What separates the columns, such as ',' or '\\t'. Default: that of the run, else what splits the header."""
    after_only: bool = common(False)
    """Leave out the weights that a fine-tuned run started from. Default: they are evaluated too, as `before`."""
    precision: Literal["fp32", "amp_bf16", "amp"] = common("fp32")
    """amp_bf16 and amp (fp16) are faster on a GPU and change metrics by some tenths of a point."""
    batch_size: int = common(256, at_least(1))
    """Images or captions embedded at a time."""
    workers: int | None = setting(None, limits=between(0, MOST_WORKERS))
    """Processes that decode the images of sets with more than 2,000. Default: up to 4."""
    device: str | None = common(None)
    """cpu or cuda. Default: a GPU if there is one."""

    def __post_init__(self) -> None:
        check_limits(self)
        if self.suite_data and self.suite is None:
            raise ValueError("--suite-data needs --suite clip_benchmark or datacomp")
        if "" in self.val_data:
            raise ValueError("val_data is empty; name the data, or leave it out")

    @property
    def names_data(self) -> bool:
        return bool(self.val_data or self.zero_shot or self.imagenet_val or self.imagenet_v2 or self.suite)


class EvaluationSets(NamedTuple):
    retrieval: dict[str, Subset]
    zero_shot: list[tuple[LabelledSet, Prompts]]
    suite: list[SuiteSet]
    collected: dict[str, SetResult]  # of DataComp's sets, by its own program
    notes: list[str]


@contextmanager
def joined_processes(config: EvaluationConfig) -> Iterator[EvaluationConfig]:
    """Inside, this process has joined the others. Yields the configuration with its device filled in."""
    launch = detect_launch()
    config = replace(config, device=device_for(launch, config.device))
    with process_group(launch, device_of(config.device), timeout=TIMEOUT):
        yield config


def open_sets(config: EvaluationConfig, candidate: SavedModel) -> EvaluationSets:
    """The sets that the configuration names, or those of the candidate's run."""
    run = None if candidate.directory is None else RunDirectory.containing(candidate.directory)
    if run is None and not config.names_data:
        message = f"{candidate.label} does not belong to a run; give --val-data, --zero-shot or --imagenet-val"
        raise UserError(message, code="evaluation.no_data")
    training = TrainConfig()
    if run is not None:
        training = override(training, load_toml(run.config), str(run.config))
    names = ("csv_img_key", "csv_caption_key", "csv_separator")
    columns = {name: value for name in names if (value := getattr(config, name)) is not None}
    data, settings = replace(training.data, **columns), training.run
    retrieval: dict[str, Subset] = {}
    note, templates = None, config.templates
    if run is None or config.names_data:
        for path in dict.fromkeys(config.val_data):
            retrieval[unused_name(set_name(path), retrieval)] = open_held_out(path, data)
        sets, bundled = config, False
    else:
        held_out, note = open_validation(data, seed=settings.seed, manifest=load_manifest(run.manifest))
        retrieval |= {} if held_out is None else {"val": held_out}
        sets, bundled = settings, data.train_data is None and data.val_data is None
        templates = templates or settings.templates
    labelled = labelled_sets(
        sets.zero_shot,
        imagenet_val=sets.imagenet_val,
        imagenet_v2=sets.imagenet_v2,
        bundled=bundled,
        used_names=retrieval,
    )
    if not retrieval and not labelled and not config.suite:
        message = "the run has no validation data; give --val-data, --zero-shot or --imagenet-val"
        raise UserError(message, code="evaluation.no_data")
    if config.templates is not None and not labelled:
        message = "--templates needs images with classes, and none are evaluated; give --zero-shot or --imagenet-val"
        raise UserError(message, code="evaluation.no_classes")
    if config.suite == "datacomp":
        suite, collected = datacomp_sets(config.suite_data)
    else:
        suite, collected = suite_sets(config.suite_data) if config.suite else [], {}
    notes = [note, *(entry.note for entry in labelled if templates is None)]
    return EvaluationSets(
        retrieval,
        [(entry, prompts_for(entry, templates)) for entry in labelled],
        suite,
        collected,
        [note for note in notes if note],
    )


def evaluate_compared(
    config: EvaluationConfig,
    candidate: SavedModel,
    sets: EvaluationSets,
    console: Console,
    baseline: SavedModel | None = None,
) -> tuple[list[SetResult], SavedModel | None]:
    """With the metrics of a baseline, by default the weights that the run started from; also returns which."""
    other = baseline or (None if config.after_only else start_of(candidate))
    if other is not None and sets.collected:
        raise UserError(
            f"the stored results in --suite-data are those of one model, and {other.label} would be evaluated, too;"
            f" {'add --after-only' if baseline is None else 'leave out --baseline'}",
            code="suite.one_model",
        )
    results = evaluate_candidate(config, candidate, sets, console)
    if other is None:
        return results, None
    metrics = {result.name: result.metrics for result in evaluate_candidate(config, other, sets, console)}
    compared = "before" if baseline is None else "baseline"
    return [replace(r, baseline=metrics.get(r.name), compared=compared) for r in results], other


def evaluate_interpolated(
    config: EvaluationConfig,
    ends: tuple[SavedModel, SavedModel],
    weights: Sequence[float],
    sets: EvaluationSets,
    console: Console,
) -> list[SetResult]:
    """The results of the models between two, for each weight of the second."""
    return [
        replace(result, weight=weight)
        for weight in weights
        for result in evaluate_candidate(config, interpolated(*ends, weight), sets, console)
    ]


def evaluate_candidate(
    config: EvaluationConfig, candidate: SavedModel, sets: EvaluationSets, console: Console
) -> list[SetResult]:
    device = device_of(config.device)
    settings = EvaluationSettings(
        device=device,
        autocast=autocast_of(config.precision, device),
        batch=config.batch_size,
        workers=min(4, os.cpu_count() or 1) if config.workers is None else config.workers,
        progress=Ranks.current().first and not console.quiet,
    )
    results: list[SetResult] = []
    model = candidate.load()  # for the suite alone, too: it must not get a model that is refused here
    if sets.retrieval or sets.zero_shot:
        model = model.to(device).eval()
        results += [_retrieve(model, name, subset, settings) for name, subset in sets.retrieval.items()]
        for labelled, prompts in sets.zero_shot:
            classified = classify(model, labelled, prompts, settings)
            notes, metrics = _broken_note(classified.name, classified.broken), classified.metrics()
            results.append(
                SetResult(name=classified.name, kind="zero-shot", metrics=metrics, classified=classified, notes=notes)
            )
    del model
    suite: list[SetResult] = []
    if sets.suite:
        suite = run_suite(
            sets.suite,
            model=candidate.model,
            pretrained=candidate.pretrained,
            device=device,
            precision=config.precision,
            batch=config.batch_size,
            workers=2 if config.workers is None else config.workers,
            quiet=not console.is_terminal,
            report=console.print,
        )
    return results + (with_means(suite, sets.collected) if config.suite == "datacomp" else suite)


def _retrieve(model: TwoTower, name: str, subset: Subset, settings: EvaluationSettings) -> SetResult:
    embedded = embed(model, subset, settings, name=name)
    shared = embedded.shared_captions(name)
    return SetResult(
        name=name,
        kind="retrieval",
        metrics=retrieval_metrics(embedded.images, embedded.texts, embedded.image_of_text),
        details={"broken": embedded.broken},
        notes=(*_broken_note(name, embedded.broken), *([shared] if shared else ())),
    )


def _broken_note(name: str, broken: int) -> tuple[str, ...]:
    return (f"{name}: {broken} held-out samples are broken and were skipped",) if broken else ()

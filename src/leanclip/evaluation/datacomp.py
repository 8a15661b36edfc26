"""DataComp's 38 evaluation sets: which data belong to them, their main metrics, and the means over them."""

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from leanclip.errors import UserError, first_line
from leanclip.evaluation.clip_benchmark import SuiteSet, suite_sets
from leanclip.evaluation.results import SetResult
from leanclip.filesystem import parse_json, reading

RESULTS_SUFFIX = ".jsonl"  # of what DataComp's evaluate.py writes
RECALLS = ("image_retrieval_recall@1", "text_retrieval_recall@1")  # their mean is mean_recall@1
COMPUTED = ("acc1", "mean_per_class_recall", "mean_recall@1")  # main metrics that CLIP_benchmark has


class Task(NamedTuple):
    """One of the sets; the directory of its data is wds_DIRECTORY_test or wds_DIRECTORY."""

    key: str
    name: str
    metric: str
    directory: str
    group: str


def _tasks() -> dict[str, Task]:
    lines = Path(__file__).with_suffix(".csv").read_text().splitlines()
    return {row["key"]: Task(**row) for row in csv.DictReader(line for line in lines if not line.startswith("#"))}


TASKS = _tasks()
GROUPS = {task.group for task in TASKS.values()}
MEANS = {
    "ImageNet": {"imagenet"},
    "ImageNet dist. shifts": {"shift"},
    "VTAB": {"vtab"},
    "Retrieval": {"captions", "winogavil"},
    "Average": GROUPS,
    "FastCLIP: IN & Variants": {"imagenet", "shift"},
    "FastCLIP: Retrieval": {"captions"},
    "FastCLIP: Datacomp": GROUPS,
}


def datacomp_sets(names: Sequence[str]) -> tuple[list[SuiteSet], dict[str, SetResult]]:
    """Of --suite-data: the sets to run, named by DataComp's keys, and the results that its evaluate.py stored."""
    collected: dict[str, SetResult] = {}
    files = [name for name in names if name.endswith(RESULTS_SUFFIX)]
    for file in files:
        collected |= _stored_results(file)
    by_directory = {task.directory: task for task in TASKS.values()}
    sets: dict[str, SuiteSet] = {}
    others = [name for name in names if name not in files]
    for data in suite_sets(others) if others or not files else []:
        task = by_directory.get(data.name.removeprefix("wds_").removesuffix("_test").replace("/", "-"))
        if task is None or task.key in collected or task.metric not in COMPUTED:
            continue
        if task.key in sets:
            message = f"--suite-data has {task.name} twice: {sets[task.key].root} and {data.root}; give one of them"
            raise UserError(message, code="suite.duplicate")
        sets[task.key] = data._replace(name=task.key)
    if not sets and not collected:
        raise UserError(
            f"--suite-data {' '.join(names)}: no set of DataComp that CLIP_benchmark can run, and no results of its"
            " evaluate.py (eval_results.jsonl); directories have names such as wds_cifar10_test, wds_vtab-pets_test,"
            " wds_flickr30k_test",
            code="suite.no_data",
        )
    return list(sets.values()), collected


def with_means(ran: Sequence[SetResult], collected: Mapping[str, SetResult]) -> list[SetResult]:
    """The results of all sets in DataComp's order, and the means of what is there."""
    results = dict(collected)
    for result in ran:
        raw = dict(result.details["clip_benchmark"]["metrics"])
        if raw.keys() >= set(RECALLS):
            raw["mean_recall@1"] = math.fsum(raw[name] for name in RECALLS) / 2
        task = TASKS[result.name.removeprefix("clip_benchmark/")]
        if task.metric in raw:  # a multi-label set has another
            results[task.key] = _set_result(task, raw[task.metric], "clip_benchmark", result.metrics, result.details)
    ordered = [results[key] for key in TASKS if key in results]
    return ordered + [_mean(name, groups, results) for name, groups in MEANS.items()]


def _set_result(
    task: Task, value: float, by: str, metrics: Mapping[str, float], details: Mapping[str, Any]
) -> SetResult:
    return SetResult(
        name=f"datacomp/{task.key}",
        kind="datacomp",
        metrics={"main_metric": value, **metrics},
        by=by,
        details={"label": task.name, "metric": task.metric, **details},
    )


def _mean(name: str, groups: set[str], results: Mapping[str, SetResult]) -> SetResult:
    """A mean over fewer sets than it should have is called so, and does not compare with one over others."""
    members = [task for task in TASKS.values() if task.group in groups]
    values = [results[task.key].metrics["main_metric"] for task in members if task.key in results]
    missing = [task for task in members if task.key not in results]
    metric, label = f"mean_of_{len(values)}", f"mean, {len(values)} of {len(members)} sets"
    if not missing:
        metric, label = "mean", f"mean of {len(members)}"
    return SetResult(
        name=f"datacomp/mean/{name}",
        kind="datacomp",
        metrics={metric: math.fsum(values) / len(values)} if values else {},
        details={"label": name, "metric": label, "missing": [task.key for task in missing]},
        notes=_missing_note(missing) if name == "Average" else (),
    )


def _missing_note(missing: Sequence[Task]) -> tuple[str, ...]:
    """Which sets are missing, and which of them CLIP_benchmark cannot give."""
    if not missing:
        return ()
    note = f"DataComp: {len(missing)} of {len(TASKS)} sets are missing: {', '.join(task.name for task in missing)}"
    foreign = [task.name for task in missing if task.metric not in COMPUTED]
    if foreign:
        note += f"; CLIP_benchmark lacks the metrics of {', '.join(foreign)}: collect DataComp's eval_results.jsonl"
    return (note,)


def _stored_results(file: str) -> dict[str, SetResult]:
    """Of each known set whose line has a main metric."""
    results: dict[str, SetResult] = {}
    try:
        with reading(file):
            lines = Path(file).read_text().splitlines()
        for line in lines:
            row = parse_json(line)
            value = row["metrics"]["main_metric"]
            if row["key"] in TASKS and value is not None:
                if not math.isfinite(value := float(value)):
                    raise ValueError(f"{row['key']} has the main metric {value}")
                results[row["key"]] = _set_result(TASKS[row["key"]], value, "datacomp", {}, {})
    except (ValueError, TypeError, KeyError) as error:
        message = f"{file} does not hold what DataComp's evaluate.py writes ({first_line(error)})"
        raise UserError(message, code="suite.bad_results") from error
    return results

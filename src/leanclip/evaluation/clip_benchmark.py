"""CLIP_benchmark on leanclip's checkpoints: its own program, in a separate process for each data set."""

import contextlib
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from leanclip.distributed import Ranks
from leanclip.errors import UserError
from leanclip.evaluation.held_out import TYPE_FILE
from leanclip.evaluation.labelled_sets import read_lines
from leanclip.evaluation.results import SetResult
from leanclip.filesystem import reading
from leanclip.progress import ACTIVITY

TASKS = {"retrieval": "zeroshot_retrieval", "classification": "zeroshot_classification"}
METRIC_NAMES = {"acc1": "top1", "acc5": "top5", "image_retrieval_recall@": "text_to_image_recall@",
                "text_retrieval_recall@": "image_to_text_recall@"}  # fmt: skip
POLL_SECONDS = 0.5


class SuiteSet(NamedTuple):
    """A data set in the terms of CLIP_benchmark's command line."""

    name: str
    dataset: str
    root: str
    task: str
    shards: int | None  # of a WebDataset; its loader fails with more workers than that


def suite_sets(names: Sequence[str]) -> list[SuiteSet]:
    """The sets that --suite-data names: WebDatasets, a directory of them, or NAME=ROOT for built-in data sets."""
    if importlib.util.find_spec("clip_benchmark") is None:
        raise UserError(
            "--suite needs the package clip_benchmark: pip install 'leanclip[eval]'", code="install.clip_benchmark"
        )
    if not names:
        raise UserError(
            "--suite needs --suite-data: a directory in CLIP_benchmark's WebDataset layout, or NAME=ROOT",
            code="suite.no_data",
        )
    sets: list[SuiteSet] = []
    for text in names:
        path, (name, equals, root) = Path(text), text.partition("=")
        with reading(text):
            directories = [entry for entry in (path, *sorted(path.glob("*"))) if _is_web_dataset(entry)]
        if directories:
            sets += map(_web_dataset, directories)
        elif equals and name and root:
            sets.append(SuiteSet(name, name, str(Path(root).resolve()), "auto", None))
        else:
            raise UserError(
                f"--suite-data {text}: no test/nshards.txt in it or in its directories; give a WebDataset in"
                " CLIP_benchmark's layout, a directory of such, or NAME=ROOT for one of its built-in data sets",
                code="suite.no_data",
            )
    return sets


def run_suite(
    sets: Sequence[SuiteSet],
    *,
    model: str,
    pretrained: str = "",
    device: torch.device,
    precision: Literal["fp32", "amp", "amp_bf16"] = "fp32",
    batch: int = 64,
    workers: int = 2,
    quiet: bool = True,
    report: Callable[[str], None] = lambda _: None,
) -> list[SetResult]:
    """CLIP_benchmark's metrics under leanclip's names. Ranks share the data sets; failures are reported and skipped.

    `model` and `pretrained` are arguments of open_clip: `local-dir:PATH`, or a name with a tag or file.
    """
    ranks = Ranks.current()
    flags = ["--model", model, "--pretrained", pretrained, "--batch_size", str(batch)]
    flags += ["--no_amp"] if precision == "fp32" else []
    outcomes: dict[int, SetResult | str] = {}
    for number in range(ranks.rank, len(sets), ranks.size):
        report(f"clip_benchmark: {sets[number].name} ({number + 1} of {len(sets)})")
        outcomes[number] = _run_one(sets[number], flags, workers, _environment(device), quiet)
    for other in ranks.all_gather_objects(outcomes):
        outcomes |= other
    failures = [outcome for _, outcome in sorted(outcomes.items()) if isinstance(outcome, str)]
    for failure in failures:
        report(failure)
    if len(failures) == len(outcomes):
        raise UserError(failures[0], code="suite.failed")
    return [outcome for _, outcome in sorted(outcomes.items()) if isinstance(outcome, SetResult)]


def _run_one(
    data: SuiteSet, flags: Sequence[str], workers: int, environment: Mapping[str, str], quiet: bool
) -> SetResult | str:
    """The result, or the reason why there is none."""
    with tempfile.TemporaryDirectory() as directory:  # it leaves files in its working directory
        output = Path(directory) / "result.json"
        command = [
            sys.executable, "-m", "leanclip.evaluation.clip_benchmark_main", "eval",
            "--dataset", data.dataset, "--dataset_root", _literal(data.root), "--task", data.task, *flags,
            "--output", _literal(str(output)), "--split", "test", "--recall_k", "1", "5", "10",
            "--num_workers", str(min(workers, data.shards or workers)),
        ]  # fmt: skip
        done = _run(
            command,
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,  # transformers would ask whether to run a repository's code
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE if quiet else None,
        )
        if done.returncode or not output.is_file():
            lines = [line for line in (done.stderr or "see its message above").splitlines() if line.strip()]
            return f"clip_benchmark failed on {data.name}: {lines[-1] if lines else 'no message'}"
        raw = json.loads(output.read_text())
    metrics = {name: float(value) for name, value in raw["metrics"].items() if math.isfinite(value)}
    return SetResult(
        name=f"clip_benchmark/{data.name}",
        kind="retrieval" if raw["task"] == "zeroshot_retrieval" else "zero-shot",
        metrics={_metric_name(name): value for name, value in metrics.items()},
        by="clip_benchmark",
        details={"clip_benchmark": {"task": raw["task"], "metrics": metrics}},
    )


def _run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """subprocess.run, and while the process runs this one counts as active."""
    with subprocess.Popen(command, text=True, **options) as process:
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    output, errors = process.communicate(timeout=POLL_SECONDS)
                    return subprocess.CompletedProcess(command, process.returncode, output, errors)
                ACTIVITY.still_working()
        except BaseException:
            process.kill()
            raise


def _metric_name(name: str) -> str:
    for theirs, ours in METRIC_NAMES.items():
        name = name.replace(theirs, ours)
    return name


def _literal(path: str) -> str:
    """With doubled braces, because CLIP_benchmark formats its paths."""
    return path.replace("{", "{{").replace("}", "}}")


def _environment(device: torch.device) -> dict[str, str]:
    """With only this GPU visible, of which CLIP_benchmark takes the first, and with torch.load of weights only."""
    visible, gpus = "", os.environ.get("CUDA_VISIBLE_DEVICES")
    if device.type == "cuda":
        number = torch.cuda.current_device() if device.index is None else device.index
        visible = gpus.split(",")[number] if gpus else str(number)
    inherited = {name: value for name, value in os.environ.items() if name != "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"}
    return inherited | {"CUDA_VISIBLE_DEVICES": visible, "TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1"}


def _is_web_dataset(path: Path) -> bool:
    return (path / "test" / "nshards.txt").is_file()


def _web_dataset(path: Path) -> SuiteSet:
    kind = read_lines(str(path / TYPE_FILE))[0].lower() if (path / TYPE_FILE).is_file() else "classification"
    task = TASKS.get(kind, TASKS["classification"])  # multilabel is a classification too
    shards = read_lines(str(path / "test" / "nshards.txt"))[0]
    if not shards.isdecimal() or len(shards) > 9:
        raise UserError(f"{path}/test/nshards.txt holds no number: {shards[:40]!r}", code="suite.no_data")
    return SuiteSet(path.name, f"wds/{path.name}", str(path.resolve()), task, int(shards))

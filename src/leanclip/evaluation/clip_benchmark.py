"""CLIP_benchmark on our checkpoints: its own program, in a process of its own, one data set at a time."""

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
from leanclip.evaluation.results import SetResult
from leanclip.progress import ACTIVITY

TASKS = {"retrieval": "zeroshot_retrieval", "classification": "zeroshot_classification"}
OURS = {"acc1": "top1", "acc5": "top5", "image_retrieval_recall@": "text_to_image_recall@",
        "text_retrieval_recall@": "image_to_text_recall@"}  # fmt: skip
LOOK = 0.5  # seconds between looks at whether it has finished


class SuiteSet(NamedTuple):
    """A data set as CLIP_benchmark is told of it."""

    name: str
    dataset: str
    root: str
    task: str
    shards: int | None  # of a WebDataset; its loader fails with more workers than that


def suite_sets(given: Sequence[str]) -> list[SuiteSet]:
    """What --suite-data names: WebDatasets in its layout, a folder of them, or NAME=ROOT for its own data sets."""
    if importlib.util.find_spec("clip_benchmark") is None:
        raise UserError("--suite clip_benchmark needs that package: pip install 'leanclip[eval]'")
    if not given:
        raise UserError("--suite clip_benchmark needs --suite-data: a folder in its WebDataset layout, or NAME=ROOT")
    found: list[SuiteSet] = []
    for each in given:
        path, (name, equals, root) = Path(each), each.partition("=")
        if _is_web_dataset(path):
            found.append(_web_dataset(path))
        elif path.is_dir() and (below := [entry for entry in sorted(path.iterdir()) if _is_web_dataset(entry)]):
            found += [_web_dataset(entry) for entry in below]
        elif equals and name and root:
            found.append(SuiteSet(name, name, str(Path(root).resolve()), "auto", None))
        else:
            raise UserError(
                f"--suite-data {each}: no test/nshards.txt in it or in its folders; give a WebDataset in"
                " CLIP_benchmark's layout, a folder of such, or NAME=ROOT for a data set that it knows by name"
            )
    return found


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
    tell: Callable[[str], None] = lambda _: None,
) -> list[SetResult]:
    """CLIP_benchmark's figures under our names. Ranks share the data sets; what fails is told and left out.

    `model` and `pretrained` are what open_clip takes: `local-dir:PATH`, or a name with a tag or file.
    """
    ranks = Ranks.current()
    own: list[tuple[int, SetResult | str]] = []
    for number in range(ranks.rank, len(sets), ranks.size):
        tell(f"clip_benchmark: {sets[number].name} ({number + 1} of {len(sets)})")
        outcome = _run_one(sets[number], model, pretrained, device, precision, batch, workers, quiet)
        own.append((number, outcome))
    outcomes = [
        outcome
        for _, outcome in sorted((each for every in ranks.all_gather_objects(own) for each in every), key=_key)
    ]
    failures = [outcome for outcome in outcomes if isinstance(outcome, str)]
    for failure in failures:
        tell(failure)
    if len(failures) == len(outcomes):
        raise UserError(failures[0])
    return [outcome for outcome in outcomes if isinstance(outcome, SetResult)]


def _key(numbered: tuple[int, Any]) -> int:
    return numbered[0]


def _run_one(
    data: SuiteSet,
    model: str,
    pretrained: str,
    device: torch.device,
    precision: str,
    batch: int,
    workers: int,
    quiet: bool,
) -> SetResult | str:
    """The result, or why there is none."""
    workers = min(workers, data.shards or workers)
    with tempfile.TemporaryDirectory() as folder:  # it leaves files where it runs
        output = Path(folder) / "result.json"
        command = [
            sys.executable, "-m", "leanclip.evaluation.clip_benchmark_main", "eval",
            "--dataset", data.dataset, "--dataset_root", _literal(data.root), "--task", data.task,
            "--model", model, "--pretrained", pretrained, "--output", _literal(str(output)), "--split", "test",
            "--recall_k", "1", "5", "10", "--batch_size", str(batch), "--num_workers", str(workers),
        ]  # fmt: skip
        command += ["--no_amp"] if precision == "fp32" else []
        done = _run(
            command,
            cwd=folder,
            env=_weights_only(os.environ) | _visible(device),
            stdin=subprocess.DEVNULL,  # transformers would ask whether to run a repository's code
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE if quiet else None,
        )
        if done.returncode or not output.is_file():
            reason = [line for line in (done.stderr or "its message stands above").splitlines() if line.strip()]
            return f"clip_benchmark failed on {data.name}: {reason[-1] if reason else 'it says nothing'}"
        raw = json.loads(output.read_text())
    return SetResult(
        name=f"clip_benchmark/{data.name}",
        kind="retrieval" if raw["task"] == "zeroshot_retrieval" else "zero-shot",
        metrics=_our_names(raw["metrics"]),
        by="clip_benchmark",
        details={"clip_benchmark": {"task": raw["task"], "metrics": _finite(raw["metrics"])}},
    )


def _run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """As subprocess.run, and as long as the process runs this one is at work."""
    with subprocess.Popen(command, text=True, **options) as process:
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    output, said = process.communicate(timeout=LOOK)
                    return subprocess.CompletedProcess(command, process.returncode, output, said)
                ACTIVITY.still_working()
        except BaseException:
            process.kill()
            raise


def _our_names(metrics: Mapping[str, float]) -> dict[str, float]:
    found = {}
    for name, value in _finite(metrics).items():
        for theirs, ours in OURS.items():
            name = name.replace(theirs, ours)
        found[name] = value
    return found


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}


def _literal(path: str) -> str:
    """It formats paths, so braces are doubled."""
    return path.replace("{", "{{").replace("}", "}}")


def _visible(device: torch.device) -> dict[str, str]:
    """It takes the first GPU that it sees, so it sees ours alone, or none."""
    if device.type != "cuda":
        return {"CUDA_VISIBLE_DEVICES": ""}
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    number = torch.cuda.current_device() if device.index is None else device.index
    return {"CUDA_VISIBLE_DEVICES": given.split(",")[number] if given else str(number)}


def _weights_only(environment: Mapping[str, str]) -> dict[str, str]:
    """Wherever it loads a file of torch's without saying how."""
    kept = {name: value for name, value in environment.items() if name != "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"}
    return kept | {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1"}


def _is_web_dataset(path: Path) -> bool:
    return (path / "test" / "nshards.txt").is_file()


def _web_dataset(path: Path) -> SuiteSet:
    kind = (path / TYPE_FILE).read_text().strip().lower() if (path / TYPE_FILE).is_file() else "classification"
    task = TASKS.get(kind, TASKS["classification"])  # multilabel is a classification too
    shards = int((path / "test" / "nshards.txt").read_text())
    return SuiteSet(path.name, f"wds/{path.name}", str(path.resolve()), task, shards)

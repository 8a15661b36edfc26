"""DataComp's sets: which are run, which are collected, and the means over them."""

import csv
import importlib.util
import io
import json
import re
import statistics
import subprocess
import sys

import pytest
from evaluation_sets import emoji, write_captions, write_classes

from leanclip.evaluation.datacomp import MEANS, TASKS, datacomp_sets, with_means
from leanclip.evaluation.results import SetResult
from refusal import exit_code, refusal_code, refuses

needs_clip_benchmark = pytest.mark.skipif(
    importlib.util.find_spec("clip_benchmark") is None, reason="clip_benchmark is not installed"
)
SHIFTS = ["imagenet_sketch", "imagenetv2", "imagenet-a", "imagenet-o", "imagenet-r", "objectnet"]
FLICKR, MSCOCO = (f"retrieval/{name}_image_text_retrieval" for name in ("flickr_1k_test", "mscoco_2014_5k_test"))


def store(path, values):
    """Results as DataComp's evaluate.py writes them."""
    rows = [
        {"key": key, "dataset": key.upper(), "metrics": {"acc1": 0.99, "main_metric": value}}
        for key, value in values.items()
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def ran(key, **metrics):
    return SetResult(
        name=f"clip_benchmark/{key}", kind="zero-shot", metrics=metrics, by="clip_benchmark",
        details={"clip_benchmark": {"task": "t", "metrics": metrics}},
    )  # fmt: skip


def values_of(results):
    return {result.name.removeprefix("datacomp/"): next(iter(result.metrics.items())) for result in results}


def evaluate(*arguments):
    return exit_code("evaluate", *arguments, "--suite", "datacomp", "--device", "cpu")


def test_the_table():
    """The numbers of sets in DataComp's groups, and the main metrics that are not accuracies."""
    sizes = {mean: sum(task.group in groups for task in TASKS.values()) for mean, groups in MEANS.items()}
    assert sizes == {
        "ImageNet": 1, "ImageNet dist. shifts": 6, "VTAB": 13, "Retrieval": 3, "Average": 38,
        "FastCLIP: IN & Variants": 7, "FastCLIP: Retrieval": 2, "FastCLIP: Datacomp": 38,
    }  # fmt: skip
    metrics = {key: task.metric for key, task in TASKS.items() if task.metric != "acc1"}
    per_class = ["vtab/caltech101", "fgvc_aircraft", "vtab/flowers", "vtab/pets"]
    assert metrics == dict.fromkeys(per_class, "mean_per_class_recall") | {
        FLICKR: "mean_recall@1", MSCOCO: "mean_recall@1", "misc/winogavil": "jaccard_score_10-12",
        "wilds/iwildcam": "F1-macro_all", "wilds/fmow": "acc_worst_region",
        "fairness/dollar_street": "acc_top5_wg", "fairness/geode": "acc_wg",
    }  # fmt: skip
    assert {task.key for task in TASKS.values() if task.group in ("imagenet", "shift")} == {"imagenet1k", *SHIFTS}
    assert len({task.directory for task in TASKS.values()}) == 38


def test_means_of_all_sets(tmp_path):
    values = {key: (number + 1) / 100 for number, key in enumerate(TASKS)}
    stored = store(tmp_path / "eval_results.jsonl", values | {"fairness/fairface": None, "unknown": 0.5})
    sets, collected = datacomp_sets([str(stored)])
    assert sets == [] and len(collected) == 38
    found = values_of(with_means([], collected))
    assert {key: found[key] for key in TASKS} == {key: ("main_metric", value) for key, value in values.items()}
    means = {name.removeprefix("mean/"): value for name, value in found.items() if name.startswith("mean/")}
    assert {metric for metric, _ in means.values()} == {"mean"}
    expected = {
        "ImageNet": values["imagenet1k"],
        "ImageNet dist. shifts": statistics.mean(values[key] for key in SHIFTS),
        "Retrieval": statistics.mean(values[key] for key in (FLICKR, MSCOCO, "misc/winogavil")),
        "Average": statistics.mean(values.values()),
        "FastCLIP: IN & Variants": statistics.mean(values[key] for key in (*SHIFTS, "imagenet1k")),
        "FastCLIP: Retrieval": (values[FLICKR] + values[MSCOCO]) / 2,
        "FastCLIP: Datacomp": statistics.mean(values.values()),
        "VTAB": statistics.mean(value for key, value in values.items() if key == "sun397" or key.startswith("vtab/")),
    }
    assert {name: value for name, (_, value) in means.items()} == pytest.approx(expected, rel=1e-12)


def test_a_mean_of_fewer_sets_has_another_name():
    runs = [ran("imagenet-a", acc1=0.25), ran("imagenet1k", acc1=0.5), ran("voc2007", mean_average_precision=0.9)]
    retrieval = {"image_retrieval_recall@1": 0.2, "text_retrieval_recall@1": 0.4, "text_retrieval_recall@5": 0.9}
    results = with_means([*runs, ran(MSCOCO, **retrieval), ran("vtab/pets", acc1=0.7, mean_per_class_recall=0.6)], {})
    found = values_of(results)
    assert found == {
        "imagenet1k": ("main_metric", 0.5), "imagenet-a": ("main_metric", 0.25), "vtab/pets": ("main_metric", 0.6),
        MSCOCO: ("main_metric", pytest.approx(0.3)), "mean/ImageNet": ("mean", 0.5),
        "mean/ImageNet dist. shifts": ("mean_of_1", 0.25), "mean/VTAB": ("mean_of_1", 0.6),
        "mean/Retrieval": ("mean_of_1", pytest.approx(0.3)), "mean/Average": ("mean_of_4", pytest.approx(0.4125)),
        "mean/FastCLIP: IN & Variants": ("mean_of_2", 0.375),
        "mean/FastCLIP: Retrieval": ("mean_of_1", pytest.approx(0.3)),
        "mean/FastCLIP: Datacomp": ("mean_of_4", pytest.approx(0.4125)),
    }  # fmt: skip
    by_name = {result.name: result for result in results}
    assert by_name["datacomp/mean/FastCLIP: Retrieval"].details["missing"] == [FLICKR]
    (note,) = by_name["datacomp/mean/Average"].notes
    assert "34 of 38 sets are missing: Caltech-101, CIFAR-10," in note and "Pascal VOC 2007" in note
    assert note.endswith(
        "lacks the metrics of WinoGAViL, iWildCam, FMoW, Dollar Street, GeoDE: collect DataComp's eval_results.jsonl"
    )


@needs_clip_benchmark
def test_sets_by_the_names_of_their_directories(tmp_path):
    for name in ("wds_cifar10_test", "wds_vtab-pets_test", "wds_mscoco_captions", "wds_geode_test", "wds_other_test"):
        write_classes(tmp_path / "evals" / name, emoji(4))
    data = [str(tmp_path / "evals"), f"vtab/dtd={tmp_path}"]
    sets, collected = datacomp_sets(data)
    assert {entry.name: entry.dataset for entry in sets} == {
        "cifar10": "wds/wds_cifar10_test", "vtab/pets": "wds/wds_vtab-pets_test", MSCOCO: "wds/wds_mscoco_captions",
        "vtab/dtd": "vtab/dtd",
    }  # fmt: skip
    assert collected == {}
    stored = str(store(tmp_path / "eval_results.jsonl", {"vtab/pets": 0.5}))
    assert {entry.name for entry in datacomp_sets([*data, stored])[0]} == {"cifar10", MSCOCO, "vtab/dtd"}
    with refuses("suite.duplicate", "CIFAR-10 twice"):
        datacomp_sets([*data, f"cifar10={tmp_path}"])
    with refuses("suite.no_data", "wds_cifar10_test"):
        datacomp_sets([str(tmp_path / "evals" / "wds_other_test")])
    with refuses("suite.no_data", "--suite-data"):
        datacomp_sets([])


@pytest.mark.parametrize(
    "line",
    ["", "[1]", '{"key": "cifar10"}', '{"key": "cifar10", "metrics": {"main_metric": "much"}}', "[" * 200_000,
     '{"key": "cifar10", "metrics": {"main_metric": NaN}}', '{"key": [], "metrics": {"main_metric": 1}}'],
)  # fmt: skip
def test_damaged_results(line, tmp_path):
    (tmp_path / "mine.jsonl").write_text(f"{line}\n")
    with refuses("suite.bad_results", "mine.jsonl"):
        datacomp_sets([str(tmp_path / "mine.jsonl")])
    with refuses("data.unreadable", "absent.jsonl"):
        datacomp_sets([str(tmp_path / "absent.jsonl")])


def test_collected_results_are_shown_and_written(small_run, tmp_path, capsys):
    stored = store(tmp_path / "eval_results.jsonl", {FLICKR: 0.5, MSCOCO: 0.25})
    output, table = tmp_path / "figures.json", tmp_path / "figures.csv"
    assert evaluate(small_run, "--suite-data", stored, "--json", output, "--csv", table) == 0
    shown = capsys.readouterr().out
    assert "36 of 38 sets are missing" in shown
    assert "37.5%" in next(line for line in shown.splitlines() if "FastCLIP: Retrieval" in line)
    assert "mean, 2 of 3 sets" in shown
    assert re.search(r"VTAB +. mean, 0 of 13 sets +. +– ", shown)
    sets = json.loads(output.read_text())["sets"]
    assert sets["datacomp/mean/FastCLIP: Retrieval"]["metrics"] == {"mean": 0.375}
    assert sets[f"datacomp/{FLICKR}"] == {
        "kind": "datacomp", "by": "datacomp", "metrics": {"main_metric": 0.5}, "label": "Flickr",
        "metric": "mean_recall@1",
    }  # fmt: skip
    rows = {row["set"]: row for row in csv.DictReader(io.StringIO(table.read_text()))}
    assert rows["datacomp/mean/Average"]["metric"] == "mean_of_2" and "datacomp/mean/VTAB" not in rows
    assert evaluate(small_run, "--suite-data", stored, "--baseline", small_run) == 2
    assert refusal_code(capsys.readouterr().err) == "suite.one_model"


@needs_clip_benchmark
@pytest.mark.slow
def test_the_suite_equals_clip_benchmark_called_by_hand(small_run, tmp_path):
    """On three sets: the numbers of its own command, in DataComp's way to name them, and the means of those."""
    evals, output = tmp_path / "evals", tmp_path / "figures.json"
    write_classes(evals / "wds_imagenet1k_test", emoji(90))
    write_classes(evals / "wds_vtab-pets_test", emoji(60))
    write_captions(evals / "wds_flickr30k_test", emoji(40))
    stored = store(tmp_path / "eval_results.jsonl", {MSCOCO: 0.25, "objectnet": 0.125})
    data = ["--suite-data", evals, "--suite-data", stored]
    assert evaluate(small_run, *data, "--workers", 1, "--batch-size", 32, "--json", output) == 0
    command = "eval --dataset wds/imagenet1k wds/vtab/pets wds/flickr30k --no_amp --num_workers 1 --recall_k 1 5 10"
    command += " --output {dataset}.json --batch_size 32"
    places = ["--dataset_root", f"{evals}/wds_{{dataset_cleaned}}_test", "--pretrained", ""]
    places += ["--model", f"local-dir:{(small_run / 'checkpoints' / 'last').resolve()}"]
    program = [sys.executable, "-m", "leanclip.evaluation.clip_benchmark_main", *command.split(), *places]
    done = subprocess.run(program, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    pets, imagenet, flickr = (
        json.loads((tmp_path / f"{name}.json").read_text())["metrics"]
        for name in ("vtab_pets", "imagenet1k", "flickr30k")
    )
    flickr = (flickr["image_retrieval_recall@1"] + flickr["text_retrieval_recall@1"]) / 2
    sets = json.loads(output.read_text())["sets"]
    found = {name: next(iter(entry["metrics"].values())) for name, entry in sets.items()}
    assert found == {
        "datacomp/imagenet1k": imagenet["acc1"],
        "datacomp/vtab/pets": pets["mean_per_class_recall"],
        f"datacomp/{FLICKR}": flickr,
        f"datacomp/{MSCOCO}": 0.25,
        "datacomp/objectnet": 0.125,
        "datacomp/mean/ImageNet": imagenet["acc1"],
        "datacomp/mean/ImageNet dist. shifts": 0.125,
        "datacomp/mean/VTAB": pets["mean_per_class_recall"],
        "datacomp/mean/Retrieval": (flickr + 0.25) / 2,
        "datacomp/mean/FastCLIP: IN & Variants": (imagenet["acc1"] + 0.125) / 2,
        "datacomp/mean/FastCLIP: Retrieval": (flickr + 0.25) / 2,
    } | dict.fromkeys(
        ("datacomp/mean/Average", "datacomp/mean/FastCLIP: Datacomp"),
        pytest.approx((imagenet["acc1"] + pets["mean_per_class_recall"] + flickr + 0.25 + 0.125) / 5, rel=1e-12),
    )
    assert 0 < flickr < 1 and 0 < imagenet["acc1"] < 1 and imagenet["acc1"] != pets["mean_per_class_recall"]

"""leanclip evaluate: several sets and models in one call, as a table, JSON and CSV."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from evaluation_sets import emoji, write_captions, write_classes
from shard_files import write_shard

import leanclip
from leanclip.cli import main
from leanclip.data.datasets import BUNDLED


def evaluate(*arguments):
    with pytest.raises(SystemExit) as stop:
        main(["evaluate", *(str(argument) for argument in arguments), "--device", "cpu"])
    return stop.value.code


@pytest.fixture
def sets(tmp_path):
    samples = emoji(40)
    write_classes(tmp_path / "groups", samples)
    write_captions(tmp_path / "captions", samples)
    for _, image, _, group in samples[:12]:
        folder = tmp_path / "folders" / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{len(list(folder.iterdir()))}.jpg").write_bytes(image)
    return tmp_path


def test_several_sets_and_a_baseline(small_run, sets, capsys, monkeypatch):
    monkeypatch.setenv("LEANCLIP_CACHE", str(sets / "cache"))
    data = ["--val-data", sets / "captions", "--val-data", BUNDLED / "val-000000.tar", "--zero-shot", sets / "groups"]
    data += ["--zero-shot", sets / "folders", "--per-class"]
    files = ["--json", sets / "figures.json", "--csv", sets / "figures.csv"]
    best = small_run / "checkpoints" / "best"
    assert evaluate(small_run, *data, *files, "--baseline", best if best.exists() else small_run) == 0
    shown = capsys.readouterr().out
    for word in ("captions", "val-000000", "groups", "folders", "median rank", "mean per class", "(+0.0)", "chance"):
        assert word in shown
    assert "class of folders" in shown and "most often mistaken for" in shown
    figures = json.loads((sets / "figures.json").read_text())
    assert list(figures["sets"]) == ["captions", "val-000000", "groups", "folders"]
    assert figures["sets"]["captions"]["metrics"]["captions"] == 80
    assert figures["sets"]["folders"]["images"] == 12 and figures["sets"]["folders"]["prompts"] == 7 * len(
        figures["sets"]["folders"]["classnames"]
    )
    for each in figures["sets"].values():
        metrics = each["metrics"]
        for name, change in each["difference"].items():
            assert change == pytest.approx(metrics[name] - each["baseline"][name])
        assert "images" not in each["difference"]
    rows = list(csv.DictReader((sets / "figures.csv").read_text().splitlines()))
    assert {row["set"] for row in rows} == set(figures["sets"])
    top1 = next(row for row in rows if (row["set"], row["metric"]) == ("groups", "top1"))
    assert float(top1["value"]) == figures["sets"]["groups"]["top1"]
    assert float(top1["difference"]) == pytest.approx(float(top1["value"]) - float(top1["baseline"]))
    assert len(list((sets / "cache" / "classifiers").iterdir())) >= 2


def test_an_open_clip_model_with_its_weights(small_run, sets, capsys):
    model, weights = (
        small_run.parent / "small.json",
        small_run / "checkpoints" / "last" / "open_clip_model.safetensors",
    )
    arguments = ["--zero-shot", sets / "groups", "--json", sets / "figures.json", "--baseline", small_run]
    assert evaluate(f"{model}:{weights}", *arguments) == 0
    figures = json.loads((sets / "figures.json").read_text())["sets"]["groups"]
    assert figures["difference"] == {"top1": 0, "top5": 0, "mean_per_class_recall": 0}


def test_a_table_has_columns_of_its_own(small_run, tmp_path, capsys):
    rows = []
    for key, image, caption, _ in emoji(12):
        (tmp_path / f"{key}.jpg").write_bytes(image)
        rows.append(f"{key}.jpg;{caption}")
    (tmp_path / "pairs.csv").write_text("\n".join(["picture;says", *rows]))
    data = ["--val-data", tmp_path / "pairs.csv"]
    assert evaluate(small_run, *data) == 2
    assert "no column filepath and no title" in capsys.readouterr().err
    keys = ["--csv-img-key", "picture", "--csv-caption-key", "says", "--csv-separator", ";"]
    assert evaluate(small_run, *data, *keys) == 0
    assert "12 captions among 12 images" in capsys.readouterr().out


def test_the_runs_own_sets_come_first(small_run, capsys):
    assert evaluate(small_run) == 0
    shown = capsys.readouterr().out
    assert "zero-shot emoji groups: top-1" in shown and "always the largest class 23.5%" in shown
    assert "val: held-out text-to-image recall@10" in shown and "(chance 5.0%)" in shown
    assert "unseen renders of known concepts" in shown


def test_several_processes(small_run, sets, tmp_path):
    """Two processes write the figures of one."""
    data = ["--val-data", sets / "captions", "--zero-shot", sets / "groups"]
    assert evaluate(small_run, *data, "--json", tmp_path / "one.json") == 0
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "leanclip",
    ]
    command = [*launch, "evaluate", small_run, *data, "--json", tmp_path / "two.json", "--device", "cpu"]
    environment = os.environ | {"PYTHONPATH": str(Path(leanclip.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("zero-shot groups: top-1") == 1
    one, two = (json.loads((tmp_path / name).read_text()) for name in ("one.json", "two.json"))
    assert two == one


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--val-data", "absent.tar"], ["no such file", "absent.tar"]),
        (["--zero-shot", "absent.tar"], ["no such file", "absent.tar"]),
        (["--imagenet-val", "."], ["ImageNet's layout", "--zero-shot"]),
        (["--zero-shot", "emoji", "--templates", "mine.txt"], ["--templates mine.txt", "openai, simple"]),
        (["--baseline", "absent"], ["no such run or checkpoint: absent"]),
        (["--baseline", "ViT-B-32"], ["no such run", "give ViT-B-32:TAG or ViT-B-32:FILE"]),
        (["--baseline", "ViT-B-32:absent"], ["--pretrained absent", "no open_clip tag of ViT-B-32"]),
        (["--suite-data", "x"], ["--suite-data needs --suite"]),
        (["--suite", "clip_bench"], ["clip_benchmark"]),
        (["--json", "absent/figures.json"], ["cannot write absent/figures.json", "no folder"]),
        (["--batch-size", "0"], ["batch_size is 0"]),
    ],
)
def test_mistakes_are_one_line(arguments, words, small_run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert evaluate(small_run, *arguments) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert all(word in lines[0] for word in words), lines[0]


@pytest.mark.parametrize("flag", ["--val-data", "--zero-shot", "--imagenet-val"])
def test_what_is_not_there_is_named_once(flag, small_run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert evaluate(small_run, flag, "absent") == 2
    assert capsys.readouterr().err == "leanclip: no such file or folder: absent [data.not_found]\n"


def test_captions_are_not_classes(small_run, sets, capsys):
    (sets / "groups" / "dataset_type.txt").write_text("classification")
    assert evaluate(small_run, "--val-data", sets / "groups") == 2
    assert "give it to --zero-shot" in capsys.readouterr().err


def test_captions_of_several_images_are_told(small_run, tmp_path, capsys):
    """Each is right for one of them, so recall says little."""
    files = {}
    for number, (key, image, caption, _) in enumerate(emoji(12)):
        files |= {f"{key}.jpg": image, f"{key}.txt": (b"a face" if number < 5 else caption.encode())}
    write_shard(tmp_path / "shared.tar", files)
    assert evaluate(small_run, "--val-data", tmp_path / "shared.tar") == 0
    assert "5 of 12 captions of shared belong to more than one image" in capsys.readouterr().out
    assert evaluate(small_run, "--val-data", BUNDLED / "val-000000.tar") == 0
    assert "more than one image" not in capsys.readouterr().out

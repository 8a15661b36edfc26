"""leanclip evaluate: several sets and models in one call, as a table, JSON and CSV."""

import csv
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from evaluation_sets import emoji, write_captions, write_classes
from shard_files import sound, write_shard

import leanclip
from leanclip.data.datasets import BUNDLED
from leanclip.evaluation import Embedded, retrieval_metrics
from leanclip.evaluation.results import SetResult, cell
from refusal import assert_refused, exit_code


def evaluate(*arguments):
    return exit_code("evaluate", *arguments, "--device", "cpu")


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


def test_several_sets_and_the_same_weights_as_an_open_clip_model(small_run, sets, capsys):
    data = ["--val-data", sets / "captions", "--val-data", BUNDLED / "val-000000.tar", "--zero-shot", sets / "groups"]
    data += ["--zero-shot", sets / "folders", "--per-class"]
    files = ["--json", sets / "new" / "figures.json", "--csv", sets / "figures.csv"]
    weights = small_run / "checkpoints" / "last" / "open_clip_model.safetensors"
    assert evaluate(small_run, *data, *files, "--baseline", f"{small_run.parent / 'small.json'}:{weights}") == 0
    shown = capsys.readouterr().out
    for word in ("captions", "val-000000", "groups", "folders", "median rank", "mean per class", "+0.0", "chance"):
        assert word in shown
    assert "class of folders" in shown and "most often mistaken for" in shown
    results = json.loads((sets / "new" / "figures.json").read_text())["sets"]
    assert list(results) == ["captions", "val-000000", "groups", "folders"]
    assert results["captions"]["metrics"]["captions"] == 80
    folders = results["folders"]
    assert folders["images"] == 12 and folders["prompts"] == 7 * len(folders["classnames"])
    for result in results.values():
        assert result["baseline"] == result["metrics"] and set(result["difference"].values()) == {0}
        assert "images" not in result["difference"]
    rows = list(csv.DictReader((sets / "figures.csv").read_text().splitlines()))
    assert {row["set"] for row in rows} == set(results)
    top1 = next(row for row in rows if (row["set"], row["metric"]) == ("groups", "top1"))
    assert float(top1["value"]) == results["groups"]["top1"]
    assert float(top1["difference"]) == pytest.approx(float(top1["value"]) - float(top1["baseline"]))


def test_columns_of_a_csv_file(small_run, tmp_path, capsys):
    rows = []
    for key, image, caption, _ in emoji(12):
        (tmp_path / f"{key}.jpg").write_bytes(image)
        rows.append(f"{key}.jpg;{caption}")
    (tmp_path / "pairs.csv").write_text("\n".join(["image;says", *rows]))
    data = ["--val-data", tmp_path / "pairs.csv"]
    assert evaluate(small_run, *data) == 2
    assert "filepath" in capsys.readouterr().err
    keys = ["--csv-img-key", "image", "--csv-caption-key", "says", "--csv-separator", ";"]
    assert evaluate(small_run, *data, *keys) == 0
    assert "12 captions among 12 images" in capsys.readouterr().out


def test_the_default_are_the_sets_of_the_run(small_run, capsys):
    assert evaluate(small_run) == 0
    shown = capsys.readouterr().out
    assert "zero-shot emoji groups: top-1" in shown and "always the largest class 23.5%" in shown
    assert "val: held-out text-to-image recall@10" in shown and "(chance 5.0%)" in shown
    assert "unseen renders of known concepts" in shown


def test_several_processes(small_run, sets, tmp_path):
    """Two processes write the results of one."""
    data = ["--val-data", sets / "captions", "--zero-shot", sets / "groups"]
    assert evaluate(small_run, *data, "--json", tmp_path / "one.json") == 0
    launch = [sys.executable, *"-m torch.distributed.run --standalone --nproc-per-node 2 -m leanclip".split()]
    command = [*launch, "evaluate", small_run, *data, "--json", tmp_path / "two.json", "--device", "cpu"]
    environment = os.environ | {"PYTHONPATH": str(Path(leanclip.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("zero-shot groups: top-1") == 1
    one, two = (json.loads((tmp_path / name).read_text()) for name in ("one.json", "two.json"))
    assert two == one


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (["--val-data", "absent.tar"], "data.not_found", "absent.tar"),
        (["--zero-shot", "absent.tar"], "data.not_found", "absent.tar"),
        (["--imagenet-val", "absent"], "data.not_found", "absent"),
        (["--imagenet-val", "."], "zero_shot.bad_layout", "--zero-shot"),
        (["--val-data", "classes"], "data.no_captions", "--zero-shot"),
        (["--zero-shot", "emoji", "--templates", "mine.txt"], "templates.not_found", "openai, simple"),
        (["--val-data", "classes/mine.tar", "--templates", "nope"], "evaluation.no_classes", "--zero-shot"),
        (["--val-data", ""], "config.bad_value", "--val-data is empty"),
        (["--baseline", "absent"], "checkpoint.not_found", "absent"),
        (["--baseline", "ViT-B-32"], "checkpoint.not_found", "ViT-B-32:TAG or ViT-B-32:FILE"),
        (["--baseline", "ViT-B-32:absent"], "weights.not_found", "ViT-B-32"),
        (["--suite-data", "x"], "config.bad_value", "--suite-data needs --suite"),
        (["--suite", "clip_bench"], "cli.bad_value", "clip_benchmark"),
        (["--json", "classes/mine.tar/a.json"], "evaluation.not_writable", "mine.tar/a.json"),
        (["--csv", "classes"], "evaluation.not_writable", "classes (not a regular file)"),
        (["--batch-size", "0"], "config.bad_value", "--batch-size is 0"),
    ],
)
def test_refusals(arguments, code, word, small_run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "classes").mkdir()
    write_shard(tmp_path / "classes" / "mine.tar", sound(3))
    (tmp_path / "classes" / "dataset_type.txt").write_text("classification")
    assert_refused(code, ["evaluate", small_run, *arguments, "--device", "cpu"], capsys, word)


def test_captions_of_several_images_are_reported(small_run, tmp_path, capsys):
    """Each counts as right for one of them, so recall says little."""
    files = {}
    for number, (key, image, caption, _) in enumerate(emoji(12)):
        files |= {f"{key}.jpg": image, f"{key}.txt": (b"a face" if number < 5 else caption.encode())}
    write_shard(tmp_path / "shared.tar", files)
    assert evaluate(small_run, "--val-data", tmp_path / "shared.tar") == 0
    shown = capsys.readouterr().out
    assert "5 of 12 captions of shared belong to more than one image" in shown
    assert "recall@1 at most 66.7% text-to-image, 58.3% image-to-text; recall@10 at most 100.0%" in shown
    assert evaluate(small_run, "--val-data", BUNDLED / "val-000000.tar") == 0
    assert "more than one image" not in capsys.readouterr().out


def embedded(captions_of):
    """Images with these captions; equal captions have equal embeddings."""
    captions = [caption for texts in captions_of for caption in texts]
    owners = torch.tensor([image for image, texts in enumerate(captions_of) for _ in texts])
    directions = torch.randn(len(set(captions)), 16, generator=torch.Generator().manual_seed(len(captions)))
    vectors = dict(zip(dict.fromkeys(captions), directions, strict=True))
    texts = torch.stack([vectors[caption] for caption in captions])
    images = torch.stack([texts[owners == image].mean(0) for image in range(len(captions_of))])
    images += 1e-3 * torch.randn(images.shape, generator=torch.Generator().manual_seed(1))
    return Embedded(images, texts, owners, captions, list(range(len(captions_of))), 0)


@pytest.mark.parametrize(("shared", "warned"), [(12, False), (48, True)])
def test_few_shared_captions_are_not_worth_a_warning(shared, warned):
    """0.24% of 5,000 captions bound recall@1 by a tenth of a point."""
    captions = [[f"a caption {i // 2 if i < shared else -i}"] for i in range(5000 if not warned else 1000)]
    assert (embedded(captions).shared_captions("the set") is not None) == warned


def test_recall_stays_below_the_bound_of_shared_captions():
    draw = random.Random(0)
    for _ in range(50):
        pool = [f"caption {i}" for i in range(20)]
        data = embedded([draw.choices(pool, k=draw.randint(1, 3)) for _ in range(draw.randint(11, 40))])
        bounds = [float(text) / 100 for text in re.findall(r"(\d+\.\d)%", data.shared_captions("the set") or "")]
        metrics = retrieval_metrics(data.images, data.texts, data.image_of_text)
        names = [f"{direction}_recall@{k}" for k in (1, 10) for direction in ("text_to_image", "image_to_text")]
        assert all(metrics[name] <= bound + 6e-4 for name, bound in zip(names, bounds, strict=True))


def test_the_difference_from_a_baseline():
    metrics, baseline = (
        {"top1": 0.5, "images": 9, "x_rank": 3.0},
        {"top1": 0.25, "images": 9, "x_rank": 5},
    )
    result = SetResult(name="set", kind="zero-shot", metrics=metrics, baseline=baseline)
    assert result.difference == {"top1": 0.25, "x_rank": -2}
    lines = [
        (line, [cell(line, values, name) for name in ("top1", "x_rank", "top5")]) for line, values in result.lines()
    ]
    assert lines == [
        ("baseline", ["25.0%", "5", "–"]),
        ("model", ["50.0%", "3", "–"]),
        ("difference", ["+25.0", "-2.0", "–"]),
    ]

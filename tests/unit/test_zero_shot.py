"""Zero-shot classification against a plain computation, and the layouts of labelled sets."""

import io
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from evaluation_sets import TEMPLATES, emoji, write_classes
from PIL import Image
from shard_files import picture, write_shard

import leanclip
from leanclip.data import DataConfig
from leanclip.evaluation import (
    Classified,
    EvaluationSettings,
    bundled_groups,
    classify,
    labelled_sets,
    open_imagenet,
    open_labelled,
    prompts_for,
)
from leanclip.evaluation.clip_benchmark import suite_sets
from leanclip.evaluation.held_out import open_held_out
from leanclip.evaluation.labelled_sets import load_templates
from leanclip.evaluation.zero_shot import predictions
from leanclip.inference import find_model
from leanclip.models import IMAGENET_CLASSNAMES
from refusal import refuses


@pytest.fixture(scope="module")
def model(small_run):
    return find_model(str(small_run)).load()


def classified(model, labelled, templates=None, **options):
    settings = EvaluationSettings(device=torch.device("cpu"), **options)
    return classify(model, labelled, prompts_for(labelled, templates), settings)


def plain(run, samples, groups, templates):
    """With open_clip's own preprocessing and numpy, one class at a time."""
    model, preprocess, tokenizer = leanclip.load(run)
    with torch.no_grad():
        pixels = torch.stack([preprocess(Image.open(io.BytesIO(image))) for _, image, _, _ in samples])
        images = model.encode_image(pixels).numpy()
        classes = []
        for group in groups:
            texts = model.encode_text(tokenizer([template.replace("{c}", group) for template in templates])).numpy()
            classes.append(texts.mean(0) / np.linalg.norm(texts.mean(0)))
    scores = images @ np.stack(classes).T
    labels = np.array([groups.index(group) for *_, group in samples])
    order = np.argsort(-scores, axis=1)
    confusion = np.zeros((len(groups), len(groups)), int)
    for label, answer in zip(labels, order[:, 0], strict=True):
        confusion[label, answer] += 1
    return {
        "confusion": confusion.tolist(),
        "top1": (order[:, 0] == labels).mean(),
        "top5": np.mean([label in row[:5] for label, row in zip(labels, order, strict=True)]),
        "mean_per_class_recall": np.mean([(order[labels == c, 0] == c).mean() for c in range(len(groups))]),
    }


@pytest.mark.parametrize("batch", [7, 256])
def test_metrics_equal_a_plain_computation(small_run, model, tmp_path, batch):
    samples = emoji(60)
    groups = write_classes(tmp_path / "groups", samples)
    labelled = open_labelled(str(tmp_path / "groups"))
    assert labelled.name == "groups" and labelled.classnames == tuple(groups) and len(labelled) == 60
    result = classified(model, labelled, batch=batch).to_json()
    expected = plain(small_run, samples, groups, TEMPLATES)
    assert result["confusion"] == expected.pop("confusion")
    assert {name: result[name] for name in expected} == pytest.approx(expected)
    assert result["images"] == 60 and result["broken"] == 0 and result["prompts"] == 2 * len(groups)


def test_metrics_of_a_confusion():
    confusion = np.array([[3, 1, 0], [0, 0, 0], [2, 0, 2]])
    result = Classified(name="x", classnames=("a", "b", "c"), confusion=confusion, top5=math.nan, prompts=3, broken=0)
    assert result.metrics() == pytest.approx(
        {"top1": 5 / 8, "mean_per_class_recall": (3 / 4 + 2 / 4) / 2, "images": 8, "chance@1": 1 / 3}
    )
    assert result.largest_class == 0.5
    rows = result.per_class()
    assert rows[1] == {"class": "b", "images": 0, "recall": None, "mistaken_for": None, "times": 0}
    assert rows[2] == {"class": "c", "images": 4, "recall": 0.5, "mistaken_for": "a", "times": 2}
    json.dumps(result.to_json(), allow_nan=False)


@pytest.mark.parametrize("value", [0.5, math.nan])
def test_ties_and_nan_count_as_wrong(value):
    labels = torch.tensor([0, 1, 2])
    predicted, rank = predictions(torch.full((3, 4), value), torch.ones(5, 4) / 2, labels)
    assert rank.tolist() == [4, 4, 4] and not (predicted == labels).any()


def test_labels_and_broken_images(model, tmp_path):
    files = {f"{n}.png": picture(n, kind="PNG") for n in range(6)} | {f"{n}.cls": b"%d" % (n % 2) for n in range(6)}
    files |= {"6.png": b"junk", "6.cls": b"1", "7.png": picture(7, kind="PNG"), "8.cls": b"0", "9.png": b""}
    files |= {"9.cls": b"0", "10.png": picture(1, kind="PNG"), "10.cls": b"what"}
    files |= {"11.png": picture(2, kind="PNG"), "11.cls": b"blue thing\n"}
    write_shard(tmp_path / "set.tar", files)
    (tmp_path / "classnames.txt").write_text("red thing\nblue thing\n")
    labelled = open_labelled(str(tmp_path / "set.tar"))
    assert labelled.labels.tolist() == [0, 1, 0, 1, 0, 1, 1, 0, 1]  # the last is given by its name
    result = classified(model, labelled)
    assert result.images == 7 and result.broken == 5  # 6 and 9 do not decode; 7, 8 and 10 lack an image or a class
    assert math.isnan(result.top5) and "top5" not in result.metrics()


def test_one_folder_per_class(model, tmp_path):
    for number, name in enumerate(["hot_dog", "cat", "tree"]):
        (tmp_path / name / "deep").mkdir(parents=True)
        for copy in range(number + 1):
            (tmp_path / name / "deep" / f"{copy}.png").write_bytes(picture(10 * number + copy, kind="PNG"))
    labelled = open_labelled(str(tmp_path))
    assert labelled.classnames == ("cat", "hot dog", "tree")
    assert labelled.labels.tolist() == [0, 0, 1, 2, 2, 2]
    assert classified(model, labelled).images == 6
    (tmp_path / "classnames.txt").write_text("a cat\nfood\nplants\n")
    assert open_labelled(str(tmp_path)).classnames == ("a cat", "food", "plants")
    (tmp_path / "classnames.txt").write_text("a cat\n")
    with refuses("zero_shot.bad_layout", "1 lines for 3 folders"):
        open_labelled(str(tmp_path))


def test_imagenet(tmp_path):
    wordnet = [f"n{10 * number:08d}" for number in range(1000)]
    for layout, names in (("val", wordnet), ("v2", [str(number) for number in range(1000)])):
        for name in names:
            (tmp_path / layout / name).mkdir(parents=True)
        for number in (0, 2, 11, 999):
            (tmp_path / layout / names[number] / "x.JPEG").write_bytes(picture(number))
    for given in (tmp_path, tmp_path / "val", tmp_path / "v2"):
        labelled = open_imagenet(str(given))
        assert labelled.labels.tolist() == [0, 2, 11, 999] and labelled.classnames == tuple(IMAGENET_CLASSNAMES)
        assert labelled.classnames[0] == "tench" and labelled.source.captions(0) == ["tench"]
    prompts = prompts_for(labelled)
    assert len(prompts) == 1000 and len(prompts[0]) == 80 and prompts[0][0] == "a bad photo of a tench."
    (tmp_path / "val" / wordnet[5]).rmdir()
    with refuses("zero_shot.bad_layout", "999 folders"):
        open_imagenet(str(tmp_path / "val"))


def test_the_bundled_groups(model):
    labelled = bundled_groups()
    assert len(labelled) == 200 and len(labelled.classnames) == 6 and labelled.skipped == 0
    assert np.bincount(labelled.labels).tolist() == [17, 29, 29, 47, 33, 45]
    result = classified(model, labelled)
    assert result.images == 200 and result.broken == 0 and result.prompts == 6 * 32
    assert prompts_for(labelled, "simple")[0][0] == "itap of a activities."


def test_names_of_sets_are_distinct(tmp_path):
    paths = [str(tmp_path / parent / "set") for parent in ("one", "two")]
    for path in paths:
        write_classes(Path(path), emoji(8))
    sets = labelled_sets([*paths, "emoji"], bundled=True)
    assert [labelled.name for labelled in sets] == ["set", "set-2", "emoji groups"]
    assert [labelled.name for labelled in labelled_sets(paths, used_names=["set-2", "set"])] == ["set-3", "set-4"]


def test_templates(tmp_path):
    labelled = bundled_groups()
    file = tmp_path / "mine.txt"
    file.write_text("the {} group\n\nof {c} and {c}\n")
    assert prompts_for(labelled, str(file))[0] == ("the activities group", "of activities and activities")
    assert len(prompts_for(labelled, "openai")[0]) == 80 and len(prompts_for(labelled, "simple")[0]) == 7
    file.write_text("good {}\nno place\n")
    with refuses("templates.bad_line", "template 2", "no place"):
        prompts_for(labelled, str(file))
    with refuses("templates.not_found", "openai, simple"):
        prompts_for(labelled, "opanai")


@pytest.mark.parametrize(
    ("files", "names", "code"),
    [
        ({"a.png": b"x", "a.cls": b"0"}, None, "zero_shot.no_classnames"),
        ({"a.png": b"x", "a.cls": b"2"}, "one\ntwo\n", "zero_shot.bad_class"),
        ({"a.png": b"x", "a.txt": b"0"}, "one\ntwo\n", "zero_shot.no_images"),
        ({"a.png": b"x", "a.cls": b"three"}, "one\ntwo\n", "zero_shot.no_images"),
        (None, "a\n", "data.compressed"),
    ],
)
def test_refused_shards(files, names, code, tmp_path):
    shard = tmp_path / "set.tar"
    shard.write_bytes(b"\x1f\x8b" + bytes(600)) if files is None else write_shard(shard, files)
    if names is not None:
        (tmp_path / "classnames.txt").write_text(names)
    with refuses(code, str(shard)):
        open_labelled(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"", "empty"), (b"\n \n", "empty"), (b"\xff\xfe\0", "UTF-8"), (b"x" * 5000 + b"\nb {}", "2,000 characters")],
)
def test_damaged_lists_of_names_templates_and_types(content, reason, tmp_path):
    (tmp_path / "test").mkdir()
    write_shard(tmp_path / "test" / "0.tar", {"a.png": picture(1, kind="PNG"), "a.cls": b"0"})
    names, templates = tmp_path / "classnames.txt", tmp_path / "zeroshot_classification_templates.txt"
    for path in (names, templates, tmp_path / "dataset_type.txt", tmp_path / "test" / "nshards.txt"):
        path.write_bytes(content)
        with refuses("data.bad_text", str(path), reason):
            if path in (names, templates):
                open_labelled(str(tmp_path))
            elif path.name == "dataset_type.txt":
                open_held_out(str(tmp_path), DataConfig())
            else:
                suite_sets([str(tmp_path)])
        path.write_text("retrieval {}" if path != names else "one\u2028half {}\ntwo\n")
        with refuses("data.bad_text", "mine.txt", reason):
            (tmp_path / "mine.txt").write_bytes(content)
            load_templates(str(tmp_path / "mine.txt"))
    with refuses("suite.no_data", "nshards.txt holds no number"):
        suite_sets([str(tmp_path)])
    assert open_labelled(str(tmp_path)).classnames == ("one\u2028half {}", "two"), "only a line end ends a line"


def test_class_of_too_many_digits(tmp_path):
    write_shard(tmp_path / "set.tar", {"a.png": picture(1, kind="PNG"), "a.cls": b"9" * 5000})
    (tmp_path / "classnames.txt").write_text("one\ntwo\n")
    with refuses("zero_shot.bad_class", "class 999999999999999999,"):
        open_labelled(str(tmp_path))


def test_folder_names_that_are_no_text(tmp_path):
    for name in (b"cat", b"d\xffog"):
        folder = tmp_path / os.fsdecode(name)
        folder.mkdir()
        (folder / "0.png").write_bytes(picture(1, kind="PNG"))
    assert open_labelled(str(tmp_path)).classnames == ("cat", "d?og")


@pytest.mark.parametrize(
    "read",
    [open_labelled, open_imagenet, load_templates, lambda name: open_held_out(name, DataConfig()),
     lambda name: suite_sets([name])],
)  # fmt: skip
def test_names_that_are_too_long(read):
    with refuses("data.unreadable", "File name too long"):
        read("x" * 300)


def test_refused_paths(tmp_path):
    with refuses("data.not_found", "absent.tar"):
        open_labelled(str(tmp_path / "absent.tar"))
    with refuses("zero_shot.bad_layout", str(tmp_path)):
        open_labelled(str(tmp_path))

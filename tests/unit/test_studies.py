"""The studies of real towers and photographs, run on toy towers and pictures: all phases, to tables."""

import sys
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import fine_tuning
import pytest
import timm
import torch
import wrong_captions
import wrong_captions_report
import wrong_captions_trained
from measurements import append, rows
from safetensors.torch import save_file
from shard_files import picture, sound, write_shard

import leanclip


class InProcess:
    """A pool that runs what is submitted at once."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> "InProcess":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, function: Any, *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*arguments))
        return future


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """Shards of the studies' names; small sets stand for the photographs."""
    folder = tmp_path / "photos"
    (folder / "cifar10").mkdir(parents=True)
    names = [f"flickr-train-{number:06d}" for number in range(3)] + [
        f"coco-train-{number:06d}" for number in range(14)
    ]
    sets = ["flickr-val-000000", "flickr-test-000000", "coco-val-000000"]
    for number, name in enumerate([*names, *sets]):
        write_shard(folder / f"{name}.tar", sound(12 if name in sets else 4, start=100 * number))
    labelled = {f"{i}.jpg": picture(i) for i in range(4)} | {f"{i}.cls": b"%d" % (i % 2) for i in range(4)}
    write_shard(folder / "cifar10" / "0.tar", labelled)
    (folder / "cifar10" / "classnames.txt").write_text("cat\ndog")
    monkeypatch.setenv("LEANCLIP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    for study in (fine_tuning, wrong_captions):
        monkeypatch.setattr(study, "ProcessPoolExecutor", InProcess)
    return folder


@pytest.fixture
def weights(tmp_path):
    for name in ("test_efficientnet", "test_vit"):
        model = timm.create_model(name, pretrained=False)
        save_file({key: v.contiguous() for key, v in model.state_dict().items()}, tmp_path / f"{name}.safetensors")
    return tmp_path


def towers(weights, bert, image="test_efficientnet") -> dict[str, Any]:
    return {
        "image_tower": f"timm:{image}", "pretrained_image": str(weights / f"{image}.safetensors"),
        "text_tower": f"hf:{bert}", "pretrained_text": str(bert), "force_image_size": 32, "device": "cpu",
    }  # fmt: skip


def run(study, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", [study.__name__, *map(str, arguments)])
    study.main()


def test_fine_tuning(photos, weights, bert, tmp_path, monkeypatch):
    file, train = tmp_path / "rows.csv", leanclip.train
    few: dict[str, Any] = {"max_steps": 2, "warmup": 0, "global_batch_size": 8, "workers": 0}
    monkeypatch.setattr(leanclip, "train", lambda **settings: train(**settings | few))
    monkeypatch.setattr(fine_tuning, "FILE", file)
    monkeypatch.setattr(fine_tuning, "SEEDS", (301,))
    monkeypatch.setattr(fine_tuning, "RATES", {name: (key, r[:1]) for name, (key, r) in fine_tuning.RATES.items()})
    vit = {"lora": "test_vit"}
    monkeypatch.setattr(
        fine_tuning.Inputs, "towers", lambda _, method: towers(weights, bert, vit.get(method, "test_efficientnet"))
    )
    run(fine_tuning, monkeypatch, photos, weights)
    stored = rows(file)
    assert [row["phase"] for row in stored].count("search") == 3
    assert {row["method"] for row in stored if row["phase"] == "compare"} == {"heads", "lit", "finetune", "lora"}
    found = fine_tuning.tables(file)
    assert len(found["fine_tuning"].rows) == 4 and len(found["interpolation"].rows) == 5
    fine_tuning.draw(file)
    assert file.with_suffix(".svg").exists()


@pytest.fixture
def small_settings(weights, bert, monkeypatch):
    """The settings of the study of wrong captions, for few samples and toy towers."""
    settings = wrong_captions.Inputs.settings

    def small(inputs, trial):
        few = {"epochs": 3, "global_batch_size": trial.batch // 16, "aug_scale": (0.9, 1.0)}
        return settings(inputs, trial) | few | towers(weights, bert)

    monkeypatch.setattr(wrong_captions.Inputs, "settings", small)


@pytest.mark.parametrize(
    ("start", "arm"), [pytest.param("towers", "v1-auto", marks=pytest.mark.slow), ("scratch", "v3")]
)
def test_wrong_captions_with_all_weights(start, arm, photos, small_settings, tmp_path, monkeypatch):
    file, train = tmp_path / "rows.csv", leanclip.train
    few: dict[str, Any] = {"max_steps": 9, "global_batch_size": 16, "warmup": 0, "workers": 0, "device": "cpu"}
    monkeypatch.setattr(leanclip, "train", lambda **settings: train(**settings | few))
    changed = {"FILE": file, "ARMS": (arm,), "SHARES": (0.2,), "SEEDS": (301,)}
    for name, value in changed.items():
        monkeypatch.setattr(wrong_captions_trained, name, value)
    run(wrong_captions_trained, monkeypatch, photos, "image", "text", "--start", start)
    stored = rows(file)
    assert [row["phase"] for row in stored] == ["search"] * 3 + ["compare"]
    assert all(bool(row["auroc"]) == (arm == "v1-auto") for row in stored)


def test_wrong_captions_over_batches_and_other_losses(photos, small_settings, tmp_path, monkeypatch):
    """From the stored search."""
    file = tmp_path / "rows.csv"
    append(file, *(row for row in rows(wrong_captions.FILE) if row["phase"] == "search"))
    changed = SimpleNamespace(
        FILE=file, BATCH_ARMS=("v1-auto",), OTHERS=("v2",), BATCHES=(64,), SEEDS=(301,), MOST_RATE_EXTENSIONS=0,
        HEADS=("linear",), RATES=(5e-4,), TEMPERATURES=(0.07,), MOST_EXTENSIONS=0,
    )  # fmt: skip
    for name, value in vars(changed).items():
        monkeypatch.setattr(wrong_captions, name, value)
    monkeypatch.setattr(wrong_captions, "stored", lambda path=file, original=wrong_captions.stored: original(path))
    before = len(rows(file))
    run(wrong_captions, monkeypatch, photos, "image", "text", "--phase", "batches", "losses")
    stored = rows(file)[before:]
    assert len(stored) == 3 * 4 + 2 * 4  # three rates and a comparison: two batches (128 clean only), another loss
    assert {(row["batch"], row["arm"]) for row in stored} == {("64", "v1-auto"), ("128", "v1-auto"), ("128", "v2")}
    run(wrong_captions, monkeypatch, photos, "image", "text", "--phase", "clean")
    assert [row["phase"] for row in rows(file)].count("clean") == 1
    named = wrong_captions_report.tables(file)
    assert "batch 64" in named["wrong_captions_batches"].columns
    wrong_captions_report.draw(file)

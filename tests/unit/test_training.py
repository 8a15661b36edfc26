"""Whole runs, on the bundled data."""

import json

import checkpoint_runs
import pytest
import torch
from evaluation_sets import emoji, write_classes
from safetensors.torch import load_file
from shard_files import sound, write_shard

import leanclip
from browser import CHROMIUM, inspect_page
from leanclip.data.datasets import BUNDLED
from leanclip.training import set_up
from refusal import exit_code
from run_records import losses, records


def command(*arguments):
    assert exit_code(*arguments) == 0


def train(logs, name, *arguments):
    command("train", "--recipe", "demo", "--logs", logs, "--name", name, *arguments)
    return logs / name


def weights(run):
    return load_file(run / "checkpoints/last/open_clip_model.safetensors")


def test_a_run_repeats_from_its_saved_toml(tmp_path):
    """100 steps with augmentation and 2 workers."""
    few = ["--max-steps", "100", "--batch-size", "16", "--log-every", "1", "--eval-every", "0", "--workers", "2"]
    first = train(tmp_path, "first", *few, "--loss", "fastclip-v3")
    command("train", "--config", first / "config.toml", "--name", "second", "--logs", tmp_path)
    second = tmp_path / "second"
    assert len(losses(first)) == 100
    assert losses(first) == losses(second)
    torch.testing.assert_close(weights(first), weights(second), rtol=0, atol=0)


def test_resume_latest_drops_damaged_lines_and_those_after_the_checkpoint(tmp_path):
    few = ["--batch-size", "64", "--log-every", "1", "--eval-every", "0", "--workers", "0", "--warmup", "1"]
    run = train(tmp_path, "run", *few, "--max-steps", "6")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('123\n{"kind": "train", "step": 7, "loss": 1.0}\n{"kind": "tra')
    train(tmp_path, "run", *few, "--max-steps", "8", "--resume", "latest")
    assert "\n123\n" in (run / "metrics.jsonl.damaged-1").read_text()
    steps = [line["step"] for line in records(run) if line.get("set") != "emoji groups"]
    assert [step for step in steps if step] == [1, 2, 3, 4, 5, 6, 6, 7, 8, 8]  # each part ended with an evaluation


def test_broken_held_out_samples_are_counted_and_named_once(tmp_path, capsys):
    samples = emoji(12)
    write_classes(
        tmp_path / "classes", [(key, b"x" * (n < 5) or image, *rest) for n, (key, image, *rest) in enumerate(samples)]
    )
    write_shard(tmp_path / "val.tar", sound(20) | {f"{number:05d}.jpg": b"no image" for number in range(3)})
    sets = {"val_data": tmp_path / "val.tar", "zero_shot": tmp_path / "classes"}
    assert checkpoint_runs.train(tmp_path, **sets, eval_every=1, max_steps=2, save_every=0) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("3 of the 20 samples of the held-out data are broken") == 1
    assert shown.count("5 of the 12 samples of classes are broken") == 1
    counts = {(line["step"], line["set"]): line["broken"] for line in records(tmp_path / "logs/run", "eval")}
    assert counts == {(step, name): count for step in (0, 1, 2) for name, count in (("val", 3), ("classes", 5))}


def test_broken_samples_of_a_split_are_counted_too(tmp_path, capsys):
    files = sound(40) | {f"{number:05d}.jpg": f"no image {number}".encode() for number in range(0, 40, 4)}
    data = write_shard(tmp_path / "train.tar", files)
    changed = {"train_data": data, "val_split": 0.5, "max_steps": 1, "global_batch_size": 4, "save_every": 0}
    assert checkpoint_runs.train(tmp_path, **changed) == 0
    held_out = (tmp_path / "logs/run/held_out.csv").read_text().splitlines()[1:]
    broken = sum(int(line.partition(",")[0]) % 4 == 0 for line in held_out)
    assert [line["broken"] for line in records(tmp_path / "logs/run", "eval")] == [broken, broken] and broken
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count(f"{broken} of the {len(held_out)} samples of the held-out data are broken") == 1


def test_a_run_is_evaluated_loaded_and_reported(tmp_path, capsys):
    run = train(tmp_path, "run", "--max-steps", "12", "--eval-every", "6", "--workers", "0", "--loss", "siglip")
    described = json.loads((run / "run.json").read_text())
    assert described["status"] == "finished" and described["train_samples"] == 1830
    assert "unseen renders of known concepts" in described["notes"][0]
    evaluated, zero_shot = (records(run, "eval", set=name) for name in ("val", "emoji groups"))
    assert [line["step"] for line in evaluated] == [line["step"] for line in zero_shot] == [0, 6, 12]
    confusion = json.loads((run / "zero_shot.json").read_text())
    assert confusion["step"] == 12 and sum(map(sum, confusion["sets"]["emoji groups"]["confusion"])) == 200
    assert any((run / "tensorboard").iterdir())
    assert (run / "checkpoints" / "best" / "open_clip_model.safetensors").is_file()

    capsys.readouterr()
    command("evaluate", run, "--json", tmp_path / "figures.json", "--device", "cpu")
    shown = capsys.readouterr().out
    assert "recall@10" in shown and "unseen renders of known concepts" in shown
    figures = json.loads((tmp_path / "figures.json").read_text())["sets"]
    assert figures["val"]["metrics"] == pytest.approx(evaluated[-1]["metrics"], abs=1e-6)
    assert figures["emoji groups"]["metrics"] == pytest.approx(zero_shot[-1]["metrics"], abs=1e-6)

    other = BUNDLED / "val-000000.tar"
    command("evaluate", run, "--val-data", other, "--json", tmp_path / "other.json", "--device", "cpu")
    others = json.loads((tmp_path / "other.json").read_text())["sets"]
    assert list(others) == ["val-000000"] and others["val-000000"]["metrics"] == figures["val"]["metrics"]

    model, _, tokenizer = leanclip.load(run)
    assert not model.training
    text = model.encode_text(tokenizer(["a cat", "a dog"]))
    assert text.shape == (2, 128) and torch.allclose(text.norm(dim=1), torch.ones(2))

    command("report", run)
    report = (run / "report.html").read_text()
    assert "unseen renders of known concepts" in report
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed: the report was written but not opened")
    page = inspect_page(run / "report.html", tmp_path / "report.png")
    assert page.images >= 12 and page.broken == [] and page.console == []
    assert len(page.charts) >= 4 and all(width > 0 and height > 0 for width, height in page.charts)


def test_a_dry_run_says_what_would_happen_and_shows_a_batch(tmp_path, capsys, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "leanclip.cli.train.set_up", lambda *given, **named: asked.append(named) or set_up(*given, **named)
    )
    train(tmp_path, "dry", "--dry-run", "--workers", "0", "--loss", "fastclip-v2")
    assert asked == [{"kernels": False}]  # none is launched, so a GPU's need not be compiled
    shown = capsys.readouterr().out
    for fact in ("1,830 samples", "224, 14 an epoch", "22 steps of warm-up", "leanclip-tiny", "fastclip-v2 (tau "):
        assert fact in shown
    from PIL import Image

    with Image.open(tmp_path / "dry.dry_run.png") as picture:
        assert picture.width > 900 and len(set(picture.convert("L").tobytes())) > 50
    assert not (tmp_path / "dry").exists()  # the real run may have this name

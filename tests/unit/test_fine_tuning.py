"""Fine-tuning: what was known before, what is kept and gained, and the weights in between."""

import csv
import json
import re
import shutil
from xml.etree import ElementTree

import pytest
import torch
from checkpoint_runs import SMALL, steps_of_metrics, train
from evaluation_sets import emoji
from safetensors.torch import load_file
from shard_files import write_shard

import leanclip
from leanclip.models.weights import interpolate
from refusal import assert_refused, refuses
from refusal import exit_code as command
from run_records import losses, records

WEIGHTS = "open_clip_model.safetensors"


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A run on set A, and one on set B that starts from it. Not to be changed."""
    folder, samples = tmp_path_factory.mktemp("tuned"), emoji(80)
    (folder / "small.json").write_text(json.dumps(SMALL))
    for name, part in (("a", samples[:40]), ("b", samples[40:])):
        files = {f"{key}.{suffix}": content for key, image, text, _ in part
                 for suffix, content in (("jpg", image), ("txt", text.encode()))}  # fmt: skip
        write_shard(folder / f"{name}.tar", files)
    assert train(folder, **settings(folder, "a"), name="first") == 0
    assert train(folder, **settings(folder, "b"), pretrained=folder / "logs/first", zero_shot="emoji") == 0
    return folder


def settings(folder, data, steps=60):
    """Of a run that learns the 40 pairs of a set by heart."""
    data = dict.fromkeys(("train_data", "val_data"), folder / f"{data}.tar")
    return data | {"model": folder / "small.json", "loss": "infonce", "lr": 0.002, "epochs": 1000, "max_steps": steps,
                   "eval_every": 0, "save_every": 0}  # fmt: skip


def tune(folder, tuned, **changed):
    """A short run on set B from the first one's weights, in another folder."""
    return train(folder, **settings(tuned, "b", steps=2) | {"pretrained": tuned / "logs/first"} | changed)


def evaluated(folder, *words):
    """The JSON of leanclip evaluate on both sets."""
    data = ["--val-data", folder / "a.tar", "--val-data", folder / "b.tar", "--device", "cpu"]
    assert command("evaluate", *data, "--json", folder / "figures.json", *words) == 0
    return json.loads((folder / "figures.json").read_text())


def weights(path):
    return load_file(path / WEIGHTS if path.is_dir() else path)


def recall(figures, name):
    return figures[name]["metrics"]["text_to_image_recall@10"]


def test_kept_against_gained(tuned, capsys):
    figures = evaluated(tuned, tuned / "logs/run", "--interpolate", "0,0.25,0.5,0.75,1", "--csv", tuned / "f.csv")
    table = capsys.readouterr().out
    rows = re.findall(r"(a|b) +│ (\S+-to-\S+) +│ (\S+)", table)
    expected = [(name, way, weight) for name in "ab" for way in ("image-to-text", "text-to-image")
                for weight in ("0", "0.25", "0.5", "0.75", "1")]  # fmt: skip
    assert rows == expected
    between = figures["interpolation"]
    assert list(between) == ["0", "0.25", "0.5", "0.75", "1"]
    assert recall(between["0"], "a") > 0.9 > recall(between["1"], "a")  # forgotten
    assert recall(between["0"], "b") < 0.5 < 0.9 < recall(between["1"], "b")  # gained
    both = {weight: recall(sets, "a") + recall(sets, "b") for weight, sets in between.items()}
    assert both["0.5"] > max(both["0"], both["1"])
    start, end = (evaluated(tuned, tuned / f"logs/{name}", "--after-only")["sets"] for name in ("first", "run"))
    for name in "ab":
        assert between["0"][name]["metrics"] == start[name]["metrics"]
        assert between["1"][name]["metrics"] == end[name]["metrics"]
    rows = list(csv.DictReader((tuned / "f.csv").read_text().splitlines()))
    assert {row["weight"] for row in rows} == {"0.0", "0.25", "0.5", "0.75", "1.0"}
    drawing = ElementTree.parse(tuned / "figures.svg").getroot()
    texts = [element.text for element in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert "a: text-to-image recall@10" in texts and "b: image-to-text recall@10" in texts
    assert len(list(drawing.iter("{http://www.w3.org/2000/svg}circle"))) == 4 * 5


def test_before_after_and_difference(tuned, capsys):
    figures = evaluated(tuned, tuned / "logs/run")
    table = capsys.readouterr().out
    for name, result in figures["sets"].items():
        assert result["difference"]["text_to_image_recall@10"] == pytest.approx(
            recall(figures["sets"], name) - result["before"]["text_to_image_recall@10"]
        )
        assert re.search(rf"{name} +│ text-to-image │ before +│", table)
        assert re.search(rf"{name} +│ text-to-image │ after +│", table)
        assert re.search(rf"{name} +│ text-to-image │ difference │ +[+-]\d", table)
    assert figures["baseline"].endswith("checkpoints/start")
    (own, *_) = leanclip.evaluate(tuned / "logs/run", device="cpu")
    assert own.compared == "before" and own.baseline is not None and own.difference
    assert "before" not in evaluated(tuned, tuned / "logs/run", "--after-only")["sets"]["a"]
    assert "before" not in evaluated(tuned, tuned / "logs/first")["sets"]["a"]  # trained from scratch


def test_the_run_keeps_its_first_evaluation(tuned):
    before = records(tuned / "logs/run", weights="before")
    assert {(line["set"], line["step"]) for line in before} == {("val", 0), ("emoji groups", 0)}
    card = (tuned / "logs/run/README.md").read_text()
    assert "| metric | before training | after |" in card
    first = (tuned / "logs/first/metrics.jsonl").read_text()
    assert '"weights"' not in first and not (tuned / "logs/first/checkpoints/start").exists()


def test_a_resumed_run_does_not_evaluate_its_start_again(tuned, tmp_path):
    assert tune(tmp_path, tuned) == 0
    saved = weights(tmp_path / "logs/run/checkpoints/start")
    assert tune(tmp_path, tuned, max_steps=4, resume="auto") == 0
    assert len(records(tmp_path / "logs/run", weights="before")) == 1
    assert steps_of_metrics(tmp_path)[-1] == 4
    again = weights(tmp_path / "logs/run/checkpoints/start")
    assert all(torch.equal(again[name], value) for name, value in saved.items())


@pytest.mark.parametrize("way", ["the command", "its config.toml"])
def test_a_run_is_resumed_without_the_file_that_it_started_from(tuned, tmp_path, way):
    start = tmp_path / "start.safetensors"
    assert command("export", tuned / "logs/first", start) == 0
    flags = {"pretrained": start, "model": False}
    assert tune(tmp_path, tuned, **flags) == 0
    start.unlink()
    if way == "its config.toml":
        flags = {"config": tmp_path / "logs/run/config.toml", "model": False}
    for steps in (4, 6):
        assert tune(tmp_path, tuned, **flags, max_steps=steps, resume="auto") == 0
    assert steps_of_metrics(tmp_path)[-1] == 6


def test_the_ends_are_exact(tuned, tmp_path):
    """Bit for bit, in files and in models."""
    run = tuned / "logs/run"
    start, end = weights(run / "checkpoints/start"), weights(run / "checkpoints/last")
    first = weights(tuned / "logs/first/checkpoints/last")
    assert all(torch.equal(start[name], value) for name, value in first.items() if name != "logit_scale")
    assert torch.allclose(start["logit_scale"], first["logit_scale"], rtol=1e-6)  # through tau and back
    for weight, expected in (("0", start), ("1", end)):
        out = tmp_path / f"{weight}.safetensors"
        assert command("export", run, out, "--interpolate", weight) == 0
        exported = weights(out)
        assert exported.keys() == expected.keys()
        for name, value in expected.items():
            assert value.numpy().tobytes() == exported[name].numpy().tobytes(), name
    assert command("export", run, tmp_path / "half.safetensors", "--interpolate", 0.5) == 0
    middle = {name: (start[name] + end[name]) / 2 for name in start}
    torch.testing.assert_close(weights(tmp_path / "half.safetensors"), middle, rtol=1e-5, atol=1e-7)


def test_whole_numbers_and_statistics_of_batch_norms():
    def state(variance: list[float], batches: int, zero: float) -> dict[str, torch.Tensor]:
        values = {"bn.running_var": variance, "bn.num_batches_tracked": batches, "zero": zero}
        return {name: torch.tensor(value) for name, value in values.items()}

    start, end = state([1.0, 4.0], 3, -0.0), state([3.0, 2.0], 9, 0.0)
    half = interpolate(start, end, 0.5)
    assert half["bn.running_var"].tolist() == [2.0, 3.0] and half["bn.num_batches_tracked"] == 9
    assert interpolate(start, end, 0)["bn.num_batches_tracked"] == 3
    assert torch.signbit(interpolate(start, end, 0)["zero"]) and not torch.signbit(interpolate(start, end, 1)["zero"])
    with refuses("interpolate.other_model", "bn.running_var", "(2,)", "(3,)"):
        interpolate(start | {"bn.running_var": torch.zeros(3)}, end, 0)
    with refuses("interpolate.other_model", "absent"):
        interpolate({"zero": start["zero"]}, end, 1)


def test_averaged_weights(tuned, tmp_path):
    """The end is the average, as everywhere; the start has no second file, since both are equal there."""
    assert tune(tmp_path, tuned, ema=0.9) == 0
    checkpoints = tmp_path / "logs/run/checkpoints"
    assert not (checkpoints / "start/trained.safetensors").exists()
    assert command("export", tmp_path / "logs/run", tmp_path / "end.pt", "--interpolate", 1) == 0
    exported = torch.load(tmp_path / "end.pt", weights_only=True)["state_dict"]
    last = weights(checkpoints / "last")
    assert all(torch.equal(exported[name], value) for name, value in last.items())


def test_adapters_start_as_the_weights_and_end_merged(tuned, tmp_path):
    """So that a run with adapters is interpolated as any other."""
    assert tune(tmp_path, tuned, lora_image=4, lora_text=4) == 0
    start, first = weights(tmp_path / "logs/run/checkpoints/start"), weights(tuned / "logs/first/checkpoints/last")
    assert start.keys() == first.keys()
    assert all(torch.equal(value, first[name]) for name, value in start.items() if name != "logit_scale")
    for weight, place in ((0, "start"), (1, "last")):
        out = tmp_path / f"{weight}.safetensors"
        assert command("export", tmp_path / "logs/run", out, "--interpolate", weight) == 0
        saved = weights(tmp_path / "logs/run/checkpoints" / place)
        assert all(torch.equal(value, saved[name]) for name, value in weights(out).items())


def test_the_start_can_be_left_out_and_named(tuned, tmp_path, capsys):
    assert tune(tmp_path, tuned, discard_start=True) == 0
    run, out = tmp_path / "logs/run", tmp_path / "out.safetensors"
    assert not (run / "checkpoints/start").exists()
    assert_refused("interpolate.no_start", ["export", run, out, "--interpolate", 0.5], capsys)
    assert command("export", run, out, "--interpolate", 0, "--start", tuned / "logs/first") == 0
    first = weights(tuned / "logs/first/checkpoints/last")
    assert all(torch.equal(value, first[name]) for name, value in weights(out).items())


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--interpolate", "0,2"], "config.bad_value"),
        (["--interpolate", "half"], "config.bad_value"),
        (["--interpolate", "nan"], "config.bad_value"),
        (["--interpolate", "0,1", "--baseline", "x"], "config.bad_value"),
        (["--interpolate", "0,1", "--suite", "clip_benchmark"], "config.bad_value"),
        (["--start", "x"], "config.bad_value"),
        (["--interpolate", "0,1", "--start", "absent"], "checkpoint.not_found"),
        (["--interpolate", "0,1", "--start", "SMALLER"], "interpolate.other_model"),
    ],
)
def test_refusals(words, code, tuned, eight_steps, capsys):
    words = [str(eight_steps / "logs/run") if word == "SMALLER" else word for word in words]
    arguments = ["evaluate", tuned / "logs/run", "--val-data", tuned / "a.tar", "--device", "cpu", *words]
    assert_refused(code, arguments, capsys)


def test_a_damaged_start_is_refused(tuned, tmp_path, capsys):
    shutil.copytree(tuned / "logs/run", tmp_path / "run", symlinks=True)
    path = tmp_path / "run/checkpoints/start" / WEIGHTS
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    arguments = ["export", tmp_path / "run", tmp_path / "out.safetensors", "--interpolate", 0.5]
    assert_refused("checkpoint.damaged", arguments, capsys)


def test_a_run_that_fails_at_once_leaves_its_name_free(tuned, tmp_path, monkeypatch):
    """The start alone is no result of the run."""
    from leanclip.training import loop

    def fail(*_):
        raise RuntimeError("injected fault")

    monkeypatch.setattr(loop, "training_step", fail)
    with pytest.raises(RuntimeError, match="injected fault"):
        tune(tmp_path, tuned)
    assert not (tmp_path / "logs/run").exists()


def test_batch_norms_keep_their_averages_where_weights_are_given(tmp_path, capsys):
    """The layers behind them know images normalised by these; 2 micro-batches then equal one."""
    data = {"model": "leanclip-tiny", "loss": "infonce", "max_steps": 3, "lr": 1e-3}
    assert train(tmp_path, **data, name="first") == 0
    last = "checkpoints/step_00000003"
    first = weights(tmp_path / "logs/first" / last)
    averages = [name for name in first if "running" in name]
    kept, losses_of = {}, {}
    for name, changed in (("fixed", {}), ("split", {"micro_batch": 10}), ("moved", {"fix_batch_norm": "False"})):
        assert train(tmp_path, **data | changed, name=name, pretrained=tmp_path / "logs/first") == 0
        assert ("batch norms fixed" in capsys.readouterr().out) == (name != "moved")
        after, losses_of[name] = weights(tmp_path / "logs" / name / last), losses(tmp_path / "logs" / name)
        kept[name] = all(torch.equal(first[each], after[each]) for each in averages)
        assert not torch.equal(first["visual.conv1.weight"], after["visual.conv1.weight"])
    assert averages and kept == {"fixed": True, "split": True, "moved": False}
    assert losses_of["split"] == pytest.approx(losses_of["fixed"], rel=1e-5)

"""The commands as Python functions."""

import json
import signal
import threading

import pytest
import torch

import leanclip
from leanclip.data.datasets import BUNDLED
from leanclip.models import ModelConfig, create_model
from leanclip.runs import RunDirectory, TrainConfig
from leanclip.runs.defaults import fill
from refusal import exit_code, refuses


@pytest.fixture(scope="module")
def settings(tmp_path_factory, small_model):
    return {
        "model": small_model, "logs": tmp_path_factory.mktemp("api"), "batch_size": 32, "max_steps": 2,
        "eval_every": 0, "workers": 0, "device": "cpu", "quiet": True,
    }  # fmt: skip


@pytest.fixture(scope="module")
def trained(settings):
    return leanclip.train(recipe="demo", name="run", **settings)


def test_train_returns_directory_metrics_and_model(trained, settings, capsys):
    assert trained.directory == settings["logs"] / "run" and trained.stopped is None
    assert [record["step"] for record in trained.metrics if "loss" in record][-1] == 2
    embeddings = trained.model.encode_text(trained.model.tokenizer(["a cat", "a dog"]))
    assert embeddings.shape == (2, 64) and not trained.model.training
    assert RunDirectory(trained.directory).facts()["status"] == "finished"
    assert capsys.readouterr().out == ""


def test_evaluate_gives_the_figures_of_the_command(trained, tmp_path):
    results = leanclip.evaluate(trained, device="cpu")
    assert {result.kind for result in results} == {"retrieval", "zero-shot"}

    exit_code("evaluate", str(trained.directory), "--device", "cpu", "--json", str(tmp_path / "figures.json"))
    figures = json.loads((tmp_path / "figures.json").read_text())
    by_name = {name: entry["metrics"] for name, entry in figures["sets"].items()}
    assert {result.name: dict(result.metrics) for result in results} == by_name


def test_evaluate_wants_a_model_that_is_stored(trained):
    with pytest.raises(leanclip.UserError, match="the path of a model, not a TwoTower") as error:
        leanclip.evaluate(trained.model)
    assert error.value.code == "config.bad_value"


def test_a_saved_configuration_repeats_the_run(trained, settings):
    again = leanclip.train(trained.directory / "config.toml", name="again", logs=settings["logs"], quiet=True)
    losses = [[record["loss"] for record in run.metrics if "loss" in record] for run in (trained, again)]
    assert losses[0] == losses[1] and losses[0]


def test_train_works_in_a_thread_and_restores_signal_handlers(settings):
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    runs = []
    thread = threading.Thread(target=lambda: runs.append(leanclip.train(recipe="demo", name="thread", **settings)))
    thread.start()
    thread.join()
    assert runs and runs[0].stopped is None
    leanclip.train(recipe="demo", name="handlers", **settings)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)] == handlers


@pytest.mark.parametrize(
    ("call", "code", "word"),
    [
        (lambda _: leanclip.train(epoch=3), "config.unknown_key", "epoch"),
        (lambda _: leanclip.train(epochs="three"), "config.bad_value", "epochs"),
        (lambda _: leanclip.train(leanclip.TrainConfig(), recipe="demo"), "config.two_sources", ""),
        (lambda run: leanclip.evaluate(run, validation="x.tar"), "config.unknown_key", "validation"),
        (lambda run: leanclip.evaluate(run, batch_size=0), "config.bad_value", "batch_size"),
        (lambda _: leanclip.evaluate("nowhere"), "checkpoint.not_found", "nowhere"),
        (lambda run: leanclip.load(run.directory, device="tpu9"), "device.unknown", "tpu9"),
    ],
)
def test_mistakes_are_user_errors(call, code, word, trained):
    with refuses(code, word):
        call(trained)


def test_load_takes_what_evaluate_takes(trained, tmp_path, small_model):

    for source, name in ((trained.directory, "mine.safetensors"), (tmp_path / "mine.safetensors", "mine.pt")):
        exit_code("export", str(source), str(tmp_path / name))
    expected = trained.model.encode_text(trained.model.tokenizer(["a cat"]))
    data = {"val_data": (str(BUNDLED / "val-000000.tar"),), "device": "cpu"}
    (figures,) = leanclip.evaluate(trained, **data)
    sources = [trained.checkpoint, tmp_path / "mine.safetensors", tmp_path / "mine.pt"]
    for source in [*sources, f"{small_model}:{tmp_path / 'mine.pt'}"]:
        model, preprocess, tokenizer = leanclip.load(source, device="cpu")
        assert torch.allclose(model.encode_text(tokenizer(["a cat"])), expected, atol=1e-6) and preprocess
        assert leanclip.evaluate(source, **data)[0].metrics == pytest.approx(figures.metrics, abs=1e-6)
    saved = json.loads((tmp_path / "mine.json").read_text())
    described = {"model_cfg": saved, "preprocess_cfg": {"mean": [0.5, 0.5, 0.5]}}
    (tmp_path / "mine.json").write_text(json.dumps(described))
    for name in ("mine.safetensors", "mine.pt"):  # --pretrained FILE brings its architecture and preprocessing, too
        config = fill(TrainConfig(model=ModelConfig(pretrained=str(tmp_path / name))), samples=1000)
        started = create_model(config.model)
        assert torch.allclose(started.encode_text(started.tokenizer(["a cat"])), expected, atol=1e-6)
        assert (tuple(started.preprocess.mean) == (0.5, 0.5, 0.5)) == (name == "mine.pt")
    (tmp_path / "mine.json").write_text("[]")  # something else
    config = TrainConfig(model=ModelConfig(pretrained=str(tmp_path / "mine.pt")))
    assert fill(config, samples=1000).model.model == "leanclip-tiny"
    (tmp_path / "mine.json").unlink()
    leanclip.load(tmp_path / "mine.safetensors")  # its header holds the architecture
    for run in (leanclip.load, leanclip.evaluate):
        with refuses("checkpoint.no_architecture", f"MODEL:{tmp_path / 'mine.pt'}"):
            run(tmp_path / "mine.pt")

"""How fast a step runs is chosen by flags: what each means, and what it says."""

import itertools
import json
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from leanclip.cli.openclip_flags import from_openclip
from leanclip.cli.train import parse_command, run
from leanclip.config import override
from leanclip.data import Batch
from leanclip.data import batch as batch_module
from leanclip.data.batch import on_device
from leanclip.distributed import Ranks
from leanclip.errors import UserError
from leanclip.models import ModelConfig, create_model
from leanclip.runs import TrainConfig
from leanclip.training.model_setup import cuda_graph_pays, uses_compile, uses_cuda_graph
from refusal import refuses
from run_records import losses

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def parallel(line):
    return parse_command(from_openclip(line.split())[0]).settings.parallel


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("", "grad_checkpointing", False),
        ("--grad-checkpointing", "grad_checkpointing", True),
        ("--grad-checkpointing --lr 1", "grad_checkpointing", True),
        ("--grad-checkpointing 1", "grad_checkpointing", 1),
        ("", "compile", "auto"),
        ("--compile", "compile", "on"),
        ("--compile off", "compile", "off"),
        ("--graph", "graph", "on"),
    ],
)
def test_flags_may_stand_alone(line, name, value):
    found = getattr(parallel(line), name)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("value", [True, 6])
def test_a_config_file_sets_it_too(value):
    assert override(TrainConfig(), {"grad_checkpointing": value}, "x.toml").parallel.grad_checkpointing is value


def test_a_negative_number_of_blocks_is_refused():
    with refuses("config.bad_value", "--grad-checkpointing is -1"):
        parallel("--grad-checkpointing=-1")


@pytest.mark.parametrize(
    ("wanted", "device", "steps", "yes"),
    [("auto", GPU, 5000, True), ("auto", GPU, 500, False), ("auto", CPU, 5000, False), ("on", GPU, 10, True),
     ("on", CPU, 10, True), ("off", GPU, 5000, False)],
)  # fmt: skip
def test_who_compiles(wanted, device, steps, yes):
    model = create_model(ModelConfig(model="ViT-B-32"), shapes_only=True)
    config = override(TrainConfig(), {"compile": wanted, "global_batch_size": 2048}, "test")
    assert uses_compile(config, model, Ranks(0, 1, None), device, steps) == yes


def test_compiling_is_to_save_more_than_it_takes():
    def first(name, batch, ranks=1, **flags):
        """The fewest steps that are worth it, within a factor of two."""
        model = create_model(ModelConfig(model=name), shapes_only=True)
        config = override(TrainConfig(), {"global_batch_size": batch, **flags}, "test")
        return next(
            n for n in (2**power for power in range(30)) if uses_compile(config, model, Ranks(0, ranks, None), GPU, n)
        )

    assert 1024 <= first("ViT-B-32", 2048) <= 2048
    assert first("ViT-B-32", 64) > 4 * first("ViT-B-32", 2048)  # recorded: launching costs little
    assert first("ViT-B-32", 64, graph="off") == first("ViT-B-32", 512, ranks=8) == 4096  # they wait for launches
    assert first("ViT-B-32", 65536, ranks=32) == first("ViT-B-32", 2048)
    assert first("RN50", 2048) <= 2048 and first("coca_ViT-B-32", 2048) <= 2048


def test_who_records():
    small = create_model(ModelConfig(model="ViT-B-32"))
    config = override(TrainConfig(), {"global_batch_size": 64}, "test")
    one, two = Ranks(0, 1, None), Ranks(0, 2, None)
    assert uses_cuda_graph(config, small, one, GPU)
    assert not uses_cuda_graph(config, small, two, GPU) and not uses_cuda_graph(config, small, one, CPU)
    assert not uses_cuda_graph(override(config, {"global_batch_size": 4096}, "test"), small, one, GPU)
    assert not uses_cuda_graph(override(config, {"graph": "off"}, "test"), small, one, GPU)
    with refuses("training.graph_unsupported", "--graph"):
        uses_cuda_graph(override(config, {"graph": "on"}, "test"), small, one, CPU)
    assert not cuda_graph_pays(
        create_model(ModelConfig(model="leanclip-tiny")), 8
    )  # a ResNet: nothing is known of it


def test_batches_arrive_in_order_and_errors_too():
    def batches():
        for number in range(3):
            yield Batch(
                images=torch.full((1, 1), number), tokens=torch.zeros(1, 2), sample_ids=torch.tensor([number])
            )
        raise UserError("the loader stops")

    arriving = on_device(batches(), CPU, pack=lambda batch: batch.pack(lambda tokens, lengths: len(tokens)))
    assert [(int(batch.images), batch.captions) for batch in itertools.islice(arriving, 3)] == [
        (0, 1),
        (1, 1),
        (2, 1),
    ]
    with pytest.raises(UserError, match="the loader stops"):
        next(arriving)


def test_an_epoch_is_left_when_its_last_batch_has_come(monkeypatch):
    """However late: a thread that still read would take a batch of the next epoch. GPU and clock are made up. The
    first batch, with which the loader's workers start, is taken here: forked in a thread of a pool they could not
    exit."""
    came, hours = [], itertools.count()

    def batches():
        for number in range(2):
            time.sleep(0.3 * number)
            came.append((number, threading.current_thread() is threading.main_thread()))
            yield Batch(
                images=torch.full((1, 1), number), tokens=torch.zeros(1, 2), sample_ids=torch.tensor([number])
            )

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(record_event=lambda: None))
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(Batch, "to", lambda batch, *_: batch)
    monkeypatch.setattr(batch_module, "_received", lambda batch, _: batch)
    monkeypatch.setattr(time, "monotonic", lambda: 3600.0 * next(hours))
    arriving = on_device(batches(), torch.device("cuda", 0))
    assert int(next(arriving).images) == 0
    arriving.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert came == [(0, True), (1, False)]


def test_padded_and_true_length_runs_train_alike(tmp_path, capsys):
    """Through the command, with micro-batches and some blocks recomputed; a tower that must be padded says so."""
    config = {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 32, "layers": 2, "width": 16, "head_width": 8, "patch_size": 8},
        "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 2},
    }
    (tmp_path / "vit.json").write_text(json.dumps(config))
    config["text_cfg"] |= {"no_causal_mask": True}  # pyright: ignore[reportOperatorIssue]
    (tmp_path / "other.json").write_text(json.dumps(config))
    base = f"--max-steps 3 --global-batch-size 24 --workers 0 --eval-every 0 --log-every 1 --logs {tmp_path}"
    found = {}
    for name, more in (
        ("true", "--model vit.json"), ("padded", "--model vit.json --pad-text"),
        ("micro", "--model vit.json --micro-batch 7 --grad-checkpointing 1"), ("other", "--model other.json"),
    ):  # fmt: skip
        run(f"{base} --precision fp64 --name {name} {more.replace('--model ', f'--model {tmp_path}/')}".split())
        found[name] = losses(tmp_path / name)
    assert len(found["true"]) == 3
    for name in ("padded", "micro"):
        assert found[name] == pytest.approx(found["true"], rel=1e-9)
    said = capsys.readouterr().out
    assert said.count("captions run padded to the context length: the text tower is not causal") == 1

"""Kernel warm-up: every kernel of a step is launched once, in threads, without side effects."""

import subprocess
import sys
import threading

import pytest
import torch
from tower_cases import FAMILIES, captions, model_of

import leanclip
from leanclip.losses import LOSSES
from leanclip.ops import attention
from leanclip.ops.blocking import LONGEST_STRIP, strip_tiles
from leanclip.training import kernel_warmup
from leanclip.training.kernel_warmup import KernelWarmup, warmup_calls

CPU = torch.device("cpu")


def off():
    return torch.autocast("cpu", torch.bfloat16, enabled=False)


def calls_of(model, name="fastclip-v3"):
    return list(
        warmup_calls(
            model,
            lambda: leanclip.create_loss(name, num_samples=8),
            batch=8,
            autocast=off,
            device=CPU,
            resized_to=(8, 6),
        )
    )


def test_calls_run_in_parallel_and_a_failure_is_reported():
    meeting, done = threading.Barrier(2, timeout=20), []

    def call():
        meeting.wait()
        done.append(1)

    def broken():
        raise RuntimeError("no such kernel\nmore of it")

    message = KernelWarmup([call, broken, call], CPU).wait()
    assert done == [1, 1]
    assert message is not None and message.endswith("(RuntimeError: no such kernel)")


@pytest.mark.parametrize(("name", "number"), [("cuda", 1), ("cuda:2", 2)])
def test_threads_use_the_gpu_of_the_thread_that_starts_them(name, number, monkeypatch):
    """`--device cuda` has no number, which set_device needs."""
    chosen, done = [], []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch._C, "_cuda_setDevice", chosen.append, raising=False)
    assert KernelWarmup([lambda: done.append(1)] * 3, torch.device(name)).wait() is None
    assert (set(chosen), done) == ({number}, [1] * 3)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_of_models_can_be_warmed_up(family):
    model = model_of(*FAMILIES[family])
    calls = calls_of(model)
    for call in calls:
        call()
    assert len(calls) == 2 + 2 * model.blockwise_image + 4 * (model.end_of_text is not None)


def test_a_program_that_exits_during_the_warm_up_exits_cleanly():
    """The threads are inside of torch, and must not abort the program."""
    code = """
import sys, torch
from leanclip.training.kernel_warmup import KernelWarmup

def work():
    for _ in range(60):
        x = torch.ones(200, 200, requires_grad=True)
        (x @ x).sum().backward()

KernelWarmup([work] * 4, torch.device("cpu"))
sys.exit(2)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "")


@pytest.mark.parametrize("name", LOSSES)
def test_weights_and_random_numbers_do_not_change(name):
    base, vision, text = FAMILIES["clip"]
    model = model_of(base, vision, text)
    before, state = {key: value.clone() for key, value in model.state_dict().items()}, torch.get_rng_state()
    calls = calls_of(model, name)
    for call in calls:
        call()
    assert len(calls) == 8
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


LAUNCHING = {name: FAMILIES[name] for name in ("clip", "a text tower of its own", "custom blocks", "average pooling")}
LAUNCHING["patch dropout"] = ({}, {"patch_dropout": 0.5}, {})


@pytest.mark.parametrize("family", LAUNCHING)
def test_the_warmed_kernels_are_those_that_the_model_launches(family, monkeypatch):
    """By everything that a kernel is compiled for. A stand-in replaces the GPU's kernels."""
    launched = []

    def launch(qkv, tiles, rows, length, block):
        launched.append((tuple(qkv.shape[1:]), qkv.dtype, tiles is None, length, block))
        return qkv[:, 0] * 1.0

    def launch_back(qkv, gradient, tiles, rows, length, block):
        assert gradient.shape == qkv[:, 0].shape
        return launch(qkv, tiles, rows, length, block)

    model = model_of(*LAUNCHING[family])
    monkeypatch.setattr(attention, "uses_kernel", lambda qkv: True)
    for module in (attention, kernel_warmup):
        monkeypatch.setattr(module, "short_attention", launch)
    monkeypatch.setattr(kernel_warmup, "short_attention_backward", launch_back)
    for call in calls_of(model):
        call()
    warmed = launched.copy()
    launched.clear()
    model(torch.randn(3, 3, 32, 32), captions(3))
    assert launched and set(launched) <= set(warmed)
    assert all(warmed.count(kernel) >= 2 for kernel in launched)  # forward and backward


@pytest.mark.parametrize("processors", [20, 108, 132, 148])
def test_a_larger_batch_launches_the_kernels_of_the_warm_up(processors):
    tiles = [(batch // 128) ** 2 for batch in (kernel_warmup.MOST_SAMPLES, 2 * kernel_warmup.MOST_SAMPLES, 2**20)]
    assert {strip_tiles(count, processors) for count in tiles} == {LONGEST_STRIP}

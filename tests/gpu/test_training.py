"""The trainer on a GPU: every precision, FSDP2, and micro-batches that fit by themselves."""

from dataclasses import replace

import pytest
import torch

from leanclip.cli.train import parse_command, run
from leanclip.data import Batch
from leanclip.losses import loss_from_config
from leanclip.models import ModelConfig
from leanclip.optim import OptimConfig, create_optimizer, weight_decay_groups
from leanclip.runs.config import TrainConfig
from leanclip.training import probe, set_up
from leanclip.training.model_setup import model_for_run
from leanclip.training.probe import USED, probe_micro_batch
from leanclip.training.step import training_step
from leanclip.training.step_context import StepContext
from run_records import losses as losses_of_run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

BASE = "--max-steps 12 --global-batch-size 96 --workers 0 --eval-every 0 --log-every 1 --name run --loss fastclip-v3"


def losses(folder, extra):
    run([*BASE.split(), "--logs", str(folder), *extra.split()])
    return losses_of_run(folder / "run")


@pytest.mark.parametrize("extra", ["--precision amp", "--precision fp32", "--micro-batch 32", "--fsdp"])
def test_every_way_trains_alike(extra, tmp_path):
    right = losses(tmp_path / "plain", "--precision amp_bf16")
    found = losses(tmp_path / "other", extra)
    assert len(found) == 12
    # The bundled model has batch normalisation, so micro-batches come near, not equal.
    assert found == pytest.approx(right, rel=0.1 if "micro" in extra else 0.03)
    assert found[-1] < found[0]


def with_room(monkeypatch, room):
    """A GPU on which this process can have so many bytes."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (room - torch.cuda.memory_reserved(), room))


def test_the_probed_micro_batch_is_near_the_largest_that_fits(monkeypatch):
    """On the longest captions, with the pixels of the next batch on the device."""
    room, device, share = 8 * 2**30, torch.device("cuda"), 4096
    config = TrainConfig(
        model=ModelConfig(model="ViT-B-32"),
        optim=OptimConfig(lr=1e-5, wd=0.1, beta1=0.9, beta2=0.98, eps_opt=1e-6),
    )
    model = model_for_run(config).to(device).train()
    loss = loss_from_config("infonce", config.loss, num_samples=10**6).to(device)
    optimizer = create_optimizer(config.optim, [*weight_decay_groups(model, 0.1), *loss.param_groups()])
    context = StepContext(
        towers=model, loss=loss, optimizer=optimizer, global_batch=share,
        autocast=torch.autocast("cuda", torch.bfloat16),
    )  # fmt: skip
    with_room(monkeypatch, room)
    micro, peak = probe_micro_batch(context, model, share=share, optimizer="adamw", fsdp=False)
    assert 16 <= micro < share // 8 and 0 < peak <= USED * room
    images, _ = torch.randint(256, (2, share, 3, 224, 224), dtype=torch.uint8, device=device)
    tokens = model.tokenizer(["a " * 1000]).expand(share, -1).contiguous().to(device)
    batch = Batch(images=images, tokens=tokens, sample_ids=torch.arange(share), lengths=torch.full((share,), 77))

    def needed(size):
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            parts = -(-share // size)
            packed = batch.pack(model.texts, parts)
            assert not training_step(replace(context, micro_batches=parts), packed).skipped
        return torch.cuda.max_memory_allocated()

    assert needed(micro) <= USED * room < needed(int(1.1 * micro) + 8)


def test_a_probed_run_equals_one_whose_micro_batch_is_given(monkeypatch, tmp_path):
    """Weights, loss state, batch-norm statistics and random numbers when it begins, and its losses, bit for bit."""
    flags = [*BASE.split(), "--logs", str(tmp_path)]
    search, sizes = probe.largest_micro_batch, []

    def smaller(peak, **options):
        sizes.append(search(peak, **options).size)  # whose passes must leave no trace
        return probe.MicroBatch(24, 0)

    by_hand = losses(tmp_path / "given", "--micro-batch 24")
    given = set_up(parse_command([*flags, "--micro-batch", "24"]).settings)
    monkeypatch.setattr(probe, "largest_micro_batch", smaller)
    probed = set_up(parse_command(flags).settings)
    assert sizes == [96] and probed.context.micro_batches == given.context.micro_batches == 4
    assert all(parameter.grad is None for parameter in probed.context.parameters)
    before = given.state.tensors()
    for name, tensor in probed.state.tensors().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0, equal_nan=True, msg=name)
    assert losses(tmp_path / "probed", "") == by_hand

"""The search for the largest micro-batch, with a function in the place of the GPU's measurements."""

import math

import pytest
import torch

from leanclip.cli.train import parse_command
from leanclip.distributed import Ranks
from leanclip.training import set_up
from leanclip.training.micro_batch_probe import largest_micro_batch, probe_micro_batch

ALONE = Ranks(0, 1, None)


class TwoRanks(Ranks):
    """The other rank has less room, and its passes need more."""

    def all_gather_objects(self, value):
        return [value, value - 150] if isinstance(value, int) else [value, value * 1.5]


def search(peak, share, room, *, ranks=ALONE, **options):
    sizes = []

    def measure(size):
        sizes.append(size)
        return float(peak(size))

    return largest_micro_batch(measure, share=share, room=room, ranks=ranks, **options), sizes


def linear(size):
    return 1000 + 10 * size


def convex(size):
    return 1000 + 10 * size + 0.005 * size**2


def bent(size):
    """In small passes the weights' gradients need more than the activations."""
    return max(2000, linear(size))


@pytest.mark.parametrize(
    ("share", "room", "largest"),
    [
        (512, 6120, 512),
        (512, 6119, 504),
        (512, 5000, 400),
        (512, 4999, 392),
        (500, 1079, 7),
        (20, 1160, 16),
        (3, 1020, 2),
        (1, 1010, 1),
        (512, 1009, 0),
        (1, 1009, 0),
    ],
)
def test_it_is_exact_where_memory_grows_in_a_line(share, room, largest):
    found, sizes = search(linear, share, room)
    assert found == largest
    assert sizes[-1] == (largest or 1) and len(sizes) <= 5


@pytest.mark.parametrize("peak", [convex, bent])
@pytest.mark.parametrize("room", [2500, 3000, 5000, 12000])
def test_it_is_safe_and_near_where_memory_grows_faster_than_a_line(room, peak):
    found, _ = search(peak, 4096, room)
    best = max(size for size in range(4097) if peak(size) <= room)
    assert peak(found) <= room and found >= 0.9 * best - 8


def test_it_lowers_what_runs_out_of_memory():
    """The line says 400; passes above 300 fail, in a pool with another limit than the room."""
    found, sizes = search(lambda size: linear(size) if size <= 300 else math.inf, 512, 5000)
    assert found == 296 and 400 in sizes
    assert search(lambda size: math.inf, 512, 5000)[0] == 0
    assert search(lambda size: linear(size) if size < 20 else math.inf, 512, 5000)[0] == 16
    assert search(lambda size: linear(size) if size < 3 else math.inf, 512, 5000)[0] == 2


def test_the_whole_share_may_need_less_than_the_line_says():
    """Without gradient caching the gradients are not allocated beside the activations."""

    def peak(size):
        return linear(size) - (300 if size == 512 else 0)

    assert search(peak, 512, 5900)[0] == 488
    assert search(peak, 512, 5900, spared=300)[0] == 512
    assert search(peak, 512, 5800, spared=300)[0] == 480


def test_the_ranks_take_what_fits_on_all_of_them():
    found, _ = search(linear, 512, 6000, ranks=TwoRanks(0, 2, None))
    assert found == (5850 / 1.5 - 1000) // 80 * 8


def test_the_passes_leave_no_trace(monkeypatch, tmp_path):
    """On the CPU, with numbers in the place of a GPU's memory. The bundled model has batch normalisation."""
    flags = f"--global-batch-size 96 --workers 0 --loss fastclip-v2 --name run --logs {tmp_path}"
    job = set_up(parse_command(flags.split()).settings)
    sizes = [0]
    job.context.towers.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: linear(sizes[-1]))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1000)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 600)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 5000))
    for name in ("reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    before = {name: tensor.clone() for name, tensor in job.state.tensors().items()}
    size = probe_micro_batch(job.context, job.model, share=96, optimizer="adamw", fsdp=False)
    assert size == 40 and sizes[1:] == [8, 8, 32, 32, 96, 96, 40, 40]  # 0.92 * 1600 bytes hold 47
    assert all(parameter.grad is None for parameter in job.context.parameters)
    for name, tensor in job.state.tensors().items():
        assert torch.equal(tensor, before[name]), name

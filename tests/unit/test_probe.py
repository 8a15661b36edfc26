"""The largest micro-batch and the fastest number of threads, with functions in the place of measurements."""

import json
import math

import pytest
import torch
from checkpoint_runs import job_of, train

from leanclip.cli.train import parse_command
from leanclip.distributed import Ranks
from leanclip.training import probe, set_up
from leanclip.training.probe import Threads, fastest_threads, largest_micro_batch, probe_micro_batch

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

    return largest_micro_batch(measure, share=share, room=room, ranks=ranks, **options).size, sizes


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
    size, peak = probe_micro_batch(job.context, job.model, share=96, optimizer="adamw", fsdp=False)
    assert (size, peak) == (40, linear(40))  # 0.92 * 1600 bytes hold 47
    assert sizes[1:] == [8, 8, 32, 32, 96, 96, 40, 40]
    assert all(parameter.grad is None for parameter in job.context.parameters)
    torch.testing.assert_close(job.state.tensors(), before, rtol=0, atol=0)


class Passes:
    """Passes of a machine: seconds of one sample by the number of threads, and the share of a core that one gets."""

    def __init__(self, seconds, processor=1.0):
        self.seconds, self.processor, self.measured = seconds, processor, []

    def __call__(self, threads, samples):
        self.measured.append((threads, samples))
        return self.seconds[threads] * samples, self.seconds[threads] * samples * self.processor


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({1: 0.01, 4: 0.004, 8: 0.002}, 8),
        ({1: 0.01, 4: 0.004, 8: 0.0038}, 4),  # about as fast
        ({1: 0.01, 4: 0.15, 8: 0.2}, 1),  # beside other load
        ({1: 2.0, 4: 0.6, 8: 0.5}, 8),  # a large model: a few samples
    ],
)
def test_the_fastest_number_of_threads(seconds, chosen, monkeypatch):
    monkeypatch.setattr("os.getloadavg", lambda: (0.1, 0.1, 0.1))
    passes = Passes(seconds)
    found = fastest_threads([1, 4, 8], passes, 64, ALONE)
    assert found.number == chosen and found.seconds_per_step == pytest.approx(64 * seconds[chosen])
    assert len(found.notes) == 1 and f"{chosen}, the fastest of 1, 4, 8" in found.notes[0]
    assert sum(seconds[threads] * samples for threads, samples in passes.measured) < max(60 * seconds[1], 10)


def test_ranks_choose_the_same_number():
    """The other rank is slower with many threads."""

    class Other(Ranks):
        def all_gather_objects(self, value):
            return [value, 0.3 if value < 0.05 else value]

    assert fastest_threads([1, 2], Passes({1: 0.01, 2: 0.004}), 8, Other(0, 2, None)).number == 1


@pytest.mark.parametrize(("processor", "load"), [(0.5, 0.1), (1.0, 1e6)])
def test_a_busy_host_is_reported(processor, load, monkeypatch):
    monkeypatch.setattr("os.getloadavg", lambda: (load, load, load))
    notes = fastest_threads([1], Passes({1: 0.01}, processor), 8, ALONE).notes
    assert notes[1].startswith("warning: ") and f"load average {load:.1f}" in notes[1]


@pytest.fixture
def free_threads(monkeypatch):
    """As in a program in which nobody has chosen."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    torch.set_num_threads(2)


def test_measured_passes_leave_no_trace(free_threads, tmp_path):
    """The bundled model has batch normalisation, and the loss per-sample state."""
    flags = f"--global-batch-size 96 --workers 0 --loss fastclip-v2 --name run --logs {tmp_path}".split()
    measured = set_up(parse_command(flags).settings)
    fixed = set_up(parse_command([*flags, "--threads", "1"]).settings)
    assert measured.threads in (1, 2) and measured.seconds_per_step is not None and measured.seconds_per_step > 0
    assert fixed.threads == torch.get_num_threads() == 1 and (fixed.seconds_per_step or 0) > 0
    assert any("CPU threads" in note for note in measured.notes) and not fixed.notes
    torch.testing.assert_close(measured.state.tensors(), fixed.state.tensors(), rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in measured.context.parameters)


def test_a_resumed_run_keeps_its_threads(free_threads, tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "fastest_threads", lambda *_: Threads(2, 0.5, ("measured",)))
    assert train(tmp_path) == 0
    newest = json.loads((tmp_path / "logs/run/checkpoints/last/state.json").read_text())
    assert (newest["threads"], newest["processes"]) == (2, 1)
    assert json.loads((tmp_path / "logs/run/run.json").read_text())["threads"] == 2
    assert "threads" not in (tmp_path / "logs/run/config.toml").read_text()
    monkeypatch.setattr(probe, "fastest_threads", lambda *_: Threads(1, notes=("measured",)))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    job = job_of(tmp_path, resume="auto")
    assert job.threads == torch.get_num_threads() == 2 and "2, as the run began with" in str(job.notes)
    assert "--threads 1, the run has 2" in job_of(tmp_path, resume="auto", threads=1).notes[0]
    monkeypatch.setattr("os.cpu_count", lambda: 1)  # another machine
    assert job_of(tmp_path, resume="auto").threads == 1


def test_the_log_says_what_decided_the_threads(free_threads, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    job = job_of(tmp_path)
    assert job.threads == 1 and (job.seconds_per_step or 0) > 0  # from which the summary expects a time
    assert any("1, as OMP_NUM_THREADS says" in note for note in job.notes)
    measured = []
    monkeypatch.setattr(probe, "_measured_pass", lambda *_: measured.append)
    many = job_of(tmp_path, threads=64)
    assert many.threads == 64 and any("warning: --threads 64 on 2 cores" in note for note in many.notes)
    assert not measured  # such a pass may take minutes
    torch.set_num_threads(1)

"""Runs of real processes that are killed at random moments and resumed."""

import contextlib
import json
import multiprocessing
import os
import random
import signal
import socket
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
from ranks_job import CONTEXT
from training_worker import vit_file

from leanclip.checkpointing.storage import StoredTensors
from leanclip.data.datasets import BUNDLED
from leanclip.models import step_directories

VOLATILE = ("seconds", "samples_per_second", "data_wait", "resident_gib", "loss_collectives", "loss_bytes")


class Settings(NamedTuple):
    steps: int = 16
    save_every: int = 3
    loss: str = "fastclip-v2"
    precision: str = "fp64"
    workers: int = 1
    epochs: int = 9
    timeout: float = 20.0
    more: tuple[str, ...] = ()

    def arguments(self, folder, logs):
        vit = vit_file(folder, text={"context_length": 77, "vocab_size": 49408})
        return [
            "train", "--train-data", str(BUNDLED / "val-*.tar"), "--model", vit, "--global-batch-size", "18",
            "--epochs", str(self.epochs), "--max-steps", str(self.steps), "--precision", self.precision,
            "--device", "cpu", "--workers", str(self.workers), "--loss", self.loss, "--logs", str(logs),
            "--name", "run", "--log-every", "1", "--eval-every", "0", "--save-every", str(self.save_every),
            "--warmup", "2", "--lr", "0.01", "--seed", "4", "--report-to", "none",
            "--dist-timeout", str(self.timeout), "--resume", "auto", *self.more,
        ]  # fmt: skip


class Job:
    """The processes of one start of a run."""

    def __init__(self, settings, size, folder, logs, *, hanging_rank=None):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.folder, self.run = Path(folder), Path(logs) / "run"
        self.output = self.folder / f"output-{time.monotonic_ns()}"
        self.processes = [
            CONTEXT.Process(
                target=_rank,
                args=(
                    settings.arguments(folder, logs),
                    rank,
                    size,
                    port,
                    f"{self.output}-{rank}",
                    rank == hanging_rank,
                ),
            )
            for rank in range(size)
        ]
        for process in self.processes:
            process.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()

    def wait(self, seconds=240):
        """The exit codes of all ranks."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.1, deadline - time.monotonic()))
        codes = [process.exitcode for process in self.processes]
        assert None not in codes, f"still running: {codes}\n{self.printed()}"
        return codes

    def printed(self, rank="*"):
        return "\n".join(path.read_text() for path in sorted(self.folder.glob(f"{self.output.name}-{rank}")))

    def lines(self):
        path = self.run / "metrics.jsonl"
        try:
            return path.read_bytes().count(b"\n")
        except FileNotFoundError:  # not yet, or restarted
            return 0

    @property
    def over(self):
        return all(process.exitcode is not None for process in self.processes)

    def until(self, condition, seconds=120):
        """Wait for the condition, or for the end of the run. Returns whether it was met."""
        deadline = time.monotonic() + seconds
        while not condition():
            if self.over:
                return False
            assert time.monotonic() < deadline, self.printed()
            time.sleep(0.002)
        return True

    def send(self, number, ranks=None):
        """To the processes of these ranks, or of all, each with its loader workers."""
        for process in self.processes if ranks is None else [self.processes[rank] for rank in ranks]:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)


def _rank(arguments, rank, size, port, output, hangs):
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a script ignore it
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }  # fmt: skip
    stream = Path(output).open("w", buffering=1)  # noqa: SIM115
    os.dup2(stream.fileno(), 1)
    os.dup2(stream.fileno(), 2)
    sys.stdout = sys.stderr = stream
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # as in a process that was not forked
    import faulthandler

    from leanclip.cli import main

    faulthandler.enable(stream)
    if hangs:
        _hang_in_third_step()
    main(arguments)


def _hang_in_third_step():
    from leanclip.training import loop

    original, steps = loop.training_step, []

    def training_step(*arguments):
        steps.append(1)
        if len(steps) == 3:
            time.sleep(300)
        return original(*arguments)

    loop.training_step = training_step


KINDS = ("all", "one", "writing", "term", "usr1", "int")
CODES = {"term": 75, "usr1": 75, "int": 130}


def inject(job, kind, draw, steps, left):
    """Kill or signal a running job at a random moment, early enough for `left` faults. Returns whether it ran."""
    if kind == "writing":
        skip = draw.randrange(2)
        seen: set[str] = set()

        def writing():
            seen.update(path.name for path in (job.run / "checkpoints").glob(".step_*.tmp"))
            return len(seen) > skip

        running = job.until(writing)
        time.sleep(draw.uniform(0, 0.03))
    else:
        line = job.lines() + draw.randrange(1, max(2, (steps - job.lines()) // left))
        running = job.until(lambda: job.lines() >= line)
        time.sleep(draw.uniform(0, 0.1))
    if kind == "one":
        job.send(signal.SIGKILL, [draw.randrange(len(job.processes))])
    else:
        job.send({"term": signal.SIGTERM, "usr1": signal.SIGUSR1, "int": signal.SIGINT}.get(kind, signal.SIGKILL))
    return running and not job.over


class Result(NamedTuple):
    tensors: dict
    metrics: list
    position: dict


def result(logs, steps):
    """The result of a finished run, without times and values that depend on the number of processes."""
    run = Path(logs) / "run"
    newest = run / "checkpoints" / f"step_{steps:08d}"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    metrics = [{name: value for name, value in line.items() if name not in VOLATILE} for line in lines]
    position = json.loads((newest / "state.json").read_text())["position"]
    tensors = {
        name: value
        for name, value in StoredTensors.open(newest / "state").read().items()
        if not name.startswith("random.")
    }
    assert not list((run / "checkpoints").glob(".*")), "incomplete files are left"
    assert json.loads((run / "run.json").read_text())["status"] == "finished"
    assert max(step_directories(run / "checkpoints"))[0] == steps
    return Result(tensors, metrics, {name: value for name, value in position.items() if name != "seconds"})


def finish(settings, size, folder, logs):
    with Job(settings, size, folder, logs) as job:
        codes = job.wait()
        assert codes == [0] * size, f"{codes}\n{job.printed()}"
    return result(logs, settings.steps)


def interrupted(settings, folder, logs, kinds, sizes, seed):
    """The result of a run with one fault of each kind, which starts on 2 ranks and resumes on each of the sizes."""
    draw = random.Random(seed)
    faults = []
    for number, (kind, size) in enumerate(zip(kinds, (2, *sizes), strict=False)):
        with Job(settings, size, folder, logs) as job:
            running = inject(job, kind, draw, settings.steps, left=len(kinds) - number)
            codes = job.wait()
            faults.append((kind, size, running, codes))
            if kind in CODES and running and any(codes):
                assert codes == [CODES[kind]] * size, f"{codes}\n{job.printed()}"
    return finish(settings, sizes[-1], folder, logs), faults


def compare(found, expected, *, exact, tolerance=1e-8):
    assert found.position == expected.position
    lines, expected_lines = ([(line["kind"], line["step"]) for line in run.metrics] for run in (found, expected))
    assert lines == expected_lines
    assert found.tensors.keys() == expected.tensors.keys()
    if exact:
        assert found.metrics == expected.metrics
        torch.testing.assert_close(found.tensors, expected.tensors, rtol=0, atol=0)
        return
    for line, other in zip(found.metrics, expected.metrics, strict=True):
        if line["kind"] != "train":
            continue
        assert abs(line["loss"] - other["loss"]) <= tolerance * max(1.0, abs(other["loss"])), (line, other)
    if tolerance < 1e-7:
        torch.testing.assert_close(found.tensors, expected.tensors, rtol=tolerance, atol=tolerance)

"""A run that is killed and resumed ends with the result of an uninterrupted one."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest
from kill_job import KINDS, Settings, compare, finish, interrupted, result
from ranks_job import processes_where


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    return finish(Settings(), 2, folder, folder / "logs")


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("all", 2),
        ("one", 2),
        ("writing", 2),
        ("term", 3),
        *(pytest.param(kind, size, marks=pytest.mark.slow) for kind, size in (("usr1", 1), ("int", 2))),
    ],
    ids=lambda value: str(value),
)
def test_a_killed_run_ends_like_an_uninterrupted_one(kind, size, uninterrupted, tmp_path):
    found, faults = interrupted(Settings(), tmp_path, tmp_path / "logs", [kind], [size], seed=KINDS.index(kind))
    assert faults[0][2], faults  # it was still running
    compare(found, uninterrupted, exact=size == 2)


@pytest.mark.slow
def test_a_run_resumes_after_torchrun_restarts_a_killed_rank(uninterrupted, tmp_path):
    arguments = Settings().arguments(tmp_path, tmp_path / "logs")
    at = arguments.index("--resume")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "2", "--monitor-interval", "0.2", "-m", "--", "leanclip"]
    run = tmp_path / "logs" / "run"
    with (tmp_path / "output").open("w") as output:
        torchrun = subprocess.Popen(
            [*command, *arguments[:at], *arguments[at + 2 :], "--overwrite"],
            env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
    deadline = time.monotonic() + 120
    while not (run / "checkpoints" / "step_00000006").exists():
        assert torchrun.poll() is None and time.monotonic() < deadline, (tmp_path / "output").read_text()
        time.sleep(0.01)
    ranks = processes_where(1, torchrun.pid)
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    try:
        assert torchrun.wait(timeout=150) == 0, (tmp_path / "output").read_text()
    finally:
        torchrun.kill()
    assert "resumed from" in (tmp_path / "output").read_text().replace("\n", " ")
    compare(result(tmp_path / "logs", Settings().steps), uninterrupted, exact=True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(45))
def test_many_kills(seed, tmp_path):
    """Five injected faults for each of 45 runs, of all kinds, on 1 to 3 ranks, in float64 and float32."""
    draw = random.Random(seed)
    kinds = [draw.choice(KINDS) for _ in range(5)]
    same = seed % 2 == 0
    sizes = [2 if same else draw.choice((1, 2, 3)) for _ in kinds]
    settings = Settings(
        steps=40,
        save_every=draw.choice((1, 2, 5)),
        loss=draw.choice(("fastclip-v2", "fastclip-v3", "infonce")),
        precision="fp64" if seed % 4 < 2 else "fp32",
        workers=draw.choice((0, 1)),
        more=(*(["--fsdp"] if draw.random() < 0.25 and same else []), *(["--ema", "0.9"] if seed % 3 == 0 else [])),
    )
    (tmp_path / "expected").mkdir()
    expected = finish(settings, 2, tmp_path / "expected", tmp_path / "expected" / "logs")
    found, faults = interrupted(settings, tmp_path, tmp_path / "logs", kinds, sizes, seed=seed)
    shown = " ".join(f"{kind}@{size}{'' if running else '(late)'}" for kind, size, running, _ in faults)
    print(f"seed {seed}: {settings.loss} {settings.precision} {' '.join(settings.more)} faults: {shown}")
    compare(found, expected, exact=same, tolerance=1e-8 if settings.precision == "fp64" else 1e-5)

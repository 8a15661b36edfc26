"""SLURM: tasks that srun starts train together, and the example batch files are valid."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ranks_job import processes_where

from leanclip.cli.train import parse_command
from leanclip.runs.defaults import loss_name

EXAMPLES = [Path(__file__).parents[2] / "examples" / "slurm" / f"{name}.sbatch" for name in ("srun", "torchrun")]


def test_tasks_of_srun_train_together(tmp_path):
    command = "train --max-steps 2 --global-batch-size 33 --eval-every 0 --device cpu --workers 0".split()
    command += f"--name slurm --logs {tmp_path} --dist-timeout 60".split()
    tasks = []
    for task in range(2):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        environment |= {
            "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task), "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NODELIST": "localhost", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        tasks.append(
            subprocess.Popen(
                [sys.executable, "-m", "leanclip", *command], env=environment, text=True, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )  # fmt: skip
    for task in tasks:
        output, _ = task.communicate(timeout=150)
        assert task.returncode == 0, output[-2000:]
    assert json.loads((tmp_path / "slurm" / "run.json").read_text())["processes"] == 2


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_examples_parse(example):
    subprocess.run(["bash", "-n", str(example)], check=True)
    text = example.read_text().replace("\\\n", " ")
    assert "#SBATCH --requeue" in text and "scontrol requeue" in text
    (command,) = re.findall(r"leanclip train ([^&\n]*)", text)
    settings = parse_command(shlex.split(command)).settings
    assert loss_name(settings) == "fastclip-v3" and settings.run.save_every == 1000
    assert settings.run.resume == "auto"


FAKES = {
    "scontrol": 'if [ "$1" = show ]; then echo here; else echo "$@" >> "$FAKES/requeued"; fi',
    "srun": 'while [ "${1#-}" != "$1" ]; do shift; done; exec "$@"',
    "torchrun": 'trap \'cp "$FAKES/stopped.json" logs/cc12m-v3/run.json; exit 143\' TERM; touch "$FAKES/up"\n'
    'while [ -z "$QUICK" ]; do sleep 0.05; done',
    "leanclip": 'trap "exit 75" USR1; touch "$FAKES/up"; while [ -z "$QUICK" ]; do sleep 0.05; done',
}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
@pytest.mark.parametrize("stopped", [True, False])
def test_examples_requeue_stopped_jobs(example, stopped, tmp_path):
    """With stand-ins for SLURM's programs: a preempted job is requeued, a finished one is not."""
    for name, body in FAKES.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    run = tmp_path / "logs" / "cc12m-v3"
    run.mkdir(parents=True)
    (run / "run.json").write_text('{"status": "finished"}')
    (tmp_path / "stopped.json").write_text('{"status": "stopped"}')
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "FAKES": str(tmp_path), "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "here", "SLURM_NNODES": "1", "SLURM_GPUS_ON_NODE": "1", "QUICK": "" if stopped else "1",
    }  # fmt: skip
    job = subprocess.Popen(["bash", str(example)], cwd=tmp_path, env=environment, start_new_session=True)
    if stopped:
        while not (tmp_path / "up").exists():
            time.sleep(0.05)
        time.sleep(0.2)
        if example.name == "srun.sbatch":  # SLURM signals the tasks, or with B: the script
            for pid in processes_where(3, job.pid):
                if b"leanclip\0train" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGUSR1)
        else:
            os.kill(job.pid, signal.SIGUSR1)
    code = job.wait(timeout=30)
    assert (tmp_path / "requeued").exists() == stopped
    assert (code != 0) == stopped

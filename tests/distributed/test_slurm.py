"""SLURM: tasks as srun starts them train together, and the example batch files say what leanclip understands."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from leanclip.cli.train import parse_command

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "slurm").glob("*.sbatch"))


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
def test_examples_are_understood(example):
    subprocess.run(["bash", "-n", str(example)], check=True)
    text = example.read_text().replace("\\\n", " ")
    assert "#SBATCH --requeue" in text and "scontrol requeue" in text
    (command,) = re.findall(r"leanclip train (.*) &", text)
    words = [word for word in shlex.split(command) if not word.startswith("${RESUME")]
    settings = parse_command(words).settings
    assert settings.run.loss == "fastclip-v3" and settings.run.save_every == 1000


def test_there_are_examples():
    assert len(EXAMPLES) == 2

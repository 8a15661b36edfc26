"""Ctrl-C during training: the run saves and can be resumed; a second Ctrl-C ends it at once."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_checkpoint import arguments, names, steps_of_metrics, train
from torch._C._distributed_c10d import HashStore
from torch.utils.data import Dataset

from leanclip.data.loader import _data_loader
from leanclip.errors import stopped_code
from leanclip.runs.stopping import CTRL_C, INTERRUPTED, REPEAT_CTRL_C_SECONDS, Stopping
from machine import wait_until

# As a shell starts it: background jobs of a script, which tests may be, ignore SIGINT.
LEANCLIP = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from leanclip.cli import main; "
SLOW_DISK = "import time, leanclip.checkpointing.checkpoint as c; c.write_tensors = lambda *_: time.sleep(60); "


@pytest.fixture
def handling():
    """A Stopping that handles signals after the start of a run, and the lines that it printed."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    stop, printed = Stopping(), []
    stop.notify = printed.append
    try:
        with stop.handling_signals():
            yield stop, printed
    finally:
        signal.signal(signal.SIGINT, before)


def send(number):
    os.kill(os.getpid(), number)
    time.sleep(0.01)  # for the thread that prints


def test_ctrl_c_from_terminal_and_launcher_counts_once(handling):
    stop, printed = handling
    send(signal.SIGINT)
    try:
        send(signal.SIGINT)
    except KeyboardInterrupt:
        pytest.fail("counted as a second one")
    assert len(printed) == 1 and printed[0].startswith("Ctrl-C")
    assert stop.after(1) == CTRL_C


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])  # the latter from torchrun, for the second Ctrl-C
def test_a_second_ctrl_c_ends_at_once(number, handling):
    send(signal.SIGINT)
    time.sleep(REPEAT_CTRL_C_SECONDS + 0.05)
    with pytest.raises(KeyboardInterrupt):
        send(number)


def test_ctrl_c_before_the_first_step_ends_at_once(handling):
    stop, _ = handling
    stop.notify = None
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_before_the_first_step_ends_a_single_process_at_once(number, handling):
    stop, _ = handling
    stop.notify = None  # nothing to save yet
    with pytest.raises(SystemExit) as raised:
        send(number)
    assert raised.value.code == 75
    stop.store = HashStore()  # others would wait for this process
    send(number)
    assert stop.signal == number


def test_a_background_job_ignores_ctrl_c(handling):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Stopping().handling_signals():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_all_processes_stop_after_the_same_step(handling):
    """The one with the signal and one without, as in a job on two hosts."""
    store = HashStore()
    pressed, other = Stopping(store), Stopping(store)
    pressed.signal = signal.SIGINT
    assert (pressed.after(4), other.after(4)) == (None, None)
    assert (pressed.after(5), other.after(5)) == (CTRL_C, CTRL_C)


class Handler(Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, _):
        return signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_loader_workers_ignore_ctrl_c():
    (ignored,) = _data_loader(Handler(), workers=1)
    assert ignored is True


def started(folder, *, before="", **changed):
    """A run at its third step, with its loader workers in a separate session, as in a terminal."""
    words = arguments(folder, max_steps=None, epochs=100000, save_every=0, workers=2, **changed)
    at = words.index("--max-steps")
    code = f"{LEANCLIP}{before}import sys; sys.argv[1:] = {words[:at] + words[at + 2 :]!r}; main()"
    job = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True,
    )  # fmt: skip
    logged = folder / "logs/run/metrics.jsonl"
    wait_until(lambda: job.poll() is not None or (logged.exists() and len(steps_of_metrics(folder)) >= 3), 60)
    assert job.poll() is None
    return job


def test_an_interrupted_run_saves_and_resumes(tmp_path, capsys):
    job = started(tmp_path)
    os.killpg(job.pid, signal.SIGINT)
    os.killpg(job.pid, signal.SIGINT)
    output = job.communicate(timeout=60)[0].replace("\n", " ")
    assert job.returncode == INTERRUPTED, output
    assert "Traceback" not in output and output.count("Ctrl-C:") == 1 and "--resume auto" in output
    (step,) = [int(name[5:]) for name in names(tmp_path) if name.startswith("step_")]
    assert json.loads((tmp_path / "logs/run/run.json").read_text())["status"] == "stopped"
    assert train(tmp_path, save_every=0, resume="auto", max_steps=step + 2, epochs=100000) == 0
    assert re.search(rf"resumed from .* at step {step}", capsys.readouterr().out.replace("\n", " "))
    assert steps_of_metrics(tmp_path) == list(range(1, step + 3))


def test_the_last_line_of_a_stopped_run_is_that_of_its_checkpoint(tmp_path):
    assert train(tmp_path, max_hours=1e-9, log_every=1000, max_steps=50, epochs=100) == stopped_code()
    (step,) = [int(name[5:]) for name in names(tmp_path) if name.startswith("step_")]
    assert steps_of_metrics(tmp_path) == [step] and step < 50


def test_a_second_ctrl_c_does_not_wait_for_a_slow_disk(tmp_path):
    job = started(tmp_path, before=SLOW_DISK)
    os.killpg(job.pid, signal.SIGINT)
    time.sleep(REPEAT_CTRL_C_SECONDS + 0.5)
    assert job.poll() is None, "it should be saving"
    began = time.monotonic()
    os.killpg(job.pid, signal.SIGINT)
    output = job.communicate(timeout=60)[0]
    assert time.monotonic() - began < 5
    assert job.returncode == INTERRUPTED and "Traceback" not in output, output
    assert "interrupted" in output


@pytest.mark.parametrize(("number", "restarts", "code"), [(signal.SIGTERM, "0", 75), (signal.SIGUSR1, "3", 0)])
def test_a_signal_before_the_run_starts(tmp_path, number, restarts, code):
    """The exit code is 0 if torchrun would restart it. The handler is set before torch is imported."""
    environment = os.environ | {"TORCHELASTIC_MAX_RESTARTS": restarts}
    command = [sys.executable, "-m", "leanclip", "train", "--logs", str(tmp_path / "logs")]
    run = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    status = Path(f"/proc/{run.pid}/status")
    while not int(re.findall(r"SigCgt:\s*(\w+)", status.read_text())[0], 16) >> (number - 1) & 1:
        time.sleep(0.005)
    run.send_signal(number)
    error = run.communicate(timeout=30)[1]
    assert run.returncode == code and number.name in error and len(error.splitlines()) == 1, error
    assert not (tmp_path / "logs").exists()

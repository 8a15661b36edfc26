"""Ctrl-C while a run trains: it saves and can be gone on with; pressed again, it ends at once."""

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
from leanclip.runs.stopping import CTRL_C, INTERRUPTED, REPEAT_CTRL_C_SECONDS, Stopping

# As a shell starts it: what runs in the background of a script, as tests may, has SIGINT ignored.
LEANCLIP = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from leanclip.cli import main; "
SLOW_DISK = "import time, leanclip.checkpointing.checkpoint as c; c.write_tensors = lambda *_: time.sleep(60); "


@pytest.fixture
def listening():
    """A Stopping that takes signals, with a run that has begun, and what it said."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    stop, said = Stopping(), []
    stop.notify = said.append
    try:
        with stop.handling_signals():
            yield stop, said
    finally:
        signal.signal(signal.SIGINT, before)


def send(number):
    os.kill(os.getpid(), number)
    time.sleep(0.01)  # for the thread that speaks


def test_sent_by_terminal_and_launcher_it_is_one(listening):
    stop, said = listening
    send(signal.SIGINT)
    try:
        send(signal.SIGINT)
    except KeyboardInterrupt:
        pytest.fail("taken for a second one")
    assert len(said) == 1 and "stops after this step and saves" in said[0]
    assert stop.after(1) == CTRL_C


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])  # the latter from torchrun, for the second Ctrl-C
def test_the_second_one_ends_at_once(number, listening):
    send(signal.SIGINT)
    time.sleep(REPEAT_CTRL_C_SECONDS + 0.05)
    with pytest.raises(KeyboardInterrupt):
        send(number)


def test_with_nothing_to_save_it_ends_at_once(listening):
    stop, _ = listening
    stop.notify = None
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)


def test_in_the_background_of_a_script_it_stays_ignored(listening):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Stopping().handling_signals():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_all_processes_stop_after_the_same_step(listening):
    """The one that got it and one that did not, as in a job on two hosts."""
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


def test_workers_leave_it_to_the_process_that_trains():
    (ignored,) = _data_loader(Handler(), workers=1)
    assert ignored is True


def started(folder, *, before="", **changed):
    """A run with its loader's workers in a session of its own, as under a terminal, when it is at step three."""
    words = arguments(folder, max_steps=None, epochs=100000, save_every=0, workers=2, **changed)
    at = words.index("--max-steps")
    code = f"{LEANCLIP}{before}import sys; sys.argv[1:] = {words[:at] + words[at + 2 :]!r}; main()"
    job = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not (folder / "logs/run/metrics.jsonl").exists() or len(steps_of_metrics(folder)) < 3:
        assert job.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    return job


def test_it_saves_and_the_run_goes_on(tmp_path, capsys):
    job = started(tmp_path)
    os.killpg(job.pid, signal.SIGINT)
    os.killpg(job.pid, signal.SIGINT)
    said = job.communicate(timeout=60)[0].replace("\n", " ")
    assert job.returncode == INTERRUPTED, said
    assert "Traceback" not in said and said.count("Ctrl-C: the run stops after this step and saves") == 1
    assert "stopped, since Ctrl-C was pressed: the same command with --resume auto" in said
    (step,) = [int(name[5:]) for name in names(tmp_path) if name.startswith("step_")]
    assert json.loads((tmp_path / "logs/run/run.json").read_text())["status"] == "stopped"
    assert train(tmp_path, save_every=0, resume="auto", max_steps=step + 2, epochs=100000) == 0
    assert re.search(rf"resumed from .* at step {step}", capsys.readouterr().out.replace("\n", " "))
    assert steps_of_metrics(tmp_path) == list(range(1, step + 3))


def test_the_second_one_does_not_wait_for_a_slow_disk(tmp_path):
    job = started(tmp_path, before=SLOW_DISK)
    os.killpg(job.pid, signal.SIGINT)
    time.sleep(REPEAT_CTRL_C_SECONDS + 0.5)
    assert job.poll() is None, "it should be saving"
    began = time.monotonic()
    os.killpg(job.pid, signal.SIGINT)
    said = job.communicate(timeout=60)[0]
    assert time.monotonic() - began < 5
    assert job.returncode == 130 and "Traceback" not in said, said
    assert "interrupted; to continue from the last checkpoint" in said.replace("\n", " ")


@pytest.mark.parametrize(("number", "restarts", "code"), [(signal.SIGTERM, "0", 75), (signal.SIGUSR1, "3", 0)])
def test_a_signal_while_it_still_loads_asks_for_another_start(tmp_path, number, restarts, code):
    """0 where torchrun would start it again by itself. Its handler is set long before torch is loaded."""
    environment = os.environ | {"TORCHELASTIC_MAX_RESTARTS": restarts}
    command = [sys.executable, "-m", "leanclip", "train", "--logs", str(tmp_path / "logs")]
    run = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    status = Path(f"/proc/{run.pid}/status")
    while not int(re.findall(r"SigCgt:\s*(\w+)", status.read_text())[0], 16) >> (number - 1) & 1:
        time.sleep(0.005)
    run.send_signal(number)
    told = run.communicate(timeout=30)[1]
    assert (run.returncode, told) == (code, f"leanclip: {number.name} before the first step\n")
    assert not (tmp_path / "logs").exists()
